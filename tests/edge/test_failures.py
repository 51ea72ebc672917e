"""Ordinary failures, through real sockets: the answer goes on, and after recovery it ends verified and exact."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.events import Token
from edge_client.link.websocket import tls_context
from edge_client.tools.emulated_network import LinkProxy
from moa.model.target import Row, Step
from moa.process.listening import Port
from tests.edge import kit
from tests.edge.test_exact import truth
from tests.verifier import kit as verifier_kit

IDS = verifier_kit.prompt(3, 12)
COUNT = 24
SOON: dict[str, Any] = {"offline_after": 0.2, "reconnect_seconds": 0.2, "settle_seconds": 60.0, "connect_seconds": 1.0}
BOTH = pytest.mark.parametrize("draft", ["device", "server"])
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

PORTAL = b"<html><title>Welcome to Train WiFi</title><form>Accept our terms</form></html>"


def http(status: str, body: bytes = b"", *headers: str) -> Handler:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        writer.close()

    return answer


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1000):
            pass


TROUBLE: dict[str, Handler] = {
    "502": http("502 Bad Gateway"),
    "500": http("500 Internal Server Error"),
    "404": http("404 Not Found"),
    "a portal's page": http("200 OK", PORTAL, "Content-Type: text/html"),
    "a redirect": http("302 Found", b"", "Location: ws://127.0.0.1:9/elsewhere"),
    "reset": reset,
    "silent": silent,
    "garbage": http("nonsense", b"\x00" * 100),
}


@contextlib.asynccontextmanager
async def troubled(handler: Handler, port: int) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """A port with a failure until the second value is called; then it forwards to the verifier at `port`."""
    well, writers = False, list[asyncio.StreamWriter]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if not well:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await handler(reader, writer)
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pipe(reader, inner_writer), _pipe(inner_reader, writer))

    def recover() -> None:
        nonlocal well
        well = True

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], recover
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError, RuntimeError):
        writer.close()


async def survives(client: EdgeClient, recover: Callable[[], None], ids: Sequence[int] = IDS) -> kit.Reader:
    """An answer that continues during the failure and ends verified after it."""
    transcript = kit.Reader()
    async for event in client.generate(ids=ids):
        transcript.take(event)
        if isinstance(event, Token) and event.status == "provisional" and len(transcript.tokens) >= 3:
            recover()
    assert transcript.tokens == truth(ids)[:COUNT]
    assert all(transcript.verified)
    return transcript


@pytest.mark.parametrize(("trouble", "draft"), [*((trouble, "device") for trouble in TROUBLE), ("502", "server")])
async def test_what_answers_instead_of_a_verifier(trouble: str, draft: Any) -> None:
    device = kit.oracle([*IDS, *truth(IDS)])
    async with (
        kit.verifier() as running,
        troubled(TROUBLE[trouble], running.transport.port) as (port, recover),
        EdgeClient(
            verifier=f"ws://127.0.0.1:{port}", device=device, draft=draft, max_new_tokens=COUNT, **SOON
        ) as client,
    ):
        await survives(client, recover)


@BOTH
async def test_a_port_that_refuses(draft: Any) -> None:
    stack = contextlib.AsyncExitStack()
    async with kit.verifier() as running, stack:
        port = stack.enter_context(Port("127.0.0.1", 0)).number

        def recover() -> None:
            nonlocal opening
            opening = opening or asyncio.ensure_future(_forward(port, running.transport.port, stack))

        opening: asyncio.Future[None] | None = None
        async with EdgeClient(
            verifier=f"ws://127.0.0.1:{port}", device=kit.device(), draft=draft, max_new_tokens=COUNT, **SOON
        ) as client:
            await survives(client, recover)


async def _forward(port: int, to: int, stack: contextlib.AsyncExitStack) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(_pipe(reader, inner_writer), _pipe(inner_reader, writer))

    server = await asyncio.start_server(talk, "127.0.0.1", port)
    stack.callback(server.close)


async def test_a_name_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    known = False
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def resolve(host: Any, port: Any, **how: Any) -> Any:
        if host == "verifier.test":
            if not known:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            host = "127.0.0.1"
        return await real(host, port, **how)

    def recover() -> None:
        nonlocal known
        known = True

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    async with kit.verifier() as running:
        url = f"ws://verifier.test:{running.transport.port}"
        async with EdgeClient(verifier=url, device=kit.device(), max_new_tokens=COUNT, **SOON) as client:
            await survives(client, recover)


async def test_tls_that_fails() -> None:
    async with (
        kit.verifier() as running,
        EdgeClient(
            verifier=f"wss://localhost:{running.transport.port}", device=kit.device(), max_new_tokens=8, **SOON
        ) as client,
    ):
        transcript = await kit.transcribe(client, IDS, settle_seconds=0.5)
        assert len(transcript.tokens) == 8
        assert not any(transcript.verified)
        assert client.link is not None
        assert client.link.dialling.failures >= 1
        assert "wss://localhost" in str(client.link.dialling.last_error)
    assert isinstance(tls_context(""), ssl.SSLContext)


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "not a proxy", "http://[::1", "socks9://x"])
async def test_proxy_variables_do_not_stand_before_this_machine(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, proxy)
    async with (
        kit.verifier() as running,
        EdgeClient(verifier=running.transport.url, device=kit.device(), max_new_tokens=8) as client,
    ):
        assert all((await kit.transcribe(client, IDS)).verified)


async def test_a_malformed_proxy_is_an_ordinary_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "nonsense://[")
    async with EdgeClient(verifier="ws://10.255.255.1:9", device=kit.device(), max_new_tokens=8, **SOON) as client:
        transcript = await kit.transcribe(client, IDS, settle_seconds=0.3)
    assert len(transcript.tokens) == 8


@BOTH
async def test_a_verifier_that_stands_still_for_a_while(draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like SIGSTOP: connections stay open, no bytes move."""
    async with (
        kit.verifier() as running,
        LinkProxy("127.0.0.1", running.transport.port) as proxy,
        EdgeClient(verifier=proxy.url, device=kit.device(), draft=draft, max_new_tokens=COUNT, **SOON) as client,
    ):
        await client.wait_online(60)
        proxy.go_silent()
        await survives(client, proxy.restore)


async def test_a_target_that_takes_long_for_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    device = kit.oracle([*IDS, *truth(IDS)], 1.0)
    async with (
        kit.verifier() as running,
        EdgeClient(
            verifier=running.transport.url, device=device, draft="device", max_new_tokens=COUNT, offline_after=0.2
        ) as client,
    ):
        await client.wait_online(60)
        real = running.engine.target.forward

        def slow(rows: Sequence[Row]) -> Step:
            time.sleep(0.3)
            return real(rows)

        monkeypatch.setattr(running.engine.target, "forward", slow)
        transcript = await survives(client, lambda: None)
        assert client.link is not None
        assert client.link.connections == 1
    assert "provisional" in {event.status for event in transcript.events if isinstance(event, Token)}


async def test_a_silent_network_is_written_over_soon() -> None:
    async with (
        kit.verifier() as running,
        troubled(silent, running.transport.port) as (port, _),
        EdgeClient(verifier=f"ws://127.0.0.1:{port}", device=kit.device(), max_new_tokens=4) as client,
    ):
        began = time.perf_counter()
        async for event in client.generate(ids=IDS, settle_seconds=0.1):
            if isinstance(event, Token):
                break
        waited = time.perf_counter() - began
    assert waited < 1.5 + 5, "1 s of patience, and a machine that may be busy"
