"""Connections that never become one: an operator finds in figures and log why, and they fill neither."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import ssl
from pathlib import Path
from unittest.mock import Mock

import pytest

from cloud_verifier.logs import JsonFormatter, LineFormatter
from cloud_verifier.serving.connection import Connection
from tests.torture.tls import certificate
from tests.verifier import kit

_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)
_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
_OPENING = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


async def send(port: int, content: bytes, trusted: ssl.SSLContext | None = None) -> None:
    """Connect, send this, and read until the other end hangs up."""
    with contextlib.suppress(OSError):  # TLS's own errors are among these
        name = "localhost" if trusted is not None else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusted, server_hostname=name
        )
        writer.write(content)
        if not content:
            writer.write_eof()
        await reader.read()
        writer.close()


@pytest.mark.parametrize(
    ("secured", "content", "kind", "words"),
    [
        (False, _HELLO + b"\r\n", "tls_here", "its address is ws://"),
        (False, b"\x00\x01\xff\r\n\r\n", "no_request", "no HTTP request"),
        (False, _GET + b"\r\n", "no_websocket", "opens no websocket"),
        (False, b"POST /v1/completions HTTP/1.1\r\n\r\n", "no_websocket", "opens no websocket"),
        (False, _GET + _OPENING + b"Origin: http://a\x1b.b\r\n\r\n", "no_request", "no HTTP"),
        (False, _GET + _OPENING + b"Origin: http://a.b\r\n\r\n", "origin", "website was refused"),
        (False, _GET + _OPENING + b"\r\n", "handshake", "handshake failed (missing subprotocol)"),
        (True, _GET + b"\r\n", "no_tls", "its address is wss://"),
        (True, b"\x00\x01\xff\r\n\r\n", "tls", "a TLS handshake failed ("),
        (True, None, "tls", "a TLS handshake failed (the other end"),
    ],
)
async def test_each_kind_is_counted_and_logged_once_in_a_while(
    secured: bool,
    content: bytes | None,
    kind: str,
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    settings = kit.SETTINGS
    if secured:
        chain, key = certificate(tmp_path)
        settings = dataclasses.replace(settings, tls_cert=chain, tls_key=key)
    distrusting = ssl.create_default_context() if content is None else None
    async with kit.verifier(settings) as running, asyncio.timeout(kit.PATIENCE):
        counted = running.metrics.failed_connections.labels(kind)._value
        for times in (1, 2, 3):
            await send(running.transport.port, content or b"x", distrusting)
            while counted.get() < times:
                await asyncio.sleep(0.01)
        page = running.metrics.page().decode()
    assert page.count("moa_failed_connections_total{") == 1, "and no other kind"
    lines = [one for one in caplog.records if getattr(one, "event", "") == "failed_connection"]
    assert [one.levelname for one in lines] == ["WARNING"]
    assert words in lines[0].getMessage()
    assert vars(lines[0])["peer"].startswith("127.0.0.1:")
    assert json.loads(JsonFormatter().format(lines[0]))["kind"] == kind
    assert "kind=" not in LineFormatter().format(lines[0]), "the words say it"


@pytest.mark.parametrize("secured", [False, True])
async def test_a_probe_that_sends_nothing_is_no_failure(secured: bool, tmp_path: Path) -> None:
    settings = kit.SETTINGS
    if secured:
        chain, key = certificate(tmp_path)
        settings = dataclasses.replace(settings, tls_cert=chain, tls_key=key)
    async with kit.verifier(settings) as running, asyncio.timeout(kit.PATIENCE):
        await send(running.transport.port, b"")
        while len(running.transport._half_open):
            await asyncio.sleep(0.01)
        assert "moa_failed_connections_total{" not in running.metrics.page().decode()


def test_the_address_is_known_when_the_socket_is_gone() -> None:
    """Whose device it was could not be found: four kinds of lines had none."""
    connection = object.__new__(Connection)
    connection.transport = Mock(get_extra_info=lambda _: None)
    connection._peer = "192.0.2.7:5000"
    assert connection.peer == "192.0.2.7:5000"
