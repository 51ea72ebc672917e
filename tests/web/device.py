"""The browser's client as a process, beside a real verifier."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edge_client.events import Adopt, Confirm, Done, Event, Link, Notice, Prompt, Retract, Token
from testing.tiny import EOS
from tests.edge import kit
from tests.web.node import command

_EVENTS = msgspec.json.Decoder(Prompt | Token | Confirm | Retract | Adopt | Link | Notice | Done)
_PROGRAM = Path(__file__).with_name("device.js")
_PATIENCE = 120.0


class Browser:
    """One process with many clients."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._told: dict[int, asyncio.Queue[dict[str, Any]]] = {}

    def client(self, verifier: str, truth: Sequence[int], *, right: float = 0.8, **how: Any) -> int:
        """Another client, with one conversation."""
        records = kit.device().new_drafter().records
        assert records is not None
        manifest = kit.device().bundle.manifest
        id = len(self._told) + 1
        snapshot = how.pop("snapshot", None)
        oracle = {"truth": list(truth), "right": right, "seed": id, "heads": named(records.heads)}
        identities = {"tokenizer": manifest.tokenizer.hash, "drafter": manifest.drafter.weights_id}
        told = {
            "verifier": verifier,
            "settings": how,
            "oracle": oracle,
            "identities": identities,
            "eosIds": [EOS],
        }
        self._told[id] = asyncio.Queue()
        self.ask(id, device=told | {"snapshot": snapshot})
        return id

    async def turn(
        self, id: int, ids: Sequence[int] | None, *, checks: int = 0, **changes: Any
    ) -> AsyncGenerator[Event, None]:
        """The events of a turn of a client; without ids, of the rest of one that was interrupted,
        or of its check."""
        self.ask(id, ids=ids, changes=changes, checks=checks)
        while "event" in (line := await self._next(id)):
            yield _EVENTS.decode(json.dumps(line["event"]))

    async def snapshot(self, id: int, take: Callable[[Event], None]) -> Any:
        """Of its conversation, after the events that are on their way."""
        self.ask(id, snapshot=True)
        while "snapshot" not in (line := await self._next(id)):
            if "event" in line:
                take(_EVENTS.decode(json.dumps(line["event"])))
        return line["snapshot"]

    def ask(self, id: int, **what: Any) -> None:
        """Tell a client something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": id, **what}).encode() + b"\n")

    async def _next(self, id: int) -> dict[str, Any]:
        return await asyncio.wait_for(self._told[id].get(), _PATIENCE)

    async def listen(self) -> None:
        """Pass on what it says."""
        assert self._process.stdout is not None
        while text := await self._process.stdout.readline():
            line = json.loads(text)
            self._told[line["turn"]].put_nowait(line)


def named(heads: Any) -> dict[str, int]:
    return {"count": heads.count, "width": heads.width}


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """The process, while the body runs."""
    flags = "--experimental-websocket", "--disable-warning=ExperimentalWarning"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command(*flags, str(_PROGRAM)), stdin=pipe, stdout=pipe, limit=2**24
    )
    running = Browser(process)
    listening = asyncio.create_task(running.listen())
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # as a phone kills a tab
        await process.wait()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
