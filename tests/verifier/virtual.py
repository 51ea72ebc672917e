"""The scheduler in virtual time: sessions that ask again a while after a verdict, and a model that takes as long as it
is said to."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from cloud_verifier.engine.scheduler import Chunk, ForwardBatch, Reading, Scheduler
from cloud_verifier.engine.work import Job, Lease
from moa.sampling import SamplingSettings
from moa.speculation.cost import attention_pairs
from moa.wire import Limits
from moa.wire.finish import TurnRules
from moa.wire.messages import Verify

LIMITS = Limits(max_queue=20, max_queue_per_principal=12)
_names = itertools.count()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lease(principal: str = "a", length: int = 4) -> Lease:
    return Lease(next(_names).to_bytes(16), principal, length=length)


def job(holder: Lease, nodes: int = 4, base: int = 4, deadline: float = 1e9) -> Job:
    request = Verify(holder.session, 1, base, [1] * nodes)
    return Job(holder, request, [1] * (base + 1), TurnRules(0, 9, 99), SamplingSettings(), 100.0, deadline)


def scheduler(**settings: Any) -> Scheduler:
    return Scheduler(**({"limits": LIMITS, "batch_wait": 0.0, "clock": Clock()} | settings))


def drafts(work: Any) -> list[Job]:
    assert isinstance(work, ForwardBatch)
    return work.jobs


def chunks(work: Any) -> list[Chunk]:
    assert isinstance(work, Reading)
    return work.chunks


class Machine:
    """Rounds on a model that takes 5 ms and 1 ms a token; each session asks again 2 ms after its verdict."""

    def __init__(self, sessions: dict[str, int], nodes: int = 1) -> None:
        self.queue, self.clock, self.nodes = Scheduler(Limits(), batch_wait=0.0, clock=(clock := Clock())), clock, nodes
        self.rounds = dict.fromkeys(sessions, 0)
        self.asking = [(clock.now, lease(name)) for name, count in sessions.items() for _ in range(count)]

    def run(self, seconds: float) -> dict[str, int]:
        until = self.clock.now + seconds
        while self.clock.now < until:
            for _, holder in (due := [one for one in self.asking if one[0] <= self.clock.now]):
                self.queue.submit(job(holder, self.nodes))
            self.asking = [one for one in self.asking if one not in due]
            work = self.queue.next(0)
            if work is None:
                self.clock.now = min(at for at, _ in self.asking)
                continue
            ran = drafts(work)
            self.clock.now += 0.005 + 0.001 * sum(one.cost for one in ran)
            for one in ran:
                self.rounds[one.lease.principal] += 1
                self.asking.append((self.clock.now + 0.002, one.lease))
        return self.rounds


class Reader(Machine):
    """The same, with a model of eight layers to which 3,000 tokens before a token are what many more are to a larger
    one, and with a prompt. Sessions ask again `pause` seconds after a verdict."""

    def __init__(self, sessions: int, *, pause: float = 0.001) -> None:
        super().__init__({"a": sessions}, nodes=8)
        self.queue = Scheduler(Limits(), batch_wait=0.0, pieces=8, clock=self.clock)
        self.pause, self.layers, self.reader = pause, 0, lease(length=0)
        self.verdicts: list[float] = []

    def begin(self, prompt: int) -> None:
        self.queue.prefill(self.reader, [1] * (prompt + 1), prompt)

    def turn(self) -> None:
        now = self.clock.now
        for at, holder in (due := [one for one in self.asking if one[0] <= now]):
            self.clock.now = at
            self.queue.submit(dataclasses.replace(job(holder, self.nodes), enqueued=at))
        self.asking, self.clock.now = [one for one in self.asking if one not in due], now
        match self.queue.next(0):
            case Reading(pieces):
                self.clock.now += self.takes([], pieces) / 8
                self.layers += 1
                if self.layers % 8 == 0:
                    self.grow(pieces)
                    self.queue.read()
            case ForwardBatch(jobs, _, pieces):
                self.clock.now += self.takes(jobs, pieces)
                self.grow(pieces)
                self.verdicts += [self.clock.now - one.enqueued for one in jobs]
                self.asking += [(self.clock.now + self.pause, one.lease) for one in jobs]
            case _:
                self.clock.now += 0.0005

    def takes(self, jobs: list[Job], pieces: list[Chunk]) -> float:
        rows = [*((one.cost, one.lease.length) for one in jobs), *((one.size, one.lease.length) for one in pieces)]
        return 0.005 + 0.0003 * sum(size for size, _ in rows) + 2e-7 * attention_pairs(rows)

    def grow(self, pieces: list[Chunk]) -> None:
        for piece in pieces:
            piece.lease.length += piece.size
            self.queue.prefilled(piece.lease)

    def p95(self) -> float:
        return sorted(self.verdicts)[int(0.95 * len(self.verdicts))] if self.verdicts else 0.0
