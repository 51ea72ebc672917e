"""The scheduler in virtual time: sessions that ask again a while after a verdict, and a model that
takes as long as it is said to."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from typing import Any, ClassVar

from cloud_verifier.engine.job import Guesses, Job, Lease
from cloud_verifier.engine.schedule import EngineStep, PrefillPiece, Scheduler, StepOutcome
from moa.sampling import SamplingSettings
from moa.speculation.cost import attention_pairs
from moa.wire import Limits
from moa.wire.finish import TurnRules
from moa.wire.messages import Stream

LIMITS = Limits(max_queue=20, max_queue_per_principal=12)
_names = itertools.count()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lease(principal: str = "a", length: int = 4) -> Lease:
    return Lease(next(_names).to_bytes(16), principal, length=length)


def job(holder: Lease, nodes: int = 4, base: int = 4, deadline: float = 1e9) -> Job:
    return Job(
        lease=holder,
        request=Stream(holder.session, 1, base, waits=True),
        ids=[1] * (base + 1),
        rules=TurnRules(0, 9, 99),
        sampling=SamplingSettings(),
        guesses=Guesses(waits=True),
        enqueued=100.0,
        deadline=deadline,
        cost=nodes,
    )


class Timed:
    """A scheduler and a made-up time. To ask for the next step says that the latest one has run."""

    def __init__(self, clock: Clock | None = None, **settings: Any) -> None:
        self.clock = clock or Clock()
        self.scheduler = Scheduler(
            **({"limits": LIMITS, "batch_wait": 0.0, "now": self.clock.now} | settings)
        )
        self.step: EngineStep | None = None
        self.outcome = StepOutcome()
        self.wait = 0.0

    def submit(self, *jobs: Job) -> None:
        for one in jobs:
            self.scheduler.submit(one, self.clock.now)

    def finish(self) -> list[Job]:
        if self.step is None:
            return []
        step, outcome, self.step, self.outcome = self.step, self.outcome, None, StepOutcome()
        return self.scheduler.finished(step, outcome, self.clock.now)

    def next(self) -> EngineStep | None:
        self.finish()
        found = self.scheduler.schedule(self.clock.now)
        self.step, self.wait = (found, 0.0) if isinstance(found, EngineStep) else (None, found)
        return self.step

    def taken(self) -> EngineStep:
        """The next step, which there must be."""
        step = self.next()
        assert step is not None
        return step


def drafts(step: EngineStep | None) -> list[Job]:
    assert step is not None
    return step.jobs


def pieces(step: EngineStep | None) -> list[PrefillPiece]:
    assert step is not None
    assert not step.jobs
    return step.prefill


class Machine:
    """Rounds on a model that takes 5 ms and 1 ms a token, and 5 ms more where it drafts; each
    session asks again 2 ms after its verdict. Sessions of `drafted` principals are drafted for by the server; those
    of `brief` ones have a prompt of 20 tokens and one round, and a new one follows."""

    pause = 0.002

    def __init__(
        self,
        sessions: dict[str, int],
        nodes: int | dict[str, int] = 1,
        *,
        drafted: str = "",
        brief: str = "",
        **settings: Any,
    ) -> None:
        self.queue = Timed(limits=Limits(), **settings)
        self.drafted = drafted
        self.brief = brief
        self.nodes = nodes if isinstance(nodes, dict) else dict.fromkeys(sessions, nodes)
        self.clock = clock = self.queue.clock
        self.rounds = dict.fromkeys(sessions, 0)
        self.seconds: dict[str, list[float]] = {name: [] for name in sessions}
        """From asking to the verdict."""
        self.asking = [
            (clock.now, self.lease(name)) for name, count in sessions.items() for _ in range(count)
        ]

    def lease(self, principal: str) -> Lease:
        return lease(principal, length=0 if principal == self.brief else 4)

    def job(self, holder: Lease, asked: float) -> Job:
        base = 20 if holder.principal == self.brief else 4
        one = dataclasses.replace(job(holder, self.nodes[holder.principal], base), enqueued=asked)
        if holder.principal == self.drafted:
            one.guesses = Guesses(waits=False)
        return one

    def run(self, seconds: float) -> dict[str, int]:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.turn()
        return self.rounds

    def turn(self) -> None:
        """Who is to ask asks, and the model takes a step, or waits for who asks next."""
        for asked, holder in (due := [one for one in self.asking if one[0] <= self.clock.now]):
            self.queue.scheduler.submit(self.job(holder, asked), asked)
        self.asking = [one for one in self.asking if one not in due]
        step = self.queue.next()
        if step is None:
            self.clock.now = min([self.clock.now + self.queue.wait, *(at for at, _ in self.asking)])
            return
        self.clock.now += self.takes(step)
        for piece in step.prefill:
            piece.lease.length += piece.size
        for one in step.jobs:
            name = one.lease.principal
            self.rounds[name] += 1
            self.seconds[name].append(self.clock.now - one.enqueued)
            again = self.lease(name) if name == self.brief else one.lease
            self.asking.append((self.clock.now + self.pause, again))

    def takes(self, step: EngineStep) -> float:
        self.queue.outcome.extra_seconds = 0.005 * any(one.takes_extra_work for one in step.jobs)
        tokens = sum(one.cost for one in step.jobs) + sum(piece.size for piece in step.prefill)
        return 0.005 + 0.001 * tokens + self.queue.outcome.extra_seconds


class Reader(Machine):
    """The same, with a model to which 3,000 tokens before a token are what many more are to a
    larger one, and with a prompt. Sessions ask again `pause` seconds after a verdict."""

    def __init__(self, sessions: int, *, pause: float = 0.001) -> None:
        super().__init__({"a": sessions}, nodes=8)
        self.pause = pause
        self.reader = lease(length=0)

    def begin(self, prompt: int) -> None:
        self.queue.scheduler.prefill(self.reader, [1] * (prompt + 1), prompt)

    def takes(self, step: EngineStep) -> float:
        rows = [*((one.cost, one.lease.length) for one in step.jobs)]
        rows += [(one.size, one.lease.length) for one in step.prefill]
        return 0.005 + 0.0003 * sum(size for size, _ in rows) + 2e-7 * attention_pairs(rows)


class Crowd(Reader):
    """Very many clients that rest between two answers, and rude ones that ask for the longest
    prompt there is, wait for one round and forget the session. An answer is a prompt and some
    rounds."""

    PROMPTS: ClassVar = {"honest": 24, "rude": 200}
    ROUNDS: ClassVar = {"honest": 5, "rude": 1}
    REST: ClassVar = {"honest": 120.0, "rude": 11.0}
    """Seconds, on average."""

    def __init__(self, **clients: int) -> None:
        super().__init__(0)
        many = 2 * sum(clients.values())
        limits = Limits(max_queue=many, max_queue_per_principal=many)
        self.queue = Timed(self.clock, limits=limits, batch_wait=0.0015)
        self.random = random.Random(0)
        self.answers: dict[str, list[float]] = {name: [] for name in clients}
        """Seconds from asking to the last verdict."""
        self.firsts: dict[str, list[float]] = {name: [] for name in clients}
        """Seconds from asking to the first one."""
        self.begun: Counter[str] = Counter()
        self.asked: dict[Lease, float] = {}
        """When the answers under way were asked for, by their leases."""
        self.left: dict[Lease, int] = {}
        """Rounds that they need."""
        self.waiting: list[tuple[float, int, str, Lease | None]] = []
        """When a client asks next, for another round or, without a lease, for an answer: a heap."""
        for name, count in clients.items():
            for _ in range(count):
                self.later(name, None, self.random.uniform(0.0, self.REST[name]))

    def later(self, name: str, holder: Lease | None, seconds: float) -> None:
        heapq.heappush(self.waiting, (self.clock.now + seconds, next(_names), name, holder))

    def turn(self) -> None:
        while self.waiting and self.waiting[0][0] <= self.clock.now:
            asked, _, name, holder = heapq.heappop(self.waiting)
            if holder is None:
                holder = lease(name, length=0)
                self.begun[name] += 1
                self.asked[holder] = asked
                self.left[holder] = self.ROUNDS[name]
            one = dataclasses.replace(job(holder, 4, self.PROMPTS[name]), enqueued=asked)
            self.queue.scheduler.submit(one, asked)
        step = self.queue.next()
        if step is None:
            self.clock.now = min(self.clock.now + self.queue.wait, self.waiting[0][0])
            return
        self.clock.now += self.takes(step)
        for piece in step.prefill:
            piece.lease.length += piece.size
        for one in step.jobs:
            self.verdict(one.lease)

    def verdict(self, holder: Lease) -> None:
        name = holder.principal
        if self.left[holder] == self.ROUNDS[name]:
            self.firsts[name].append(self.clock.now - self.asked[holder])
        self.left[holder] -= 1
        if self.left[holder]:
            self.later(name, holder, self.pause)
            return
        self.answers[name].append(self.clock.now - self.asked.pop(holder))
        self.later(name, None, self.random.expovariate(1 / self.REST[name]))
