"""Ordinary failures, through real sockets: the answer goes on, and after recovery it ends verified
and exact."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.events import Token
from edge_client.settings import ClientSettings
from edge_client.tools.emulated_network import LinkProxy
from edge_client.turn.deadlines import Patience
from moa.process.listening import Port
from moa.target.torch_target import Row, Step
from testing.ports import reserved_port
from tests.edge import kit
from tests.edge.test_exact import truth
from tests.test_listening import no_free_descriptor
from tests.verifier import kit as verifier_kit

IDS = verifier_kit.prompt(3, 12)
COUNT = 24
SOON: dict[str, Any] = {
    "offline_after": 0.2,
    "reconnect_seconds": 0.2,
    "settle_seconds": 60.0,
    "connect_seconds": 1.0,
}
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

PORTAL = b"<html><title>Welcome to Train WiFi</title><form>Accept our terms</form></html>"


def http(status: str, body: bytes = b"", *headers: str) -> Handler:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        lines = [
            f"HTTP/1.1 {status}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *headers,
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        writer.close()

    return answer


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1000):
        pass


TROUBLE: dict[str, Handler | None] = {
    "nobody there": None,
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
async def troubled(
    handler: Handler | None,
) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """An address with a failure until the second value is called; then a verifier is there."""
    writers = list[asyncio.StreamWriter]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert handler is not None
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)

    async def recover() -> None:
        await failing.aclose()
        await running.enter_async_context(
            kit.verifier(dataclasses.replace(verifier_kit.SETTINGS, port=port))
        )

    with reserved_port() as port:  # nobody listens there
        async with contextlib.AsyncExitStack() as running, contextlib.AsyncExitStack() as failing:
            if handler is not None:
                failing.callback((await asyncio.start_server(talk, "127.0.0.1", port)).close)
            yield f"ws://127.0.0.1:{port}", recover
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)


async def survives(
    client: EdgeClient, recover: Callable[[], Awaitable[None]] | None = None
) -> kit.Reader:
    """An answer that continues during the failure and ends verified after it."""
    reader = kit.Reader()
    async for event in client.generate(ids=IDS):
        reader.take(event)
        if (
            recover
            and isinstance(event, Token)
            and event.status == "provisional"
            and len(reader.tokens) >= 3
        ):
            await recover()
            recover = None
    assert reader.tokens == truth(IDS)[:COUNT]
    assert all(reader.verified)
    return reader


@pytest.mark.parametrize("draft", ["device", "server"])
async def test_an_answer_goes_on_at_another_verifier_while_the_first_one_drains(draft: Any) -> None:
    """The drain does not end here: as if somebody else's stream ran on. A device whose guesses were
    refused until then wrote alone."""
    drained = False
    device = kit.oracle([*IDS, *truth(IDS)], right=0.0)  # a forward for each token
    async with (
        kit.verifier() as first,
        kit.verifier() as second,
        LinkProxy("127.0.0.1", first.transport.port) as balancer,
        EdgeClient(
            verifier=balancer.url,
            device=device,
            draft=draft,
            max_new_tokens=COUNT,
            offline_after=600.0,
        ) as client,
        asyncio.timeout(verifier_kit.PATIENCE),
    ):
        reader = kit.Reader()
        async for event in client.generate(ids=IDS):
            reader.take(event)
            if reader.tokens and not drained:
                balancer.target_port = second.transport.port
                first.service.drain("the test", 600.0)
                drained = True
        assert reader.tokens == truth(IDS)[:COUNT]
        assert all(reader.verified)
        await verifier_kit.until(lambda: not first.service.connections)
        await client.wait_online()
        assert len(second.service.connections) == 1
        named = {"outcome": "gone"}
        gone = second.metrics.registry.get_sample_value("moa_session_resumes_total", named)
        assert gone == (1.0 if draft == "device" else None), "a stream that runs is finished"


@pytest.mark.parametrize(
    ("trouble", "draft"), [*((trouble, "device") for trouble in TROUBLE), ("502", "server")]
)
async def test_what_answers_instead_of_a_verifier(trouble: str, draft: Any) -> None:
    device = kit.oracle([*IDS, *truth(IDS)])
    async with (
        troubled(TROUBLE[trouble]) as (url, recover),
        EdgeClient(
            verifier=url, device=device, draft=draft, max_new_tokens=COUNT, **SOON
        ) as client,
    ):
        await survives(client, recover)


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "nonsense://["])
async def test_proxy_variables_do_not_stand_before_this_machine_and_elsewhere_a_bad_one_is_an_ordinary_failure(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, proxy)
    async with kit.verifier() as running:
        for address, verified in ((running.transport.url, True), ("ws://10.255.255.1:9", False)):
            how = SOON | {
                "verifier": address,
                "settle_seconds": 60.0 if verified else 0.3,
                "max_new_tokens": 8,
            }
            async with EdgeClient(device=kit.device(), **how) as client:
                reader = await kit.transcribe(client, IDS)
            assert reader.verified == [verified] * 8


async def test_a_target_that_takes_long_for_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings are answered meanwhile, so the connection is kept however long a forward takes."""
    device = kit.oracle([*IDS, *truth(IDS)], 1.0)
    how: dict[str, Any] = {
        "draft": "device",
        "max_new_tokens": COUNT,
        "offline_after": 0.2,
        "keepalive_seconds": 1.0,  # a starved process may lose less time than two of these
    }
    async with kit.linked(device, **how) as (client, running, link):
        await client.wait_online(60)
        real = running.engine.target.forward
        forwards = 0

        def slow(rows: Sequence[Row]) -> Step:
            nonlocal forwards
            forwards += 1
            time.sleep(2.5 if forwards == 2 else 0.2)
            return real(rows)

        monkeypatch.setattr(running.engine.target, "forward", slow)
        reader = await survives(client)
        assert link.connections == 1
    assert "provisional" in {event.status for event in reader.events if isinstance(event, Token)}


