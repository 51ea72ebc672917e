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
"""For each other principal, a forward may take so much longer than with the rounds of the smallest
principal alone, as a share of that time."""
_MEASURED = 8
"""One of so many forwards is as short as possible, to measure the cost of the others."""
_CREDIT = 0.25
"""Seconds that a principal may wait for all others together because they have been served less than
it. A principal that asked for nothing for long has no more credit than this."""
_GAP_WEIGHT = 0.2
"""Weight of the latest gap in the average."""

_by_due_time = attrgetter("due")


@dataclass(slots=True)
class _Principal:
    """What one principal has waiting, and what it was served."""

    ready: deque[Job] = field(default_factory=deque)
    """Rounds that can run now."""
    served: float = 0.0
    """Seconds that the engine has worked for it."""
    queued: int = 0
    """The number of its rounds that are ready, or wait for their prompt."""
    step: float = 0.0
    """Seconds of its latest forward."""
    gap: float = math.inf
    """Seconds from a verdict to the session's next round, on average."""


class FairBatch:
    """Chooses the rounds of one forward.

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
        """Begin the batch of one forward. `demands` are the tokens that each principal has ready or
        will soon send, `cost` what a forward takes by its tokens, and `extra` the seconds of drafts
        and masks if a round of this forward needs any."""
        self.jobs: list[Job] = []
        self.tokens = 0
        self.taken = dict.fromkeys(demands, 0)
        """Tokens of each principal in this forward."""
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._smallest_demand = min(demands.values(), default=0)
        """Tokens of the smallest principal."""
        self._others = len(demands) - 1
        delay = _OTHERS_SHARE * self._others * cost.seconds(self._smallest_demand)
        """Seconds by which the smallest principal may be delayed."""
        self._extra_work_fits = extra <= delay
        self._has_extra_work = False
        """Whether a round of this forward needs drafts or masks."""
        self._room = self._smallest_demand
        """Tokens that a forward may have without delaying the smallest principal more than that."""
        if not as_short_as_possible:
            self._room += cost.fitting(delay, max_tokens, beside=self._smallest_demand)

    @property
    def full(self) -> bool:
        """Whether it has all the rows that a forward may have."""
        return len(self.jobs) >= self._max_rows

    def room_for(self, job: Job) -> bool:
        """Whether this round would hardly delay the principal that has the fewest tokens to run, so
        that it may join the forward."""
        is_alone = not self._others
        if is_alone or not self.tokens:  # nobody to delay, or the first round of the forward
            return True
        if job.takes_extra_work and not self._has_extra_work and not self._extra_work_fits:
            return False
        # Every principal may use as many tokens as the smallest one has.
        share_left = self._smallest_demand - self.taken[job.lease.principal]
        return job.cost <= max(share_left, self._room - self.tokens)

    def fits(self, job: Job) -> bool:
        """Whether this round's tokens are not too many for a forward; a single round may have any
        number."""
        return not self.jobs or self.tokens + job.cost <= self._max_tokens

    def add(self, job: Job) -> None:
        """Have a round run in this forward."""
        self.jobs.append(job)
        self.tokens += job.cost
        self.taken[job.lease.principal] += job.cost
        self._has_extra_work |= job.takes_extra_work


class RoundQueue:
    """The rounds that wait, by principal, and what each principal was served."""

    def __init__(self, limits: Limits, max_rows: int, max_tokens: int) -> None:
        """Begin an empty queue; a forward has at most so many rows and tokens."""
        self._limits = limits
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._principals: dict[str, _Principal] = {}
        self._parked: dict[Lease, Job] = {}
        """Rounds that wait for their prompt."""
        self.queued = 0
        """Rounds that are ready, or wait for their prompt."""
        self._level = 0.0
        """Most seconds that a principal had been served before its latest forward: what those have
        come to that ask for work all the time."""
        self._batches = itertools.count()
        """Numbers of the forwards."""

    @property
    def ready(self) -> int:
        """The number of rounds that can run now."""
        return sum(len(principal.ready) for principal in self._principals.values())

    def admit(self, job: Job) -> bool:
        """Queue a round, a stream that wants its next forward; raises a `Refusal` if too many are
        queued. Returns whether it can run now: if its prompt is not in the slot yet, it waits for
        that."""
        self.arrive(job.lease.principal)
        principal = self._principal(job.lease.principal)
        if self.queued >= self._limits.max_queue:
            raise self._busy("max_queue", self.queued)
        if principal.queued >= self._limits.max_queue_per_principal:
            raise self._busy("max_queue_per_principal", principal.queued)
        self._count(job, 1)
        prompt_is_missing = job.lease.length < job.base
        if prompt_is_missing:
            self._parked[job.lease] = job
            return False
        principal.ready.append(job)
        return True

    def run_again(self, job: Job) -> None:
        """Queue a round that has begun and wants its next forward: it is never refused."""
        self._count(job, 1)
        self._principal(job.lease.principal).ready.append(job)

    def prompt_ran(self, lease: Lease) -> None:
        """Let the round that waited for this lease's prompt run, if there is one."""
        job = self._parked.pop(lease, None)
        if job is not None:
            self._principal(lease.principal).ready.append(job)

    def remove(self, lease: Lease) -> Job | None:
        """Take the lease's round out of the queue; returns it, or None if there is none."""
        job = self._parked.pop(lease, None)
        if job is None:
            job = self._remove_ready(lease)
        if job is not None:
            self._count(job, -1)
        return job

    def _remove_ready(self, lease: Lease) -> Job | None:
        """Take the lease's round out of those that can run, if it is there."""
        ready = self._principal(lease.principal).ready
        for job in ready:
            if job.lease is lease:
                ready.remove(job)
                return job
        return None

    def parked(self, lease: Lease) -> bool:
        """Whether a round of this lease waits for its prompt."""
        return lease in self._parked

    def __contains__(self, job: Job) -> bool:
        """Whether a round is still to be run."""
        if self._parked.get(job.lease) is job:
            return True
        return job in self._principal(job.lease.principal).ready

    def served(self, principal: str) -> float:
        """Seconds that the engine has worked for a principal."""
        return self._principal(principal).served

    def charge(self, seconds: Mapping[str, float], step: float) -> None:
        """Count for each of these principals the seconds that a step has worked for it; the whole
        step took `step` seconds."""
        for name, share in seconds.items():
            principal = self._principal(name)
            self._level = max(self._level, principal.served)
            principal.served += share
            principal.step = step

    def arrive(self, name: str) -> None:
        """Note that a principal has something to run. One that asked for nothing for a while is not
        owed all that others were served meanwhile: a small credit is left of it."""
        principal = self._principal(name)
        if not principal.queued:
            others = max(1, len(self._principals) - 1)
            credit = _CREDIT / others
            principal.served = max(principal.served, self._level - credit)

    def came_back(self, lease: Lease, gap: float) -> None:
        """Learn from a session that sends its next round so many seconds after its verdict."""
        principal = self._principal(lease.principal)
        average = gap if principal.gap == math.inf else principal.gap
        # A pause of a person counts as at most twice the average: it says little of the device.
        principal.gap = average + _GAP_WEIGHT * (min(gap, 2 * average) - average)

    @property
    def step(self) -> float:
        """Seconds that the next forward is likely to take: as long as the latest ones of the
        principals whose rounds are ready."""
        with_rounds = [principal for principal in self._principals.values() if principal.ready]
        return max((principal.step for principal in with_rounds), default=0.0)

    def owed(self) -> dict[str, float]:
        """Returns the principals without a ready round that have been served less than all with
        one; for each, the average seconds between a verdict and its session's next round."""
        with_rounds = [principal for principal in self._principals.values() if principal.ready]
        least = min((principal.served for principal in with_rounds), default=0.0)
        gaps = {}
        for name, principal in self._principals.items():
            if not principal.ready and principal.served < least:
                gaps[name] = principal.gap
        return gaps

    def forget(self, present: Container[str]) -> None:
        """Forget the principals that have nothing queued and no session: only those that are
        `present` have one."""
        self._principals = {
            name: principal
            for name, principal in self._principals.items()
            if principal.queued or name in present
        }

    def take(
        self,
        now: float,
        active: Mapping[Lease, int],
        prompts: Mapping[str, int],
        cost: Cost,
        extra: float,
    ) -> tuple[list[Job], list[Job]]:
        """Take the rounds of the next forward out of the queue; returns them, and those that were
        cancelled or are too late. `active` are the sessions in the middle of an answer, with the
        tokens of their rounds, and `prompts` the tokens of prompts that wait, by principal; drafts
        and grammar masks of a forward take `extra` seconds."""
        for principal in self._principals.values():
            principal.ready = deque(sorted(principal.ready, key=_by_due_time))
        batch = FairBatch(
            self._demands(active, prompts),
            cost,
            extra=extra,
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
            as_short_as_possible=next(self._batches) % _MEASURED == 0,
        )
        expired: list[Job] = []
        # Seconds that each principal with rounds will have been served after this forward.
        served = {
            name: principal.served
            for name, principal in self._principals.items()
            if principal.ready
        }
        while served and not batch.full:
            name = self._next_in_turn(served, batch)
            if name is None:
                break
            principal = self._principals[name]
            job = principal.ready.popleft()
            self._count(job, -1)  # one round less
            if job.cancelled or job.deadline <= now:
                expired.append(job)
            else:
                batch.add(job)
                served[name] = principal.served + cost.added(batch.taken[name])
            if not principal.ready:
                del served[name]
        return batch.jobs, expired

    def _next_in_turn(self, served: Mapping[str, float], batch: FairBatch) -> str | None:
        """Returns the principal whose round joins the forward next: the one that has been served
        least, of those whose round hardly delays others. None if there is no such round, or if it
        is too large to join: then it comes first in the next forward."""
        for name in sorted(served, key=served.__getitem__):
            job = self._principals[name].ready[0]
            if batch.room_for(job):
                return name if batch.fits(job) else None
        return None

    def _demands(self, active: Mapping[Lease, int], prompts: Mapping[str, int]) -> dict[str, int]:
        """Returns the tokens that each principal with rounds has ready to run or will soon send,
        its waiting prompts among them: with two rounds and a hundred prompts it is no small one,
        for which a forward is kept short."""
        by_session: dict[str, dict[Lease, int]] = {}
        for name, principal in self._principals.items():
            if principal.ready:
                by_session[name] = {job.lease: job.cost for job in principal.ready}
        for lease, tokens in active.items():
            # A session whose round is ready is not counted twice.
            by_session.setdefault(lease.principal, {}).setdefault(lease, tokens)
        return {
            name: sum(tokens.values()) + prompts.get(name, 0) for name, tokens in by_session.items()
        }

    def _principal(self, name: str) -> _Principal:
        """What is known of a principal; a new one has been served nothing."""
        return self._principals.setdefault(name, _Principal())

    def _count(self, job: Job, change: int) -> None:
        """Count a round that has come (1) or gone (-1)."""
        self.queued += change
        self._principal(job.lease.principal).queued += change

    def _busy(self, limit: str, queued: int) -> Refusal:
        """The refusal of a round because so many are queued. It says to come back when the forwards
        before it will have run."""
        wait = self._limits.busy_retry_seconds * (1 + queued / max(1, self._max_rows))
        return Refusal(
            Code.BUSY, f"{queued} rounds are waiting", limit=limit, retry_after_ms=int(1000 * wait)
        )
