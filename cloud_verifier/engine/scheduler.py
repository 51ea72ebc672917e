"""What the model runs next. Bounded, fair between principals, without starvation. No torch, no clock.

Drafts go first, all that are ready in one batch. Beside them go chunks of waiting prompts, so a long prompt cannot
hold drafts up, nor drafts a prompt for ever: in the same forward, as many tokens as make it longer by a stated share;
or, where that is hardly any, in a forward of their own that drafts may interrupt after every layer.
Between principals the one that has been served least goes first (virtual time: tokens run), within one the round that
somebody has waited for longest: what a stream has sent keeps its reader busy for a while. And forwards stay short
while one with few sessions is in the middle of an answer: a hundred sessions of one leave time for the single session
of another.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from cloud_verifier.engine.interleaving import RECENT, Interleaving, PiecewiseForward
from cloud_verifier.engine.work import Job, Lease
from moa.speculation.cost import Cost, attention_pairs
from moa.speculation.policy import least_chance
from moa.wire.codes import Code, Refusal
from moa.wire.limits import Limits

_WORTH_WAITING = 0.25  # of the last batch's time
_BESIDE = 0.2
"""How much longer a forward with drafts may take for prompts in the same batch."""
_OTHERS_SHARE = 0.35
"""How much longer than the rounds of the smallest principal a forward may take for each other principal."""
_MEASURED = 8
"""One of so many such forwards is as short as possible, to measure the cost of the others."""
_LEAST_BESIDE = 16
"""With room for fewer prompt tokens beside drafts, prompts run by themselves."""
_PRIOR = 0.0008
"""Seconds of a token before any has run."""
_LEAST_CHUNK = 4
"""Least prompt tokens of a forward, however long they take, so that prompts finish."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Chunks of prompts to run by themselves. The same one is handed out again, between other work, until the thread
    says that it has run: if the model can, run one layer of it each time."""

    chunks: list[Chunk]


Work = ForwardBatch | Reading | Releases


@dataclass(slots=True)
class _Prompt:
    ids: Sequence[int]
    goal: int
    ran: int = 0


@dataclass(slots=True)
class _Underway:
    """What is being read by itself."""

    reading: Reading
    forward: PiecewiseForward
    tokens: int
    pairs: float
    undisturbed: bool
    """Whether nobody was about to send a round when it was chosen."""


@dataclass(slots=True)
class _Principal:
    ready: deque[Job] = field(default_factory=deque)
    served: float = 0.0
    queued: int = 0


_due = attrgetter("due")


@dataclass(slots=True)
class BackgroundPiece:
    """A piece of background work: the seconds that it may take, and whether it found anything to do in them."""

    seconds: float
    ran: bool = False


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
        pieces: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pieces` are the parts of a forward of prompts, between which others can run."""
        self._limits = limits
        self._max_rows, self._max_tokens, self._prefill_tokens = max_batch_rows, max_batch_tokens, prefill_tokens
        self._batch_wait, self._pieces = batch_wait, pieces
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
        self._handed: tuple[float, ForwardBatch | Reading, float] | None = None
        """When work was handed out, which, and its `attention_pairs`."""
        self._underway: _Underway | None = None
        self._interleaving = Interleaving(clock())
        self._beside = 0
        """Prompt tokens that went along with the latest drafts."""
        self._turns = itertools.count(1)
        self._cost = Cost(_PRIOR, cautious=True)
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

    @property
    def reading(self) -> Reading | None:
        """What is being read, if anything: the thread forgets the forward of any other."""
        return self._underway.reading if self._underway is not None else None

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
                self._interleaving.round_ready(self._clock())
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
                    self._handed = self._clock(), work, self._pairs(work)
                    return work
                if self._releases:
                    continue  # they came while a batch waited for company, and its rows may need their slots
                if self._woken:
                    self._woken = False
                    return None
                wait = min(hold, math.inf if timeout is None else timeout) if (hold := self._hold()) else timeout
                if timeout == 0 or not (self._changed.wait(wait) or wait != timeout):
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

    def read(self) -> None:
        """The thread has run the reading to its end, or gives it up."""
        with self._changed:
            self._note_end()
            if (read := self._underway) is not None and read.forward.complete:
                self._cost.observe(read.tokens, read.forward.spent, read.pairs)
            self._underway = None

    @contextlib.contextmanager
    def background(self) -> Iterator[BackgroundPiece]:
        """The thread runs a piece of other work that can wait, while this is entered."""
        with self._changed:
            self._note_end()
            began = self._clock()
            seconds = self._interleaving.room(began) if self._ready() or self._expected() else math.inf
        piece = BackgroundPiece(seconds)
        try:
            yield piece
        finally:
            if piece.ran:
                with self._changed:
                    self._interleaving.piece_ends(began, self._clock())

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
        """The thread is back from what it was handed."""
        if self._handed is None:
            return
        now, (since, work, pairs) = self._clock(), self._handed
        self._handed = None
        if isinstance(work, Reading):
            self._interleaving.piece_ends(since, now)
            if self._underway is not None:
                self._underway.forward.piece_ends(now - since)
            return
        tokens = sum(job.cost for job in work.jobs) + sum(chunk.size for chunk in work.chunks)
        if tokens:
            self._cost.observe(tokens, now - since, pairs)
        if work.jobs:
            self._took = now - since
            self._interleaving.rounds_end(since, now)
            if self._ready():
                self._interleaving.round_ready(now)
        self._recent |= {job.lease: (now, job.cost) for job in work.jobs if not job.lease.revoked}

    def _pick(self) -> ForwardBatch | Reading | None:
        ready, underway = self._ready(), self._underway
        if ready and underway and underway.undisturbed and not self._interleaving.unnoticed(underway.forward.piece):
            self._underway = None  # too large to stand between rounds: it is chosen again, smaller
        if self._underway is None and not self._prompts:
            self._interleaving.nothing_waits()
        elif not ready or (self._interleaving.has_credit and not self._beside):
            self._begin()
        underway = self._underway
        if ready and (underway is None or not self._interleaving.goes_first(underway.forward.piece)):
            self._wait_for_more_rounds(ready)
            return None if self._releases else self._batch()
        if underway is None or (not ready and self._hold()):
            return None
        return underway.reading

    def _batch(self) -> ForwardBatch:
        jobs, expired = self._drafts()
        chunks: list[Chunk] = []
        if jobs:
            tokens = sum(job.cost for job in jobs)
            usual = self._cost.seconds(tokens, attention_pairs((job.cost, job.lease.length) for job in jobs))
            if self._underway is None:
                # What cannot be interrupted goes along at any price: by itself it would hold drafts up for longer.
                # At most twice as many as before: what many tokens take is not known while all forwards are alike.
                most = max(_LEAST_BESIDE, 2 * self._beside)
                chunks = self._chunks(_BESIDE * usual, _LEAST_BESIDE, most, force=self._pieces == 1, beside=tokens)
            self._beside = sum(chunk.size for chunk in chunks)
            self._interleaving.rounds_begin(usual, prompts=bool(chunks))
        return ForwardBatch(jobs, expired, chunks, least_chance(self._cost, max(1, len(jobs))))

    @staticmethod
    def _pairs(work: ForwardBatch | Reading) -> float:
        chunks = [(chunk.size, chunk.lease.length) for chunk in work.chunks]
        jobs = work.jobs if isinstance(work, ForwardBatch) else []
        return attention_pairs([*((job.cost, job.lease.length) for job in jobs), *chunks])

    def _begin(self) -> None:
        """Choose what is read by itself, if nothing is: pieces of a size that a round can wait for, where some come."""
        if self._underway is not None or not self._prompts:
            return
        once, least = self._cost.seconds(0), _LEAST_CHUNK
        if not self._expected():
            budget = math.inf
        elif self._pieces > 1:
            budget = self._pieces * self._interleaving.longest - once
        else:
            budget, least = once, _LEAST_BESIDE
        chunks = self._chunks(budget, least, self._prefill_tokens, force=True)
        reading = Reading(chunks)
        tokens, pairs = sum(chunk.size for chunk in chunks), self._pairs(reading)
        forward = PiecewiseForward(self._pieces, self._cost.seconds(tokens, pairs))
        self._underway = _Underway(reading, forward, tokens, pairs, math.isinf(budget))

    def _hold(self) -> float:
        """Seconds for which the reading leaves the model to rounds that are about to come."""
        if self._underway is None or not self._expected():
            return 0.0
        return self._interleaving.hold(self._underway.forward.piece, self._clock())

    def _ready(self) -> int:
        return sum(len(p.ready) for p in self._principals.values())

    def _expected(self) -> int:
        """Sessions that are about to send a round, or have."""
        self._forget_old()
        return sum(lease not in self._parked for lease in self._recent)

    def _forget_old(self) -> None:
        now = self._clock()
        self._recent = {lease: round for lease, round in self._recent.items() if now - round[0] < RECENT}

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
        room = least + self._cost.fitting(share * self._cost.seconds(least), self._max_tokens, beside=least)
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

    def _chunks(self, seconds: float, least: int, most: int, *, force: bool, beside: int = 0) -> list[Chunk]:
        """Pieces of waiting prompts, `most` tokens at most, that take so long in all, `beside` other tokens; none if
        less than `least` of the first fits, or with `force` so much. Those of principals that were served least come
        first, and of one principal's in turn the oldest and the one of which least has run: a short one does not wait
        for a long one."""
        chunks: list[Chunk] = []
        most, oldest = min(most, self._prefill_tokens), next(self._turns) % 2
        order = sorted(
            self._prompts.items(),
            key=lambda item: (self._principal(item[0].principal).served, 0 if oldest else item[1].ran),
        )
        for lease, prompt in order[: self._max_rows]:
            need = prompt.goal - lease.length
            size = self._cost.fitting(seconds, min(need, most), lease.length, beside)
            if not chunks and size < (few := min(need, least, most)):
                size = few if force else 0
            if size <= 0:
                break
            most -= size
            seconds -= self._cost.added(size, lease.length, beside)
            beside += size
            prompt.ran += size
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
