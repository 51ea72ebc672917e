from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.settings import Settings
from moa.errors import ConfigError
from moa.wire import Limits


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_only_loopback_may_be_served_without_authentication(host: str) -> None:
    with pytest.raises(ConfigError, match="without authentication"):
        Settings(host=host)
    assert Settings(host=host, auth_tokens=Path("tokens")).host == host
    for loopback in (Settings().host, "127.9.9.9", "::1", "localhost"):
        assert Settings(host=loopback).auth_tokens is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"tls_cert": Path("c")},
        {"port": 70000},
        {"slots": 0},
        {"batch_wait_ms": -1},
        *({"openai": address} for address in ("x", "1:2:x", "99999", "0.0.0.0:80")),
        {"port": 8080, "openai": "8080"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _ = Settings(**wrong).openai_address


def test_an_endpoint_beside_the_port_and_a_slot_of_a_full_context_and_the_largest_draft() -> None:
    limits = Limits(
        max_context_tokens=100, max_prompt_tokens=100, max_tree_nodes=8, max_guess_tokens=32
    )
    assert Settings(limits=limits).slot_capacity == 108
    assert Settings(port=8080, openai="127.0.0.2:8080").openai_address == ("127.0.0.2", 8080)
