"""What the model runs next. Bounded, fair between principals, without starvation. No torch, no clock.

Drafts go first, all that are ready in one batch. Beside them go chunks of waiting prompts, in the same forward and as
many tokens as make it longer by a stated share, so a long prompt cannot hold drafts up, nor drafts a prompt for ever.
Between principals the one that has been served least goes first (virtual time: tokens run), within one the round that
somebody has waited for longest: what a stream has sent keeps its reader busy for a while. And forwards stay short
while one with few sessions is in the middle of an answer: a hundred sessions of one leave time for the single session
of another.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from cloud_verifier.forward_time import ForwardTime
from cloud_verifier.work import Job, Lease
from moa.wire.codes import Code, Refusal
from moa.wire.limits import Limits

_WORTH_WAITING = 0.25  # of the last batch's time
_RECENT = 0.1  # seconds: a session that got its verdict this lately is about to send the next draft
_PROMPT_SHARE = 0.25
"""How much longer a forward with drafts may take for prompts in the same batch."""
_OTHERS_SHARE = 0.35
"""How much longer than the rounds of the smallest principal a forward may take for each other principal."""
_MEASURED = 8
"""One of so many such forwards is as short as possible, to measure the cost of the others."""
_LEAST_CHUNK = 16
"""Least prompt tokens of a forward, however short its drafts are, so that prompts finish."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Run up to `size` tokens of `ids` after those in the lease's slot, but none from `goal` on."""

    lease: Lease
    ids: Sequence[int]
    goal: int
    size: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rounds and chunks of prompts to run in one forward."""

    jobs: list[Job]
    expired: list[Job] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    worth: float = 1.0
    """Least probability of a guessed token to be verified: higher with more rounds in the batch."""


@dataclass(frozen=True, slots=True)
class Releases:
    """Leases whose slots are to be given back, before anything else runs."""

    leases: list[Lease]


Work = ForwardBatch | Releases


@dataclass(slots=True)
class _Prompt:
    ids: Sequence[int]
    goal: int


@dataclass(slots=True)
class _Principal:
    ready: deque[Job] = field(default_factory=deque)
    served: float = 0.0
    queued: int = 0


_due = attrgetter("due")


class Scheduler:
    """Thread-safe: the event loop submits, the model's thread takes."""

    def __init__(
        self,
        limits: Limits,
        *,
        max_batch_rows: int = 64,
        max_batch_tokens: int = 2048,
        prefill_tokens: int = 256,
        batch_wait: float = 0.0015,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._max_rows, self._max_tokens, self._prefill_tokens = max_batch_rows, max_batch_tokens, prefill_tokens
        self._batch_wait = batch_wait
        self._clock = clock
        self._changed = threading.Condition()
        self._woken = False
        self._principals: dict[str, _Principal] = {}
        self._parked: dict[Lease, Job] = {}
        self._prompts: dict[Lease, _Prompt] = {}
        self._releases: list[Lease] = []
        self._recent: dict[Lease, tuple[float, int]] = {}
        """Sessions in the middle of an answer: the time of their last message or verdict, and the tokens of that
        round."""
        self._queued = 0
        self._handed: tuple[float, ForwardBatch] | None = None
        self._forward_time = ForwardTime()
        self._forwards = itertools.count()
        self._took = 0.0  # seconds that the last batch of drafts ran
        self._stopped = False

    # ---- the event loop's side

    @property
    def queued(self) -> int:
        """Rounds waiting for the model."""
        return self._queued

    @property
    def prompts(self) -> int:
        """Prompts not yet run to their end."""
        return len(self._prompts)

    def submit(self, job: Job) -> None:
        """Queue a round; a `Refusal` when there is no room. Tokens before its base are run first, where missing."""
        with self._changed:
            principal = self._principal(job.lease.principal)
            if self._queued >= self._limits.max_queue:
                raise self._busy("max_queue", self._queued)
            if principal.queued >= self._limits.max_queue_per_principal:
                raise self._busy("max_queue_per_principal", principal.queued)
            self._queued += 1
            principal.queued += 1
            self._recent[job.lease] = self._clock(), job.cost
            if job.lease.length < job.base:
                self._parked[job.lease] = job
                self._want(job.lease, job.ids, job.base)
            else:
                principal.ready.append(job)
            self._changed.notify()

    def prefill(self, lease: Lease, ids: Sequence[int], goal: int) -> None:
        """Have the slot hold the first `goal` tokens of `ids`."""
        with self._changed:
            self._want(lease, ids, goal)
            self._changed.notify()

    def release(self, lease: Lease) -> Job | None:
        """Void the lease and release its slot; returns the job that was still queued for it, if any."""
        with self._changed:
            lease.revoked = True
            self._prompts.pop(lease, None)
            self._recent.pop(lease, None)
            job = self._parked.pop(lease, None)
            if job is None:
                principal = self._principal(lease.principal)
                job = next((j for j in principal.ready if j.lease is lease), None)
                if job is not None:
                    principal.ready.remove(job)
            if job is not None:
                self._forget(job)
            self._releases.append(lease)
            self._changed.notify()
            return job

    def wake(self) -> None:
        """Let the model's thread look around, although nothing is to be run."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def stop(self) -> None:
        """Wake the model's thread for the last time."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    # ---- the model thread's side

    def next(self, timeout: float | None) -> Work | None:
        """What to run, waiting up to `timeout` seconds (None: for ever); None when there is nothing or it is over."""
        with self._changed:
            self._note_end()
            while True:
                if self._releases:
                    leases, self._releases = self._releases, []
                    return Releases(leases)
                if self._stopped:
                    return None
                if (work := self._pick()) is not None:
                    self._handed = self._clock(), work
                    return work
                if self._releases:
                    continue  # they came while a batch waited for company, and its rows may need their slots
                if self._woken:
                    self._woken = False
                    return None
                if timeout == 0 or not self._changed.wait(timeout):
                    return None

    def prefilled(self, lease: Lease) -> None:
        """The thread has run a chunk; when the prompt is complete, the round that waited for it becomes ready."""
        with self._changed:
            prompt = self._prompts.get(lease)
            if prompt is None or lease.length < prompt.goal:
                return
            del self._prompts[lease]
            if (job := self._parked.pop(lease, None)) is not None:
                self._principal(lease.principal).ready.append(job)

    def give_up(self, lease: Lease) -> Job | None:
        """Run no more of the lease's prompt, for there is no memory; returns the round that waited for it, if any."""
        with self._changed:
            self._prompts.pop(lease, None)
            job = self._parked.pop(lease, None)
            if job is not None:
                self._forget(job)
            return job

    def again(self, job: Job) -> None:
        """Put a running stream back in the queue for its next forward."""
        with self._changed:
            if not job.lease.revoked:
                principal = self._principal(job.lease.principal)
                principal.ready.append(job)
                principal.queued += 1
                self._queued += 1

    # ---- inside the lock

    def _note_end(self) -> None:
        """The thread is back from a batch: its sessions have their verdicts, and will soon be here again."""
        if self._handed is not None:
            now, (since, batch) = self._clock(), self._handed
            self._handed = None
            tokens = sum(job.cost for job in batch.jobs) + sum(chunk.size for chunk in batch.chunks)
            if tokens:
                self._forward_time.observe(tokens, now - since)
            if batch.jobs:
                self._took = now - since
            self._recent |= {job.lease: (now, job.cost) for job in batch.jobs if not job.lease.revoked}

    def _pick(self) -> ForwardBatch | None:
        if ready := self._ready():
            self._wait_for_more_rounds(ready)
            if self._releases:
                return None
            jobs, expired = self._drafts()
            room = self._room(sum(job.cost for job in jobs), _PROMPT_SHARE) if jobs else self._prefill_tokens
            return ForwardBatch(jobs, expired, self._chunks(room), self._forward_time.worth(max(1, len(jobs))))
        if not self._prompts:
            return None
        # A round that comes now waits for this forward: where rounds are about to come, it is a short one.
        return ForwardBatch([], chunks=self._chunks(self._room(0, 1.0) if self._expected() else self._prefill_tokens))

    def _room(self, tokens: int, share: float) -> int:
        """Prompt tokens that may run in the same forward as so many others."""
        most = self._prefill_tokens
        return max(min(_LEAST_CHUNK, most), self._forward_time.beside(tokens, share, most))

    def _ready(self) -> int:
        return sum(len(p.ready) for p in self._principals.values())

    def _expected(self) -> int:
        """Sessions that are about to send a round, or have."""
        self._forget_old()
        return sum(lease not in self._parked for lease in self._recent)

    def _forget_old(self) -> None:
        now = self._clock()
        self._recent = {lease: round for lease, round in self._recent.items() if now - round[0] < _RECENT}

    def _wait_for_more_rounds(self, ready: int) -> None:
        """A larger batch costs hardly more than a small one, and the verdicts of one bring the drafts of the next in a
        burst: wait while others are about to be ready and drafts keep coming, for a part of a batch's time at most."""
        now = self._clock()
        until = now + max(self._batch_wait, _WORTH_WAITING * self._took)
        while self._batch_wait and ready < self._max_rows and not self._releases:
            if ready >= self._expected() or now >= until:
                return
            self._changed.wait(min(self._batch_wait, until - now))
            now, before = self._clock(), ready
            ready = self._ready()
            if ready == before:
                return

    def _demands(self) -> dict[str, int]:
        """Tokens of the rounds that each principal has ready or will soon send."""
        self._forget_old()
        rounds = {name: {job.lease: job.cost for job in p.ready} for name, p in self._principals.items() if p.ready}
        for lease, (_, cost) in self._recent.items():
            if lease not in self._parked:
                rounds.setdefault(lease.principal, {}).setdefault(lease, cost)
        return {name: sum(costs.values()) for name, costs in rounds.items()}

    def _drafts(self) -> tuple[list[Job], list[Job]]:
        now, demands = self._clock(), self._demands()
        # Each principal may use as much as the smallest one. More only if that hardly delays the smallest one, which
        # also waits for the forward before its own.
        least, others = min(demands.values(), default=0), len(demands) - 1
        share = _OTHERS_SHARE * others if next(self._forwards) % _MEASURED else 0.0
        room = least + self._forward_time.beside(least, share, self._max_tokens)
        for principal in self._principals.values():
            principal.ready = deque(sorted(principal.ready, key=_due))
        jobs: list[Job] = []
        expired: list[Job] = []
        tokens, taken = 0, dict.fromkeys(demands, 0)
        while len(jobs) < self._max_rows:
            names = [name for name, p in self._principals.items() if p.ready]
            if others and tokens:
                names = [n for n in names if max(least - taken[n], room - tokens) >= self._principals[n].ready[0].cost]
            if not names:
                break
            name = min(names, key=lambda name: self._principals[name].served)
            principal = self._principals[name]
            job = principal.ready[0]
            if jobs and tokens + job.cost > self._max_tokens:
                break
            principal.ready.popleft()
            self._forget(job)
            if job.cancelled or job.deadline <= now:
                expired.append(job)
                continue
            tokens += job.cost
            taken[name] += job.cost
            principal.served += job.cost
            jobs.append(job)
        return jobs, expired

    def _chunks(self, room: int) -> list[Chunk]:
        """Pieces of waiting prompts, `room` tokens in all; those of principals that were served least come first."""
        chunks: list[Chunk] = []
        by_need = sorted(self._prompts.items(), key=lambda item: self._principal(item[0].principal).served)
        for lease, prompt in by_need[: self._max_rows]:
            if room <= 0:
                break
            size = min(prompt.goal - lease.length, room)
            room -= size
            self._principal(lease.principal).served += size
            chunks.append(Chunk(lease, prompt.ids, prompt.goal, size))
        return chunks

    def _want(self, lease: Lease, ids: Sequence[int], goal: int) -> None:
        if lease.length < goal:
            self._prompts[lease] = _Prompt(ids, goal)

    def _principal(self, name: str) -> _Principal:
        if name not in self._principals:
            # A principal without queued work gets no credit for the past: it starts level with those that wait.
            self._principals = {n: p for n, p in self._principals.items() if p.queued or p.ready}
            waiting = [p.served for p in self._principals.values()]
            self._principals[name] = _Principal(served=min(waiting, default=0.0))
        return self._principals[name]

    def _forget(self, job: Job) -> None:
        self._queued -= 1
        self._principal(job.lease.principal).queued -= 1

    def _busy(self, limit: str, queued: int) -> Refusal:
        wait = self._limits.busy_retry_seconds * (1 + queued / max(1, self._max_rows))
        return Refusal(Code.BUSY, f"{queued} rounds are waiting", limit=limit, retry_after_ms=int(1000 * wait))
