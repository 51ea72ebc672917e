"""Very many clients at once, a third of them rude: what the others are told must be the target's,
and come about as fast as without them.

The honest ones have streams drafted for them or guess ahead, and rest between two answers, as people
do; each answer is one connection, and every token is compared. The rude ones are another principal, in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, NamedTuple

from moa.errors import MoaError
from moa.wire import messages as m
from testing.devices import Script, ScriptedDevice, scripts
from testing.verifier import many_short
from tests.torture.floods import ask
from tests.torture.raw import BINARY, PING, Raw, binary, frame
from tests.torture.server import Server, server
from tests.torture.tally import Found

_RUDE_SHARE = 1 / 3
_TIMES = 2.0
"""How much later half of the honest ones may have their first token, or their answer."""
_SCRIPTS = 40
_TOKENS = 16
_USE = 0.25
"""The share of what the verifier can do that the honest ones ask for together: how long each rests
between two answers follows from it. Of more than a half they would lose their part to the rude ones
by right, as these are one of two principals."""
_AT_ONCE = 4
"""Answers at once while it is measured what the verifier can do."""
_MEASURED = 80
_RUDE_REST = 30.0
"""Seconds between two rude things of a client, on average; some of them last as long."""
_CALM = 20.0
_TURN = 60.0
"""Seconds without the rude ones, and with them, in turn."""
_SETTLES = 5.0
"""Seconds until what was cut off has been put away."""
_MEGABYTES = 200.0
"""Beyond what the verifier had before the first client, and its cache of keys and values, which
grows with use."""
_MEGABYTES_A_SESSION = 0.4
"""What a session has beside that once its text is long: the drafter's cache, and activation records.
It is given to the next one, so that the sum grows until each slot has seen a long text."""
_STARVED = 0.1
"""Of the time, for which the verifier's threads may wait for a processor: on a busier machine the
times say more of it than of the verifier, and are not judged."""
_DESCRIPTORS = 16


class Answer(NamedTuple):
    """When it was asked for, and the seconds until its first token and its end, with those that
    the connection took."""

    asked: float
    first: float
    end: float


@dataclass
class Crowd:
    """What the honest clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """Why answers were lost."""
    answers: list[Answer] = field(default_factory=list)

    def during(self, spans: list[tuple[float, float]]) -> list[Answer]:
        """Those that were asked for then."""
        return [one for one in self.answers if any(a <= one.asked < b for a, b in spans)]