async def test_a_silent_network_is_written_over_long_before_it_is_given_up() -> None:
    """The connection may take an hour, and a token comes all the same."""
    how: dict[str, Any] = {"connect_seconds": 3600.0, "max_new_tokens": 4}
    async with (
        troubled(silent) as (url, _),
        EdgeClient(verifier=url, device=kit.device(), **how) as client,
        asyncio.timeout(300),
    ):
        async for event in client.generate(ids=IDS, settle_seconds=0.1):
            if isinstance(event, Token):
                assert event.status == "provisional"
                break


async def test_a_device_that_may_open_no_more_files_writes_alone_until_it_may() -> None:
    device = kit.oracle([*IDS, *truth(IDS)])
    async with (
        kit.verifier() as running,
        LinkProxy("127.0.0.1", running.transport.port) as link,
        EdgeClient(verifier=link.url, device=device, max_new_tokens=COUNT, **SOON) as client,
    ):
        await client.wait_online(60.0)
        await survives(client)  # so that all modules are loaded
        # First without a link, so that a connection that ends frees no descriptors afterwards.
        link.go_down()
        await verifier_kit.until(lambda: not running.service.connections)
        with contextlib.ExitStack() as shortage:
            shortage.enter_context(no_free_descriptor())
            link.restore()

            async def end_shortage() -> None:
                shortage.close()

            reader = await survives(client, end_shortage)
    assert any(isinstance(one, Token) and one.status == "provisional" for one in reader.events)


NO_END = 1e6
"""Seconds that no test waits for."""


async def test_an_answer_ends_where_nothing_listens_and_waits_for_a_verifier_that_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of them ends only because its verifier is back."""
    patience = Patience(offline_after=0.1, settle=NO_END, settle_unheard=0.1)
    monkeypatch.setattr(ClientSettings, "patience", property(lambda _: patience))
    how: dict[str, Any] = {"max_new_tokens": COUNT, "max_offline_tokens": 0, "ignore_eos": True}
    port = Port("127.0.0.1", 0)
    with port.socket:
        address = f"ws://127.0.0.1:{port.number}"
        async with EdgeClient(verifier=address, device=kit.device(), **how) as client:
            alone = await kit.transcribe(client, IDS)
            assert alone.done is not None
            assert not alone.done.verified
    async with kit.linked(kit.device(), **kit.FAST | how) as (client, _, link):
        await client.wait_online(60)
        link.go_down()
        monkeypatch.setattr("edge_client.link.websocket.is_closed_port", lambda _: True)
        later = kit.Reader()
        async for event in client.generate(ids=IDS):
            later.take(event)
            if len(later.tokens) == COUNT and not all(later.verified):
                link.restore()
        assert later.tokens == truth(IDS)[:COUNT]
        assert all(later.verified)
