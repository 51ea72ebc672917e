"""The browser's client as a process, whose websockets end here and go on to a real verifier."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from edge_client.events import Adopt, Confirm, Done, Event, Link, Notice, Prompt, Retract, Token
from tests.edge import kit
from tests.tiny import EOS

_EVENTS = msgspec.json.Decoder(Prompt | Token | Confirm | Retract | Adopt | Link | Notice | Done)
_PROGRAM = Path(__file__).with_name("device.js")
_PATIENCE = 120.0


class Browser:
    """One process with many clients."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._sockets: dict[int, asyncio.Task[None]] = {}
        self._up: dict[int, asyncio.Queue[bytes]] = {}
        self._turns: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._ids = itertools.count(1)

    async def client(self, verifier: str, truth: Sequence[int], *, right: float = 0.8, **how: Any) -> int:
        """Another client, with one conversation."""
        records = kit.device().new_drafter().records
        assert records is not None
        manifest = kit.device().bundle.manifest
        id, snapshot = next(self._ids), how.pop("snapshot", None)
        oracle = {"truth": list(truth), "right": right, "seed": id, "heads": named(records.heads)}
        identities = {"tokenizer": manifest.tokenizer.hash, "drafter": manifest.drafter.weights_id}
        told = {"verifier": verifier, "settings": how, "oracle": oracle, "identities": identities, "eosIds": [EOS]}
        self._turns[id] = asyncio.Queue()
        self._tell({"id": id, "device": told | {"snapshot": snapshot}})
        return id

    async def turn(
        self, id: int, ids: Sequence[int] | None, *, checks: int = 0, **changes: Any
    ) -> AsyncGenerator[Event, None]:
        """The events of a turn of a client; without ids, of the rest of one that was interrupted, or of its check."""
        self._tell({"id": id, "ids": None if ids is None else list(ids), "changes": changes, "checks": checks})
        while True:
            line = await asyncio.wait_for(self._turns[id].get(), _PATIENCE)
            if "over" in line:
                return
            yield _EVENTS.decode(json.dumps(line["event"]))

    async def snapshot(self, id: int, take: Callable[[Event], None]) -> Any:
        """Of its conversation, after the events that are on their way."""
        self._tell({"id": id, "snapshot": True})
        while True:
            line = await asyncio.wait_for(self._turns[id].get(), _PATIENCE)
            if "snapshot" in line:
                return line["snapshot"]
            if "event" in line:
                take(_EVENTS.decode(json.dumps(line["event"])))

    def ask(self, id: int, **what: Any) -> None:
        """Tell a client something."""
        self._tell({"id": id, **what})

    # ---- the pipe

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def listen(self) -> None:
        """Pass on what it says."""
        assert self._process.stdout is not None
        while text := await self._process.stdout.readline():
            line = json.loads(text)
            if "turn" in line:
                self._turns[line["turn"]].put_nowait(line)
            elif "url" in line:
                self._up[line["socket"]] = asyncio.Queue()
                self._sockets[line["socket"]] = asyncio.create_task(self._socket(line))
            elif "frame" in line:
                self._up[line["socket"]].put_nowait(bytes.fromhex(line["frame"]))
            else:
                self._sockets[line["socket"]].cancel()

    async def _socket(self, about: dict[str, Any]) -> None:
        """One websocket of it."""
        socket = about["socket"]

        async def carry_up(connection: ClientConnection) -> None:
            while True:
                await connection.send(await self._up[socket].get())

        with contextlib.suppress(OSError, ConnectionClosed, InvalidHandshake, ExceptionGroup):
            async with connect(about["url"], subprotocols=about["protocols"], compression=None) as connection:
                self._tell({"socket": socket, "opened": True})
                carrying = asyncio.create_task(carry_up(connection))
                try:
                    async for frame in connection:
                        self._tell({"socket": socket, "frame": bytes(frame).hex()})  # type: ignore[arg-type]
                finally:
                    carrying.cancel()
                    await asyncio.gather(carrying, return_exceptions=True)
                    connection.transport.abort()
        self._tell({"socket": socket, "closed": True})

    async def close(self) -> None:
        """End the process, as a phone kills a tab."""
        for task in self._sockets.values():
            task.cancel()
        await asyncio.gather(*self._sockets.values(), return_exceptions=True)
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def named(heads: Any) -> dict[str, int]:
    return {"count": heads.count, "width": heads.width}


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """The process, while the body runs."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    process = await asyncio.create_subprocess_exec(
        node,
        "--disable-warning=MODULE_TYPELESS_PACKAGE_JSON",
        str(_PROGRAM),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    running = Browser(process)
    listening = asyncio.create_task(running.listen())
    try:
        yield running
    finally:
        await running.close()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
