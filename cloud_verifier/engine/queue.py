"""The rounds that wait for the model: bounded, and shared fairly between principals. Pure: the
caller passes times.

The principal that has been served least goes first, in seconds of the engine: its forwards, drafts
and masks; within one, the round that somebody has waited for longest. Forwards stay short while a
principal with few sessions is in the middle of an answer, and it is waited for if it comes soon: a
hundred sessions of one principal leave half of the time for the single session of another.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from cloud_verifier.engine.job import Job, Lease
from moa.speculation.cost import Cost
from moa.wire.codes import Code, Refusal
from moa.wire.limits import Limits

_OTHERS_SHARE = 0.35
"""How much longer than the rounds of the smallest principal a forward may take for each other
principal."""
_MEASURED = 8
"""One of so many forwards is as short as possible, to measure the cost of the others."""
_CREDIT = 0.25
"""Seconds that a principal may wait for all others together because they have been served less than
it: who asked for nothing gets no more credit."""
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


class FairBatch:
    """The rounds of one forward while they are chosen.

    Each principal may use as many tokens as the smallest one has. More only if that hardly delays
    the smallest one, which also waits for the forward before its own.
    """

    def __init__(
        self,
        demands: Mapping[str, int],
        cost: Cost,
        *,
        extra: float,
        max_rows: int,
        max_tokens: int,
        as_short_as_possible: bool,
    ) -> None:
        """`demands`: tokens that each principal has ready or will soon send; `extra`: seconds of
        drafts and masks, if a round of this forward needs any."""
        self.jobs: list[Job] = []
        self.tokens = 0
        self.taken = dict.fromkeys(demands, 0)
        """Tokens of each principal."""
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._least = min(demands.values(), default=0)
        """Tokens of the smallest principal."""
        self._others = len(demands) - 1
        spare = _OTHERS_SHARE * self._others * cost.seconds(self._least)
        """Seconds by which the smallest principal may be delayed."""
        self._extra_work_fits = extra <= spare
        self._has_extra_work = False
        """Whether a round of this forward needs drafts or masks."""
        self._room = self._least
        if not as_short_as_possible:
            self._room += cost.fitting(spare, max_tokens, beside=self._least)

    @property
    def full(self) -> bool:
        """Whether it has all the rows that a forward may have."""
        return len(self.jobs) >= self._max_rows

    def room_for(self, job: Job) -> bool:
        """Whether a round hardly delays those that have been taken."""
        if not self._others or not self.tokens:
            return True
        if job.takes_extra_work and not self._has_extra_work and not self._extra_work_fits:
            return False
        share_left = self._least - self.taken[job.lease.principal]
        return job.cost <= max(share_left, self._room - self.tokens)

    def fits(self, job: Job) -> bool:
        """Whether a forward may have so many tokens; a single round may have any number."""
        return not self.jobs or self.tokens + job.cost <= self._max_tokens

    def add(self, job: Job) -> None:
        """Take a round."""
        self.jobs.append(job)
        self.tokens += job.cost
        self.taken[job.lease.principal] += job.cost
        self._has_extra_work |= job.takes_extra_work


class RoundQueue:
    """Rounds by principal."""

    def __init__(self, limits: Limits, max_rows: int, max_tokens: int) -> None:
        self._limits = limits
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._principals: dict[str, _Principal] = {}
        self._parked: dict[Lease, Job] = {}
        """Rounds that wait for their prompt."""
        self.queued = 0
        """Rounds that are ready, or wait for their prompt."""
        self._level = 0.0
        """Seconds that those had been served that ran lately."""
        self._batches = itertools.count()

    @property
    def ready(self) -> int:
        """Rounds that can run now."""
        return sum(len(principal.ready) for principal in self._principals.values())

    def admit(self, job: Job) -> bool:
        """Take a round in; a `Refusal` when there is no room. Whether it can run: else it waits for
        its prompt."""
        self.arrive(job.lease.principal)
        principal = self._principal(job.lease.principal)
        if self.queued >= self._limits.max_queue:
            raise self._busy("max_queue", self.queued)
        if principal.queued >= self._limits.max_queue_per_principal:
            raise self._busy("max_queue_per_principal", principal.queued)
        self._count(job, 1)
        if job.lease.length < job.base:
            self._parked[job.lease] = job
            return False
        principal.ready.append(job)
        return True

    def again(self, job: Job) -> None:
        """A round that has begun wants its next forward: it is not refused."""
        self._count(job, 1)
        self._principal(job.lease.principal).ready.append(job)

    def prompt_ran(self, lease: Lease) -> None:
        """A round that waited for its prompt can run."""
        if (job := self._parked.pop(lease, None)) is not None:
            self._principal(lease.principal).ready.append(job)

    def remove(self, lease: Lease) -> Job | None:
        """Take the lease's round out, if there is one."""
        ready = self._principal(lease.principal).ready
        job = self._parked.pop(lease, None)
        if (
            job is None
            and (job := next((job for job in ready if job.lease is lease), None)) is not None
        ):
            ready.remove(job)
        if job is not None:
            self._count(job, -1)
        return job

    def parked(self, lease: Lease) -> bool:
        """Whether a round of this lease waits for its prompt."""
        return lease in self._parked

    def __contains__(self, job: Job) -> bool:
        """Whether a round is still to be run."""
        return (
            self._parked.get(job.lease) is job or job in self._principal(job.lease.principal).ready
        )

    def served(self, principal: str) -> float:
        """Seconds that the engine has worked for a principal."""
        return self._principal(principal).served

    def charge(self, seconds: Mapping[str, float], step: float) -> None:
        """A step has worked so long for each of these principals, and took so long in all."""
        for name, part in seconds.items():
            principal = self._principal(name)
            self._level = max(self._level, principal.served)
            principal.served = principal.served + part
            principal.step = step

    def arrive(self, name: str) -> None:
        """A principal that had nothing to run has something: what it left to others counts only up
        to the credit."""
        principal = self._principal(name)
        if not principal.queued:
            principal.served = max(
                principal.served, self._level - _CREDIT / max(1, len(self._principals) - 1)
            )

    def came_back(self, lease: Lease, gap: float) -> None:
        """A session sends its next round, so long after its verdict."""
        principal = self._principal(lease.principal)
        before = gap if principal.gap == math.inf else principal.gap
        principal.gap = before + _GAP_WEIGHT * (min(gap, 2 * before) - before)

    @property
    def step(self) -> float:
        """Seconds of a forward like the latest one of those whose rounds are ready."""
        return max(
            (principal.step for principal in self._principals.values() if principal.ready),
            default=0.0,
        )

    def owed(self) -> dict[str, float]:
        """The principals that have been served less than all whose rounds are ready, and how soon
        after a verdict each comes back."""
        least = min(
            (principal.served for principal in self._principals.values() if principal.ready),
            default=0.0,
        )
        return {
            name: one.gap
            for name, one in self._principals.items()
            if not one.ready and one.served < least
        }

    def forget(self, present: Container[str]) -> None:
        """Only these principals still have sessions."""
        self._principals = {n: p for n, p in self._principals.items() if p.queued or n in present}

    def take(
        self, now: float, active: Mapping[Lease, int], cost: Cost, extra: float
    ) -> tuple[list[Job], list[Job]]:
        """The rounds of the next forward, and those that have expired or were cancelled. `active`
        are sessions in the middle of an answer, with the tokens of their rounds; drafts and masks
        of a forward take `extra` seconds."""
        for principal in self._principals.values():
            principal.ready = deque(sorted(principal.ready, key=_priority))
        batch = FairBatch(
            self._demands(active),
            cost,
            extra=extra,
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
            as_short_as_possible=next(self._batches) % _MEASURED == 0,
        )
        expired: list[Job] = []
        level = {
            name: principal.served
            for name, principal in self._principals.items()
            if principal.ready
        }
        while level and not batch.full:
            least_served_first = sorted(level, key=level.__getitem__)
            name = next(
                (n for n in least_served_first if batch.room_for(self._principals[n].ready[0])),
                None,
            )
            if name is None or not batch.fits(self._principals[name].ready[0]):
                break
            principal = self._principals[name]
            job = principal.ready.popleft()
            self._count(job, -1)
            if job.cancelled or job.deadline <= now:
                expired.append(job)
            else:
                batch.add(job)
                level[name] = principal.served + cost.added(batch.taken[name])
            if not principal.ready:
                del level[name]
        return batch.jobs, expired

    def _demands(self, active: Mapping[Lease, int]) -> dict[str, int]:
        """Tokens that each principal has ready or will soon send."""
        rounds = {
            name: {job.lease: job.cost for job in p.ready}
            for name, p in self._principals.items()
            if p.ready
        }
        for lease, tokens in active.items():
            rounds.setdefault(lease.principal, {}).setdefault(lease, tokens)
        return {name: sum(tokens.values()) for name, tokens in rounds.items()}

    def _principal(self, name: str) -> _Principal:
        return self._principals.setdefault(name, _Principal())

    def _count(self, job: Job, change: int) -> None:
        self.queued += change
        self._principal(job.lease.principal).queued += change

    def _busy(self, limit: str, queued: int) -> Refusal:
        wait = self._limits.busy_retry_seconds * (1 + queued / max(1, self._max_rows))
        return Refusal(
            Code.BUSY, f"{queued} rounds are waiting", limit=limit, retry_after_ms=int(1000 * wait)
        )
