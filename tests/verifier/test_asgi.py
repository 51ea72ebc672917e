"""The verifier behind somebody else's sockets: the same conversation, the same door, the same budgets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from cloud_verifier.asgi import AsgiApp
from moa.wire import ClientSession, decode_server, encode
from moa.wire.messages import Hello, ServerMessage, Welcome
from moa.wire.session import Advanced, Ready
from moa.wire.versions import FEATURES, PROTOCOL_VERSIONS, SUBPROTOCOL
from tests.verifier import kit

IDS = kit.prompt(1, 10)


class Server:
    """What an ASGI server does for one connection."""

    def __init__(self, app: AsgiApp, kind: str, **scope: Any) -> None:
        self._in: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._out: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        whole = {"type": kind, "path": "/", "headers": [], "subprotocols": [SUBPROTOCOL], "client": ("::1", 7)} | scope
        self.task = asyncio.create_task(app(whole, self._in.get, self._out.put))  # type: ignore[arg-type]

    def tell(self, kind: str, **message: Any) -> None:
        """Something happened."""
        self._in.put_nowait({"type": kind, **message})

    async def told(self) -> dict[str, Any]:
        """What the application does about it."""
        async with asyncio.timeout(kit.PATIENCE):
            return await self._out.get()

    async def ask(self, *frames: bytes) -> ServerMessage:
        """Send frames and wait for one."""
        for frame in frames:
            self.tell("websocket.receive", bytes=frame)
        message = await self.told()
        assert message["type"] == "websocket.send", message
        return decode_server(message["bytes"])


@contextlib.asynccontextmanager
async def _app(settings: kit.Settings = kit.SETTINGS) -> AsyncIterator[AsgiApp]:
    async with kit.Verifier(kit.served(settings), settings).running() as running:
        yield AsgiApp(running.service, running.door, ("https://ours.example",))


async def _open(app: AsgiApp) -> Server:
    server = Server(app, "websocket")
    server.tell("websocket.connect")
    assert await server.told() == {"type": "websocket.accept", "subprotocol": SUBPROTOCOL, "headers": []}
    assert isinstance(await server.ask(encode(Hello(list(PROTOCOL_VERSIONS), sorted(FEATURES)))), Welcome)
    return server


async def test_a_conversation() -> None:
    async with _app() as app:
        server = await _open(app)
        session = ClientSession(list(IDS), max_new_tokens=8, records="off")
        assert isinstance(session.receive(await server.ask(encode(session.open()))), Ready)
        while not session.finish:
            event = session.receive(await server.ask(encode(session.verify([session.log[-1]]))))
            assert isinstance(event, Advanced)
        assert session.log[len(IDS) :] == kit.generated(IDS, 8)
        server.tell("websocket.disconnect", code=1000)
        async with asyncio.timeout(kit.PATIENCE):
            await server.task


async def test_who_may_not_come_in() -> None:
    for scope in (
        {"path": "/other"},
        {"subprotocols": ["chat"]},
        {"headers": [(b"origin", b"https://evil.example")]},
    ):
        async with _app() as app:
            server = Server(app, "websocket", **scope)
            server.tell("websocket.connect")
            assert (await server.told())["type"] == "websocket.close"
            await server.task


async def test_our_own_pages_may() -> None:
    async with _app() as app:
        server = Server(app, "websocket", headers=[(b"Origin", b"https://ours.example")])
        server.tell("websocket.connect")
        assert (await server.told())["type"] == "websocket.accept"
        server.tell("websocket.disconnect")
        await server.task


async def test_health_and_metrics() -> None:
    async with _app() as app:
        for path, status, words in (
            ("/health/ready", 200, b"ready"),
            ("/prefix/health/live", 200, b"live"),
            ("/metrics", 200, b"moa_connections 0.0"),
            ("/", 426, b"websocket"),
            ("/other", 404, b"not found"),
        ):
            root = "/prefix" if path.startswith("/prefix") else ""
            server = Server(app, "http", path=path, root_path=root)
            start, body = await server.told(), await server.told()
            assert (start["status"], words in body["body"]) == (status, True)
            await server.task


async def test_the_life_of_the_server() -> None:
    async with _app() as app:
        server = Server(app, "lifespan")
        for phase in ("startup", "shutdown"):
            server.tell(f"lifespan.{phase}")
            assert await server.told() == {"type": f"lifespan.{phase}.complete"}
        await server.task


async def test_frames_that_are_none_and_floods_end_it() -> None:
    limits = dataclasses.replace(kit.LIMITS, max_frames_per_second=20, burst_seconds=0.5, flood_seconds=0.2)
    async with _app(dataclasses.replace(kit.SETTINGS, limits=limits)) as app:
        for frames, code in (
            ([{"text": "x"}], 1003),
            ([{"bytes": b"x" * 300_000}], 1009),
            ([{"bytes": b"\xc0"}] * 99, 0),
        ):
            server = await _open(app)
            for frame in frames:
                server.tell("websocket.receive", **frame)
            while (message := await server.told())["type"] != "websocket.close":
                pass
            assert message["code"] == code or not code
            server.tell("websocket.disconnect")
            async with asyncio.timeout(kit.PATIENCE):
                await server.task