async def _rest(over: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until it is over."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)


def _device(running: Server, known: list[Script], rng: random.Random) -> ScriptedDevice:
    """A device of an honest client with a prompt and a way of drafting drawn at random."""
    way = rng.choice(["ahead", "server"])
    return ScriptedDevice(running.url, rng.choice(known), way=way, token=running.honest)


async def _answers_per_second(running: Server, known: list[Script], seed: int) -> float:
    """How many answers the verifier gives in a second when it always has some to give."""
    rng = random.Random(seed)
    left = iter(range(_MEASURED))

    async def ask_on() -> None:
        for _ in left:
            await _device(running, known, rng).run()

    began = time.perf_counter()
    await asyncio.gather(*(ask_on() for _ in range(_AT_ONCE)))
    return _MEASURED / (time.perf_counter() - began)


async def _honest(
    running: Server, known: list[Script], crowd: Crowd, seed: int, rest: float, over: asyncio.Event
) -> None:
    """One answer after the other, with a rest between them; none is broken off. The next one is
    asked for when the last has come, so a slow machine is asked less and not more."""
    rng = random.Random(seed)
    # As if it had come and gone long before: with any other first rest, more would ask at first.
    await _rest(over, rng.expovariate(1 / rest))
    while not over.is_set():
        device = _device(running, known, rng)
        asked = time.perf_counter()
        try:
            await device.run()
        except MoaError as error:
            crowd.wrong[str(error)] += 1
            crowd.counts["lost"] += 1
        else:
            reads = [piece.read for piece in device.rounds]
            crowd.answers.append(Answer(asked, reads[0] - asked, reads[-1] - asked))
            crowd.counts["answers"] += 1
            crowd.counts["not exact"] += not device.exact
        crowd.counts["sessions opened again"] += device.reopened
        await _rest(over, rng.expovariate(1 / rest))


# ---- the rude ones


def _ids(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(4, 500) for _ in range(rng.randint(1, most))]


async def _asking(raw: Raw, rng: random.Random) -> bytes:
    session = rng.randbytes(16)
    raw.write(binary(m.Open(session, ids := _ids(rng, 200), max_new_tokens=200, ignore_eos=True)))
    raw.write(binary(m.Stream(session, 1, len(ids) - 1)))
    return session


async def _leaves_in_mid_answer(raw: Raw, rng: random.Random) -> None:
    await _asking(raw, rng)
    for _ in range(rng.randint(1, 6)):
        await raw.message()


async def _reads_nothing(raw: Raw, rng: random.Random) -> None:
    raw.deaf()
    raw.write(binary(m.Open(rng.randbytes(16), _ids(rng, 250), records="fp16")))
    await _asking(raw, rng)
    await asyncio.sleep(rng.uniform(5.0, 40.0))


async def _talks_nonsense(raw: Raw, rng: random.Random) -> None:
    for _ in range(20):
        raw.write(frame(BINARY, rng.randbytes(rng.randint(0, 300))))
        await asyncio.sleep(rng.uniform(0.0, 0.5))


async def _pings(raw: Raw, rng: random.Random) -> None:
    for _ in range(40):
        raw.write(frame(PING, bytes(rng.randint(0, 125))) * 50)
        await asyncio.sleep(rng.uniform(0.0, 0.5))


async def _asks_wrongly(raw: Raw, rng: random.Random) -> None:
    session = await _asking(raw, rng)
    for number in range(20):
        raw.write(binary(m.Stream(session, number, rng.randrange(999))))
        raw.write(binary(m.Cancel(rng.randbytes(16), number)))
        raw.write(binary(m.Resume(session, rng.randrange(999), rng.randbytes(16), number)))
        await asyncio.sleep(rng.uniform(0.0, 0.5))


async def _opens_and_forgets(raw: Raw, rng: random.Random) -> None:
    for _ in range(8):
        raw.write(binary(m.Open(rng.randbytes(16), _ids(rng, 250))))
        await asyncio.sleep(rng.uniform(0.0, 1.0))


async def _sleeps(raw: Raw, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(5.0, 60.0))


_MANNERS: tuple[Callable[[Raw, random.Random], Awaitable[None]], ...] = (
    _leaves_in_mid_answer,
    _reads_nothing,
    _talks_nonsense,
    _pings,
    _asks_wrongly,
    _opens_and_forgets,
    _sleeps,
)


async def _rude(port: int, api_port: int, key: str, seed: int, seen: Counter[str]) -> None:
    """One rude thing after another; each ends by a reset. It does about one in a minute, as an
    honest one asks: what a crowd does as fast as it can is `floods.py`'s."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.uniform(0.0, _RUDE_REST))
    while True:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            match rng.randrange(10):
                case 0:  # of the endpoint
                    seen["requests"] += 1
                    await ask(api_port, "/v1/chat/completions", rng.randbytes(400), key)
                case 1:  # half of a handshake
                    seen["half handshakes"] += 1
                    raw = await Raw.connect(port)
                    raw.write(b"GET / HTTP/1.1\r\nHost: x\r\n"[: rng.randrange(24)])
                    await asyncio.sleep(rng.uniform(0.0, 20.0))
                    raw.abort()
                case _:
                    manner = rng.choice(_MANNERS)
                    raw = await Raw.greeted(port, key)
                    seen[manner.__name__.strip("_").replace("_", " ")] += 1
                    try:
                        async with asyncio.timeout(60.0):
                            await manner(raw, rng)
                    finally:
                        raw.abort()
        await asyncio.sleep(rng.uniform(0.5, 1.5) * _RUDE_REST)


def _run_rude(count: int, port: int, api_port: int, key: str, seconds: float, seed: int) -> Any:
    """So many of them for so long; the body of a process."""
    # Of sockets that are written to after their end: that is what they are here for.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    seen: Counter[str] = Counter()

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for number in range(count):
                    group.create_task(_rude(port, api_port, key, seed + number, seen))

    asyncio.run(run())
    return seen


@dataclass
class _Watched:
    """The verifier's process, second by second."""

    memory: list[float] = field(default_factory=list)
    after_turns: list[float] = field(default_factory=list)
    """Megabytes when what a turn's rude clients left has been put away: a leak grows with turns."""
    load: list[float] = field(default_factory=list)

    async def watch(self, running: Server) -> None:
        while True:
            self.memory.append(running.memory)
            self.load.append(os.getloadavg()[0])
            await asyncio.sleep(1.0)


async def thousand(options: argparse.Namespace) -> Found:
    """So many clients for so many minutes. The rude ones come and go: what else the machine does
    meanwhile changes from minute to minute, so times with and without them are taken in turn."""
    rude = round(options.clients * _RUDE_SHARE)
    turns = max(1, round(60 * options.minutes / _TURN))
    crowd = Crowd()
    watched = _Watched()
    calm: list[tuple[float, float]] = []
    harassed: list[tuple[float, float]] = []
    things: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    flags = [*many_short(options.clients + 100), "--openai", "0"]
    async with server(*flags) as running:
        before = running.memory
        known = await scripts(
            running.url,
            _SCRIPTS,
            length=32,
            tokens=_TOKENS,
            rate=0.7,
            nodes=5,
            token=running.honest,
        )
        descriptors = running.descriptors
        capacity = await _answers_per_second(running, known, options.seed)
        rest = (options.clients - rude) / (_USE * capacity)
        print(f"{capacity:.1f} answers a second at most; a client rests {rest:.0f} s", flush=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:

            async def in_turns() -> None:
                await asyncio.sleep(_CALM)  # some have asked
                for turn in range(turns):
                    began = time.perf_counter()
                    await asyncio.sleep(_CALM)
                    meanwhile = time.perf_counter()
                    where = (running.port, running.api_port, running.greedy)
                    seed = options.seed + turn * rude
                    things.update(
                        await loop.run_in_executor(process, _run_rude, rude, *where, _TURN, seed)
                    )
                    calm.append((began, meanwhile))
                    harassed.append((meanwhile, time.perf_counter()))
                    await asyncio.sleep(_SETTLES)
                    watched.after_turns.append(running.memory)
                    megabytes = f"{watched.after_turns[-1]:.0f} MB"
                    print(f"turn {turn + 1} of {turns}: {crowd.counts}, {megabytes}", flush=True)
                over.set()

            watching = asyncio.create_task(watched.watch(running))
            honest = [
                _honest(running, known, crowd, options.seed + number, rest, over)
                for number in range(options.clients - rude)
            ]
            used = running.processor
            starved = running.starved
            began = time.perf_counter()
            await asyncio.gather(in_turns(), *honest)
            elapsed = time.perf_counter() - began
            used = (running.processor - used) / elapsed
            starved = (running.starved - starved) / elapsed
            watching.cancel()
        await asyncio.sleep(_SETTLES)
        more = running.descriptors - descriptors
        complaints = running.complaints()
        room = before + running.logged("loaded")["kv_megabytes_at_most"] + _MEGABYTES
        room += options.clients * _MEGABYTES_A_SESSION
    without = crowd.during(calm)
    beside = crowd.during(harassed)
    if not without or not beside:
        return {"counts": crowd.counts, "lost": crowd.wrong}, ["no answers"]
    firsts = [_percentiles([one.first for one in span]) for span in (without, beside)]
    ends = [_percentiles([one.end for one in span]) for span in (without, beside)]
    times = round(max(firsts[1].p50 / firsts[0].p50, ends[1].p50 / ends[0].p50), 2)
    wrong = [f"{count} answers lost: {why}" for why, count in crowd.wrong.most_common(5)]
    wrong += complaints
    wrong += [f"{crowd.counts['not exact']} answers differ"] if crowd.counts["not exact"] else []
    if times > _TIMES and starved < _STARVED:
        wrong.append(f"the median answer takes {times} times as long")
    most = max(watched.memory)
    wrong += [f"{most:.0f} MB, at most {room:.0f}"] if most > room else []
    wrong += [f"{more} descriptors"] if more > _DESCRIPTORS else []
    return {
        "clients": options.clients,
        "rude": rude,
        "minutes with them": options.minutes,
        "answers a second at most": round(capacity, 1),
        "seconds of rest": round(rest),
        "counts": crowd.counts,
        "answers without, beside": [len(without), len(beside)],
        "ms to the first token without, beside": firsts,
        "ms to the end without, beside": ends,
        "times": times,
        "rude things": things,
        "megabytes, and at most": [round(most), round(room)],
        "megabytes after each turn": [round(megabytes) for megabytes in watched.after_turns],
        "descriptors more": more,
        "processor time in a second; waited for it": [round(used, 2), round(starved, 2)],
        "load, median and most": [statistics.median(watched.load), max(watched.load)],
    }, wrong


class _Percentiles(NamedTuple):
    """Milliseconds."""

    p50: int
    p99: int
    longest: int


def _percentiles(seconds: list[float]) -> _Percentiles:
    ordered = [round(1000 * one) for one in sorted(seconds)]
    last = len(ordered) - 1
    return _Percentiles(ordered[last // 2], ordered[int(0.99 * last)], ordered[last])
