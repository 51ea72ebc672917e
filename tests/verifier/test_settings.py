from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.settings import Settings, is_loopback
from moa.errors import ConfigError
from moa.wire import Limits


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_only_loopback_may_be_served_without_authentication(host: str) -> None:
    with pytest.raises(ConfigError, match="without authentication"):
        Settings(host=host)
    assert Settings(host=host, auth_tokens=Path("tokens")).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(Settings().host)
    assert Settings(host=host).auth_tokens is None


@pytest.mark.parametrize("wrong", [{"tls_cert": Path("c")}, {"port": 70000}, {"slots": 0}, {"batch_wait_ms": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Settings(**wrong)


def test_a_slot_holds_a_full_context_and_the_largest_draft() -> None:
    limits = Limits(max_context_tokens=100, max_prompt_tokens=100, max_tree_nodes=8, max_chain_tokens=32)
    assert Settings(limits=limits).slot_capacity == 132


@pytest.mark.parametrize("address", ["x", "1:2:x", "99999", "0.0.0.0:80"])
def test_an_address_that_may_not_be(address: str) -> None:
    with pytest.raises(ConfigError):
        _ = Settings(openai=address).openai_address


def test_the_endpoint_has_an_address_of_its_own() -> None:
    with pytest.raises(ConfigError, match="a port of its own"):
        Settings(port=8080, openai="8080")
    assert Settings(port=8080, openai="127.0.0.2:8080").openai_address == ("127.0.0.2", 8080)
