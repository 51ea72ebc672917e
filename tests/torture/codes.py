"""Each error for ever through the endpoint, in each mode: when text comes, and when the answer ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass

from edge_client import EdgeClient
from edge_client.device import Device
from edge_client.serve.app import endpoint
from edge_client.serve.settings import ServeSettings
from moa.errors import MoaError
from moa.process.listening import Port
from tests.torture.fake_verifier import BEHAVIOURS, FOR_EVER, fake
from tests.torture.raw import Raw

MODES = "keep", "provisional", "hold"
CASES = [*FOR_EVER, "silence", "silence to every open", "cut after each opening"]
_FIRST, _END = 3.0, 30.0
_TOKENS = 40
_MODEL = "demo"
_PATIENCE = 90.0
_AT_ONCE = 5


@dataclass(frozen=True)
class Cell:
    """One error in one mode."""

    case: str
    mode: str
    first: float
    """Seconds until text came; those until the end in mode hold, where no text is verified."""
    end: float
    finish: str
    """How it ended: a finish reason, or an error's code."""

    @property
    def problems(self) -> list[str]:
        """What took too long, or had no end."""
        late = f"{self.case}, {self.mode}: first text after {self.first:.1f} s, end after {self.end:.1f} s"
        wrong = self.end > _END or not self.finish or (self.mode != "hold" and self.first > _FIRST)
        return [f"{late}, {self.finish or 'no end'}"] if wrong else []

    def row(self) -> str:
        """One line of a table."""
        return f"| {self.case} | {self.mode} | {self.first:.1f} | {self.end:.1f} | {self.finish} |"


async def cell(case: str, mode: str, device: Device, **more: object) -> Cell:
    """Ask for a short answer beside a verifier that answers so, with the mode's own patience unless there is `more`."""
    welcome = {"vocab_size": device.bundle.manifest.target.facts.vocab_size}
    async with (
        fake(BEHAVIOURS[case], tuple(range(60, 90)), welcome) as made,
        EdgeClient(device=device, verifier=made.url) as client,
        endpoint(client, ServeSettings(), _MODEL, port := Port("127.0.0.1", 0)),
    ):
        with contextlib.suppress(MoaError):
            await client.wait_online(2.0)
        return await _asked(port.number, case, mode, more)


async def _asked(port: int, case: str, mode: str, more: dict[str, object]) -> Cell:
    asked = {"model": _MODEL, "stream": True, "max_tokens": _TOKENS, "moa": {"mode": mode, "ignore_eos": True, **more}}
    body = json.dumps({**asked, "messages": [{"role": "user", "content": "What is 17 + 25 - 9?"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    raw, began = await Raw.connect(port), time.monotonic()
    first, finish = 0.0, ""
    try:
        await raw.pour(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while line := await raw.reader.readline():
                    if line.startswith(b'data: {"') or line.startswith(b'{"error"'):
                        told = json.loads(line.removeprefix(b"data: "))
                        finish = told["error"]["code"] if "error" in told else finish
                        for choice in told.get("choices", ()):
                            first = first or (time.monotonic() - began if choice["delta"].get("content") else 0.0)
                            finish = choice.get("finish_reason") or finish
        end = time.monotonic() - began
    finally:
        await raw.gone()
    return Cell(case, mode, first or end, end, finish)


async def table(device: Device, cases: list[str] = CASES, **more: object) -> list[Cell]:
    """All cells, a few at a time."""
    few = asyncio.Semaphore(_AT_ONCE)

    async def one(case: str, mode: str) -> Cell:
        async with few:
            made = await cell(case, mode, device, **more)
            print(made.row(), flush=True)
            return made

    return list(await asyncio.gather(*(one(case, mode) for case in cases for mode in MODES)))
