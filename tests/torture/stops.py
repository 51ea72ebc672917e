"""Stops one end (SIGSTOP) wherever a conversation stands: when it goes on, the answer is the
target's.

A place is a number of bytes that have passed in one direction, so every state of a connection is
met: the handshake, the hello, the prompt, a token's frame, the close.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from edge_client.cli import main as edge_client
from edge_client.tools.emulated_network import Direction, LinkProxy
from tests.torture.server import CONTEXT, Mortal, mortal, redirect
from tests.torture.tally import Found, Tally

_QUESTION = "What is 17 plus 25? And what is 9 times 4?"
_TOKENS = 24
_SHORT_SECONDS = 0.3
"""A stop that nobody notices."""
_LONG_SECONDS = 4.0
"""A stop over which the device writes alone."""
_PATIENCE = 300.0
_WAYS = ("device", "server", "none")
"""Who drafts."""
_DIRECTIONS: tuple[Direction, ...] = ("up", "down")


class Stop(NamedTuple):
    """Which end is stopped, where, and for how long."""

    end: str
    direction: Direction
    share: float
    """Of the bytes that an undisturbed answer passes in this direction."""
    seconds: float
    way: str


class StoppingLink(LinkProxy):
    """Stops a process when so many bytes have passed."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port)
        self._stop_at: dict[Direction, float] = {"up": math.inf, "down": math.inf}
        self._stop: Callable[[], None] = lambda: None

    def stop_after(self, count: int, direction: Direction, stop: Callable[[], None]) -> None:
        """Call this once `count` more bytes have passed in this direction."""
        self._stop_at[direction] = self.passed[direction] + count
        self._stop = stop

    async def _deliver(
        self, writer: asyncio.StreamWriter, data: bytes, direction: Direction
    ) -> None:
        until = self._stop_at[direction] - self.passed[direction]
        if len(data) < until:
            await super()._deliver(writer, data, direction)
            return
        self._stop_at[direction] = math.inf
        # What belongs before the stop is delivered, and the rest meets a process that is stopped.
        await super()._deliver(writer, data[: int(until)], direction)
        self._stop()
        await super()._deliver(writer, data[int(until) :], direction)


def _generate(url: str, way: str, log: Path) -> None:
    """A client that asks for one answer; the body of its process."""
    redirect(log)
    words = ["generate", "--json", "--verifier", url, "--draft", way, "--config", os.devnull]
    words += ["--max-new-tokens", str(_TOKENS), "--ignore-eos", "--settle-seconds", "120"]
    with contextlib.suppress(SystemExit):
        edge_client([*words, "--threads", "1", _QUESTION])


class Stopped(NamedTuple):
    """What a client printed, as JSON, and whether an end was stopped meanwhile."""

    said: dict[str, Any]
    stopped: bool


class Pair:
    """A verifier and the link to it, and the bytes of an undisturbed answer."""

    def __init__(self, place: Mortal, link: StoppingLink, log: Path) -> None:
        self._place = place
        self._link = link
        self._log = log
        self._bytes: dict[tuple[str, Direction], int] = {}
        """By who drafts, and the direction."""
        self.truth: list[int] = []

    async def learn(self) -> list[str]:
        """Ask once in each way, undisturbed; returns what was wrong."""
        for way in _WAYS:
            before = dict(self._link.passed)
            said = (await self._ask(way)).said
            if said.get("verified") is not True:
                return [f"undisturbed, by {way}: {said}"]
            if self.truth and said["token_ids"] != self.truth:
                return [f"undisturbed, by {way}: {said['token_ids']}, not {self.truth}"]
            self.truth = said["token_ids"]
            for direction in _DIRECTIONS:
                self._bytes[way, direction] = self._link.passed[direction] - before[direction]
        return []

    async def disturb(self, stop: Stop) -> tuple[str, list[str]]:
        """Ask once more, with this stop: what happened, and what was wrong."""
        said, stopped = await self._ask(stop.way, stop)
        if said.get("verified") is not True or said.get("token_ids") != self.truth:
            return "wrong", [f"{stop}: {said}"]
        if not stopped:
            return "ended before", []
        provisional = said["stats"]["offline_tokens"] > 0
        return f"{stop.end} stopped, {'some' if provisional else 'nothing'} written alone", []

    async def _ask(self, way: str, stop: Stop | None = None) -> Stopped:
        self._log.write_text("")
        process = CONTEXT.Process(target=_generate, args=(self._link.url, way, self._log))
        process.start()
        stopped: list[int] = []
        try:
            if stop is not None:
                pid = process.pid if stop.end == "device" else self._place.pid
                count = 1 + int(stop.share * self._bytes[way, stop.direction])
                self._link.stop_after(
                    count, stop.direction, lambda: _pause(pid, stop.seconds, stopped)
                )
            await asyncio.to_thread(process.join, _PATIENCE)
        finally:
            process.kill()
            process.join()
        text = self._log.read_text()
        for line in text.splitlines():
            if line.startswith("{"):
                return Stopped(json.loads(line), bool(stopped))
        return Stopped({"error": text[-500:] or "it did not end"}, bool(stopped))


def _pause(pid: int, seconds: float, stopped: list[int]) -> None:
    """Stop a process for so long, and note it."""
    os.kill(pid, signal.SIGSTOP)
    stopped.append(pid)
    asyncio.get_running_loop().call_later(seconds, _go_on, pid)


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _drawn(rng: random.Random) -> Stop:
    return Stop(
        end=rng.choice(["device", "verifier"]),
        direction=rng.choice(_DIRECTIONS),
        share=rng.random(),
        seconds=rng.choice([_SHORT_SECONDS, _SHORT_SECONDS, _LONG_SECONDS]),
        way=rng.choice(_WAYS),
    )


async def stops(options: argparse.Namespace) -> Found:
    """As many stops as the options say, each in an answer of its own."""
    tally = Tally(options, "stops", stops=10)
    with tempfile.TemporaryDirectory() as folder:
        async with mortal() as place, StoppingLink(place.port) as link:
            pair = Pair(place, link, Path(folder, "log"))
            if wrong := await pair.learn():
                return {}, wrong
            for seed, batch in tally.batches():
                rng = random.Random(seed)
                counts: Counter[str] = Counter(stops=batch["stops"])
                found: list[str] = []
                for _ in range(batch["stops"]):
                    outcome, wrong = await pair.disturb(_drawn(rng))
                    counts[outcome] += 1
                    found += wrong
                tally.add(seed, counts, [*found, *place.complaints()])
    return tally.found
