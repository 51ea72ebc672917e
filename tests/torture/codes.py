"""Each error for ever through the endpoint, in each mode: when text comes, and when the answer
ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass

import httpx2 as httpx

from edge_client import EdgeClient
from edge_client.device import Device
from edge_client.serve.endpoint import endpoint
from edge_client.serve.settings import ServeSettings
from moa.errors import MoaError
from moa.process.listening import Port
from tests.torture.device import beside_device
from tests.torture.fake_verifier import BEHAVIOURS, FOR_EVER

MODES = "keep", "provisional", "hold"
CASES = [*FOR_EVER, "silence", "silence to every open", "cut after each opening"]
_FIRST = 3.0
_END = 30.0
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


async def cell(case: str, mode: str, device: Device, **more: object) -> Cell:
    """Ask for a short answer beside a verifier that answers so, with the mode's own patience unless
    there is `more`."""
    asked: dict[str, object] = {
        "model": _MODEL,
        "stream": True,
        "max_tokens": _TOKENS,
        "ignore_eos": True,
    }
    asked["moa"] = {"mode": mode, **more}
    asked["messages"] = [{"role": "user", "content": "What is 17 + 25 - 9?"}]
    first = 0.0
    finish = ""
    async with (
        beside_device(BEHAVIOURS[case], device) as made,
        EdgeClient(device=device, verifier=made.url) as client,
        endpoint(client, ServeSettings(), _MODEL, port := Port("127.0.0.1", 0)),
        httpx.AsyncClient(timeout=None, trust_env=False) as http,
    ):
        with contextlib.suppress(MoaError):
            await client.wait_online(2.0)
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(_PATIENCE),
                http.stream(
                    "POST", f"http://127.0.0.1:{port.number}/v1/chat/completions", json=asked
                ) as answer,
            ):
                async for line in answer.aiter_lines():
                    if line.startswith(('data: {"', '{"error"')):
                        told = json.loads(line.removeprefix("data: "))
                        finish = told["error"]["code"] if "error" in told else finish
                        for choice in told.get("choices", ()):
                            first = first or (
                                time.monotonic() - began if choice["delta"].get("content") else 0.0
                            )
                            finish = choice.get("finish_reason") or finish
        end = time.monotonic() - began
    return Cell(case, mode, first or end, end, finish)


async def table(device: Device, cases: list[str] = CASES, **more: object) -> list[Cell]:
    """All cells, a few at a time."""
    few = asyncio.Semaphore(_AT_ONCE)

    async def one(case: str, mode: str) -> Cell:
        async with few:
            return await cell(case, mode, device, **more)

    return list(await asyncio.gather(*(one(case, mode) for case in cases for mode in MODES)))
