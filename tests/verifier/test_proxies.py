"""A client behind a proxy of ours has its own address in the log, and nobody can give himself one."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from cloud_verifier.logs import JsonFormatter, LineFormatter
from cloud_verifier.serving.proxies import Proxies
from tests.verifier import kit

NGINX = "10.0.0.5:4711"


@pytest.mark.parametrize(
    ("named", "peer", "headers", "client"),
    [
        ("10.0.0.5", NGINX, ["192.0.2.7"], "192.0.2.7:0"),
        ("10.0.0.0/24", NGINX, ["192.0.2.7"], "192.0.2.7:0"),
        ("10.0.0.5", NGINX, ["6.6.6.6, 192.0.2.7"], "192.0.2.7:0"),
        ("10.0.0.5,192.0.2.7", NGINX, ["203.0.113.1, 192.0.2.7"], "203.0.113.1:0"),
        ("10.0.0.5", NGINX, ["6.6.6.6", "2001:db8::7"], "2001:db8::7:0"),
        ("*", NGINX, ["203.0.113.1, 192.0.2.7"], "203.0.113.1:0"),
        ("127.0.0.1,::1", "::1:99", ["192.0.2.7"], "192.0.2.7:0"),
        # deploy/nginx.conf tells the port, too.
        ("10.0.0.5", NGINX, ["192.0.2.7:99"], "192.0.2.7:99"),
        ("10.0.0.5", NGINX, ["[2001:db8::7]:99"], "2001:db8::7:99"),
        ("10.0.0.5", NGINX, ["6.6.6.6:1, 192.0.2.7:99"], "192.0.2.7:99"),
        ("127.0.0.1", "127.0.0.1:7", ["127.0.0.1:99"], "127.0.0.1:99"),
        ("10.0.0.5", NGINX, ["192.0.2.7:port"], NGINX),
        # Who is no proxy of ours may say what he likes, and so may one that tells no address.
        ("127.0.0.1", NGINX, ["192.0.2.7"], NGINX),
        ("", NGINX, ["192.0.2.7"], NGINX),
        ("127.0.0.1", NGINX, ["192.0.2.7:99"], NGINX),
        ("10.0.0.5", NGINX, [], NGINX),
        ("10.0.0.5", NGINX, ["unknown"], NGINX),
        ("10.0.0.5", NGINX, ["a line\nof its own"], NGINX),
    ],
)
def test_an_address_is_a_proxys_word_of_those_that_are_named(
    named: str, peer: str, headers: list[str], client: str
) -> None:
    assert Proxies(named).client(peer, headers) == client


@pytest.mark.parametrize(("named", "told"), [("127.0.0.1", "192.0.2.7:0"), ("10.0.0.5", "127.")])
async def test_the_log_has_the_address_of_a_refused_client(
    named: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", named)
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    auth, *_ = kit.principals(tmp_path, "alice")
    headers = {"X-Forwarded-For": "192.0.2.7", "Authorization": "Bearer wrong"}
    async with kit.verifier(auth=auth) as running:
        with pytest.raises(InvalidStatus):
            await connect(running.transport.url, additional_headers=headers, proxy=None)
    (refused,) = [vars(one) for one in caplog.records if vars(one).get("event") == "unauthorized"]
    assert refused["peer"].startswith(told)


@pytest.mark.parametrize(
    ("peer", "shown"),
    [
        ("192.0.2.7:0", "192.0.2.7"),
        ("2001:db8::7:0", "2001:db8::7"),
        ("192.0.2.7:4710", "192.0.2.7:4710"),
    ],
)
def test_a_port_that_is_not_known_is_no_port_in_the_log(peer: str, shown: str) -> None:
    """All that came through a proxy on this machine was 127.0.0.1:0."""
    record = logging.LogRecord("cloud_verifier", logging.INFO, "", 0, "connected", (), None)
    record.peer = peer
    assert json.loads(JsonFormatter().format(record))["peer"] == shown
    assert f"peer={shown}" in LineFormatter().format(record).split("  ")
