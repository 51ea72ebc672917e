"""Clients that verify as fast as they are answered, all in one process with little work a round,
because the measured verifier shares the machine with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moa.cli.working import working
from moa.wire.messages import RecordDtype
from testing.devices import Round, Script, ScriptedDevice, scripts, together
from testing.metrics_page import Page, look


@dataclass(frozen=True)
class Run:
    """The measurements of a crowd while all of its clients were active."""

    seconds: float
    tokens: int
    heard: list[Round]
    before: Page
    after: Page
    """What the verifier said when it began and when it ended."""

    @property
    def rounds(self) -> int:
        """How many drafts were verified."""
        return len(self.heard)

    @property
    def round_ms(self) -> list[float]:
        """From sending a draft to having read its verdict, by the client."""
        return [1000 * (one.read - one.sent) for one in self.heard]

    @property
    def rate(self) -> float:
        """Verified tokens a second."""
        return self.tokens / self.seconds


async def scripts_for(url: str, count: int, options: Any) -> list[Script]:
    """Prompts, answers and drafts as the options say. It is told while a slow target writes."""
    doing = f"the target writes {count} answers of {options.tokens} tokens"
    with working("benchmarks", doing, at_once=False):
        return await scripts(
            url,
            count,
            length=options.prompt,
            tokens=options.tokens,
            rate=options.rate,
            nodes=options.nodes,
        )


async def crowd(url: str, said: Sequence[Script], records: RecordDtype = "off") -> Run:
    """Have one client for each script verify it.

    They start together when every prompt has run, and the clock stops when the first has heard
    everything, so that the whole crowd is there for all of the time that counts.
    """
    ready = asyncio.Barrier(len(said) + 1)
    steady = asyncio.Event()

    async def begin() -> None:
        await ready.wait()
        await steady.wait()

    devices = [ScriptedDevice(url, script, records=records, begin=begin) for script in said]
    doing = f"{len(said)} {'client' if len(said) == 1 else 'clients'} at a time"
    async with together(devices) as tasks:
        with working("benchmarks", doing, at_once=False):
            await ready.wait()
            before = await look(url)
            steady.set()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            after = await look(url)
    heard = [device.rounds[1:] for device in devices]  # without the one in which the prompt ran
    began = max(rounds[0].sent for rounds in heard)
    until = min(rounds[-1].read for rounds in heard)
    counted = [one for rounds in heard for one in rounds if began <= one.sent and one.read <= until]
    return Run(
        seconds=until - began,
        tokens=sum(one.tokens for one in counted),
        heard=counted,
        before=before,
        after=after,
    )
