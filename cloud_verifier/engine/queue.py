"""The rounds that wait for the model: bounded, and shared fairly between principals. Pure: the caller passes times.

The principal that has been served least goes first, in seconds of the engine: its forwards, drafts and masks; within
one, the round that somebody has waited for longest. Forwards stay short while a principal with few sessions is in the
middle of an answer, and it is waited for if it comes soon: a hundred sessions of one principal leave half of the time
for the single session of another.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from cloud_verifier.engine.work import Job, Lease
from moa.speculation.cost import Cost
from moa.wire.codes import Code, Refusal
from moa.wire.limits import Limits

_OTHERS_SHARE = 0.35
"""How much longer than the rounds of the smallest principal a forward may take for each other principal."""
_MEASURED = 8
"""One of so many forwards is as short as possible, to measure the cost of the others."""
_CREDIT = 0.25
"""Seconds that a principal may have been served less than another: who asked for nothing gets no more credit."""
_GAP_WEIGHT = 0.2

_priority = attrgetter("due")


@dataclass(slots=True)
class _Principal:
    ready: deque[Job] = field(default_factory=deque)
    served: float = 0.0
    """Seconds of the engine."""
    queued: int = 0
    """Rounds that are ready, or wait for their prompt."""
    step: float = 0.0
    """Seconds of its latest forward."""
    gap: float = math.inf
    """From a verdict to the session's next round, lately."""


class RoundQueue:
    """Rounds by principal."""

    def __init__(self, limits: Limits, max_rows: int, max_tokens: int) -> None:
        self._limits, self._max_rows, self._max_tokens = limits, max_rows, max_tokens
        self._principals: dict[str, _Principal] = {}
        self._batches = itertools.count()
        self.queued = 0
        """Rounds that are ready, or wait for their prompt."""

    @property
    def ready(self) -> int:
        """Rounds that can run now."""
        return sum(len(principal.ready) for principal in self._principals.values())

    def admit(self, job: Job) -> None:
        """Count a round; a `Refusal` when there is no room."""
        principal = self._principal(job.lease.principal)
        if self.queued >= self._limits.max_queue:
            raise self._busy("max_queue", self.queued)
        if principal.queued >= self._limits.max_queue_per_principal:
            raise self._busy("max_queue_per_principal", principal.queued)
        self._count(job, 1)

    def add(self, job: Job) -> None:
        """An admitted round can run."""
        self._principal(job.lease.principal).ready.append(job)

    def again(self, job: Job) -> None:
        """A round that has begun wants its next forward: it is not refused."""
        self._count(job, 1)
        self.add(job)

    def leave(self, job: Job) -> None:
        """A round that was admitted, and is not ready, is given up."""
        self._count(job, -1)

    def remove(self, lease: Lease) -> Job | None:
        """Take the lease's ready round out."""
        ready = self._principal(lease.principal).ready
        job = next((job for job in ready if job.lease is lease), None)
        if job is not None:
            ready.remove(job)
            self._count(job, -1)
        return job

    def __contains__(self, job: Job) -> bool:
        """Whether a round can run and has not."""
        return job in self._principal(job.lease.principal).ready

    def served(self, principal: str) -> float:
        """Seconds that the engine has worked for a principal."""
        return self._principal(principal).served

    def charge(self, seconds: Mapping[str, float], step: float) -> None:
        """A step has worked so long for each of these principals, and took so long in all."""
        for name, part in seconds.items():
            principal = self._principal(name)
            principal.served, principal.step = principal.served + part, step
        most = max(principal.served for principal in self._principals.values())
        for principal in self._principals.values():
            principal.served = max(principal.served, most - _CREDIT)

    def came_back(self, lease: Lease, gap: float) -> None:
        """A session sends its next round, so long after its verdict."""
        principal = self._principal(lease.principal)
        before = gap if principal.gap == math.inf else principal.gap
        principal.gap = before + _GAP_WEIGHT * (min(gap, 2 * before) - before)

    @property
    def step(self) -> float:
        """Seconds of a forward like the latest one of those whose rounds are ready."""
        return max((principal.step for principal in self._principals.values() if principal.ready), default=0.0)

    def owed(self, principal: str) -> float:
        """How soon after a verdict a principal comes back that has been served less than all whose rounds are ready;
        infinite if it was not."""
        found = self._principal(principal)
        ready = [other.served for other in self._principals.values() if other.ready]
        return found.gap if not found.ready and found.served < min(ready, default=0.0) else math.inf

    def take(self, now: float, active: Mapping[Lease, int], cost: Cost, extra: float) -> tuple[list[Job], list[Job]]:
        """The rounds of the next forward, and those that have expired or were cancelled. `active` are sessions in the
        middle of an answer, with the tokens of their rounds; drafts and masks of a forward take `extra` seconds."""
        demands = self._demands(active)
        # Each principal may use as much as the smallest one. More only if that hardly delays the smallest one, which
        # also waits for the forward before its own.
        least, others = min(demands.values(), default=0), len(demands) - 1
        room, spare = least, _OTHERS_SHARE * others * cost.seconds(least)
        if next(self._batches) % _MEASURED:
            room += cost.fitting(spare, self._max_tokens, beside=least)
        for principal in self._principals.values():
            principal.ready = deque(sorted(principal.ready, key=_priority))
        jobs: list[Job] = []
        expired: list[Job] = []
        tokens, taken, plain = 0, dict.fromkeys(demands, 0), False

        def fits(name: str) -> bool:
            """Whether a principal's next round hardly delays those that have been taken."""
            job = self._principals[name].ready[0]
            if plain and job.aided and extra > spare:
                return False
            return max(least - taken[name], room - tokens) >= job.cost

        while len(jobs) < self._max_rows:
            names = [name for name, p in self._principals.items() if p.ready]
            if others and tokens:
                names = [name for name in names if fits(name)]
            if not names:
                break
            name = min(names, key=lambda name: self._principals[name].served + cost.added(taken[name]))
            principal = self._principals[name]
            job = principal.ready[0]
            if jobs and tokens + job.cost > self._max_tokens:
                break
            principal.ready.popleft()
            self._count(job, -1)
            if job.cancelled or job.deadline <= now:
                expired.append(job)
                continue
            tokens += job.cost
            taken[name] += job.cost
            jobs.append(job)
            plain = not any(one.aided for one in jobs)
        return jobs, expired

    def _demands(self, active: Mapping[Lease, int]) -> dict[str, int]:
        """Tokens that each principal has ready or will soon send."""
        rounds = {name: {job.lease: job.cost for job in p.ready} for name, p in self._principals.items() if p.ready}
        for lease, tokens in active.items():
            rounds.setdefault(lease.principal, {}).setdefault(lease, tokens)
        return {name: sum(tokens.values()) for name, tokens in rounds.items()}

    def _principal(self, name: str) -> _Principal:
        if name not in self._principals:
            # A principal without queued work gets no credit for the past: it starts level with those that wait.
            self._principals = {n: p for n, p in self._principals.items() if p.queued or p.ready}
            waiting = [p.served for p in self._principals.values()]
            self._principals[name] = _Principal(served=min(waiting, default=0.0))
        return self._principals[name]

    def _count(self, job: Job, change: int) -> None:
        self.queued += change
        self._principal(job.lease.principal).queued += change

    def _busy(self, limit: str, queued: int) -> Refusal:
        wait = self._limits.busy_retry_seconds * (1 + queued / max(1, self._max_rows))
        return Refusal(Code.BUSY, f"{queued} rounds are waiting", limit=limit, retry_after_ms=int(1000 * wait))
