"""What the model runs next. Pure: no torch, no lock, no clock; `loop.py` has these.

    schedule(now) -> EngineStep, or the seconds to wait
    finished(step, outcome, now)

A step is one forward: rounds that are ready, by fair shares (`queue.py`), and beside them pieces of
waiting prompts, as long as these make rounds hardly longer (`pacing.py`). So a long prompt cannot
hold rounds up, nor rounds a prompt for ever.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.pacing import RECENT, Pacing
from cloud_verifier.engine.queue import RoundQueue
from moa.speculation.cost import Cost, attention_pairs
from moa.speculation.policy import least_chance
from moa.wire.limits import Limits

_WORTH_WAITING = 0.25
"""How long a forward waits for rounds that are about to come, of the time of the latest one."""
_LATE = 1.5
"""How long a principal that has been served less is waited for, of its usual pause after a verdict."""
_WORTH_SPARING = 0.5
"""The longest of these waits, of the time of the forward that waits."""
_EXTRA_WEIGHT = 0.1
_LEAST_PIECE = 8
"""Prompt tokens: smaller pieces are not worth a place in a forward, unless the prompt ends with
one."""
_FIRST_PIECE, _PIECE_SECONDS = 64, 2.0
"""Tokens of the first forward of prompts, and about how long each takes that has no rounds."""
_MEASURED = 8
"""One of so many forwards with rounds takes no prompts along, to measure what the rounds take
alone."""
_PRIOR = 0.0008
"""Seconds of a token before any has run."""
_SHORTEST_WAIT = 1e-4
"""Seconds."""


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Run up to `size` tokens of `ids` after those in the lease's slot, but none from `goal` on.
    None of a prompt that is shared whole."""

    lease: Lease
    ids: Sequence[int]
    goal: int
    size: int
    start: int
    """Tokens before it."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineStep:
    """One forward of rounds and pieces of prompts, after slots were given back."""

    releases: list[Lease] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    expired: list[Job] = field(default_factory=list)
    """Rounds that are not to be run: cancelled, or too late."""
    prefill: list[PrefillPiece] = field(default_factory=list)
    worth: float = 1.0
    """Least probability of a guessed token to be verified: higher with more rounds in the batch."""
    began: float = 0.0


@dataclass(slots=True)
class StepOutcome:
    """What became of a step."""

    ran: bool = True
    """Whether it ran as planned: else nothing is learned of its time."""
    again: list[Job] = field(default_factory=list)
    """Rounds that want their next forward: streams, and rounds whose masks were late."""
    full: list[Lease] = field(default_factory=list)
    """Prompts that found no memory: they are given up."""
    extra: float = 0.0
    """Seconds of drafts, and of masks where the forward was over sooner."""
    ended: float | None = None
    """When its latest forward ended; None if none has run."""


@dataclass(slots=True)
class _Prompt:
    ids: Sequence[int]
    goal: int
    ran: int = 0


@dataclass(slots=True)
class _BatchWait:
    """A batch that waits for more rounds."""

    began: float
    until: float
    """For the next one."""
    ready: int
    """Rounds that were ready when this was last looked at."""


class Scheduler:
    """Rounds, prompts and releases that wait for the model."""

    def __init__(
        self,
        limits: Limits,
        *,
        max_batch_rows: int = 64,
        max_batch_tokens: int = 2048,
        prefill_tokens: int = 256,
        batch_wait: float = 0.0015,
        now: float = 0.0,
    ) -> None:
        self._max_rows = max_batch_rows
        self._prefill_tokens = prefill_tokens
        self._batch_wait = batch_wait
        self._queue = RoundQueue(limits, max_batch_rows, max_batch_tokens)
        self._prompts: dict[Lease, _Prompt] = {}
        self._releases: list[Lease] = []
        self._active: dict[Lease, tuple[float, int]] = {}
        """Sessions in the middle of an answer: the time of their last round or verdict, and the
        tokens of it."""
        self._cost = Cost(_PRIOR, cautious=True)
        self._pacing = Pacing(now)
        self._latest_prefill = 0
        """Prompt tokens in the latest forward where rounds waited for them."""
        self._batches = itertools.count(1)
        self._extra = 0.0
        """Seconds of a forward's drafts and masks, on average."""
        self._batch_waiting: _BatchWait | None = None
        """While a batch waits for more rounds."""
        self._oldest_first = True
        """Whether of one principal's prompts the oldest goes next, or the one of which least has
        run."""

    # ---- what the event loop wants

    @property
    def queued(self) -> int:
        """Rounds waiting for the model."""
        return self._queue.queued

    def submit(self, job: Job, now: float) -> None:
        """Queue a round; a `Refusal` when there is no room. Tokens before its base are run first,
        where missing."""
        ready = self._queue.admit(job)
        if (seen := self._active.get(job.lease)) is not None:
            self._queue.came_back(job.lease, now - seen[0])
        self._active[job.lease] = now, job.cost
        if ready:
            self._pacing.round_ready(now)
        else:
            self.prefill(job.lease, job.ids, job.base)

    def prefill(self, lease: Lease, ids: Sequence[int], goal: int) -> None:
        """Have the slot hold the first `goal` tokens of `ids`."""
        if lease.length < goal:
            self._queue.arrive(lease.principal)
            self._prompts[lease] = _Prompt(ids, goal)

    def release(self, lease: Lease) -> None:
        """Void the lease, release its slot and forget the round that was still queued for it, if
        any."""
        lease.revoked = True
        self._active.pop(lease, None)
        self._releases.append(lease)
        self._prompts.pop(lease, None)
        self._queue.remove(lease)

    def holds(self, job: Job) -> bool:
        """Whether a round is still to be run."""
        return job in self._queue

    # ---- what the model runs

    def schedule(self, now: float) -> EngineStep | float:
        """The next step, or the seconds until there may be one."""
        if self._releases:
            releases = self._releases
            self._releases = []
            return EngineStep(releases=releases, began=now)
        self._forget_inactive(now)
        if self._queue.ready:
            return self._seconds_to_wait_for_rounds(now) or self._rounds(now)
        if not self._prompts:
            self._pacing.nothing_waits()
            return math.inf
        if not self._expected():
            return EngineStep(prefill=self._pieces(math.inf, self._alone()), began=now)
        most = max(_LEAST_PIECE, 2 * self._latest_prefill)
        if pieces := self._pieces(self._pacing.room(now) - self._cost.seconds(0), most):
            self._latest_prefill = sum(piece.size for piece in pieces)
            return EngineStep(prefill=pieces, began=now)
        lease, prompt = self._order()[0]
        tokens = min(_LEAST_PIECE, prompt.goal - lease.start)
        least = self._cost.seconds(tokens, attention_pairs([(tokens, lease.start)]))
        return self._pacing.hold(least, now) + _SHORTEST_WAIT

    def finished(self, step: EngineStep, outcome: StepOutcome, now: float) -> list[Job]:
        """The step has run; returns rounds that cannot run, because their prompts found no memory."""
        rounds = [(job.cost, job.base) for job in step.jobs]
        prefill = [(one.size, one.start) for one in step.prefill]
        tokens = sum(tokens for tokens, _ in [*rounds, *prefill])
        spent = now - step.began
        extra = min(outcome.extra, spent)
        if outcome.ran and tokens:
            pairs = attention_pairs([*rounds, *prefill])
            self._cost.observe(tokens, spent - extra, pairs)
            forward = self._cost.seconds(tokens, pairs) if self._cost else spent - extra
            self._queue.charge(self._parts(step, forward, extra), spent)
        if step.jobs:
            alone = sum(tokens for tokens, _ in rounds)
            beside = sum(self._cost.added(*piece, beside=alone) for piece in prefill)
            self._pacing.rounds_ran(max(0.0, spent - beside), min(beside, spent), now)
            self._active |= {
                job.lease: (now, job.cost) for job in step.jobs if not job.lease.revoked
            }
        elif step.prefill:
            self._pacing.piece_ran(step.began, now)
        for lease in [piece.lease for piece in step.prefill]:
            prompt = self._prompts.get(lease)
            if prompt is not None and lease.length >= prompt.goal:
                del self._prompts[lease]
                self._queue.prompt_ran(lease)
        for job in outcome.again:
            if not job.lease.revoked:
                self._queue.again(job)
        if self._queue.ready and (step.jobs or step.prefill):
            self._pacing.round_ready(now)
        for lease in outcome.full:
            self._prompts.pop(lease, None)
        return [
            queued for lease in outcome.full if (queued := self._queue.remove(lease)) is not None
        ]

    def background_room(self, now: float) -> float:
        """Seconds for which activation records may be made now."""
        self._forget_inactive(now)
        return (
            self._pacing.room_with_credit(now)
            if self._queue.ready or self._expected()
            else math.inf
        )

    def background_ran(self, began: float, now: float) -> None:
        """Activation records were made."""
        self._pacing.piece_ran(began, now)

    # ---- inside

    def _parts(self, step: EngineStep, forward: float, extra: float) -> dict[str, float]:
        """The seconds of a step that each principal is charged with: drafts and masks to whose they
        are, of the forward what an empty one takes evenly, and the rest by tokens. `forward`: what
        such a one takes while nothing else uses the processor, for that is nobody's doing here."""
        with_extra_work = [job.lease.principal for job in step.jobs if job.takes_extra_work]
        if with_extra_work:
            self._extra += _EXTRA_WEIGHT * (extra - self._extra)
        parts = [(job.lease.principal, job.cost) for job in step.jobs]
        parts += [(piece.lease.principal, piece.size) for piece in step.prefill]
        empty = min(self._cost.seconds(0), forward)
        a_token = (forward - empty) / sum(size for _, size in parts)
        names = {name for name, _ in parts}
        seconds = dict.fromkeys(names, empty / len(names))
        for name, size in parts:
            seconds[name] += a_token * size
        for name in with_extra_work:
            seconds[name] += extra / len(with_extra_work)
        return seconds

    def _alone(self) -> int:
        """Tokens of prompts in a forward without rounds. A target on a CPU would take a quarter of
        a minute for as many as an accelerator likes: what has been read is told after each forward,
        and a round that comes meanwhile waits for its end."""
        if not self._cost:
            return min(self._prefill_tokens, _FIRST_PIECE)
        fitting = self._cost.fitting(_PIECE_SECONDS, self._prefill_tokens)
        return max(_LEAST_PIECE, fitting)

    def _expected(self) -> int:
        """Sessions that are about to send a round."""
        return sum(not self._queue.parked(lease) for lease in self._active)

    def _forget_inactive(self, now: float) -> None:
        self._active = {
            lease: seen for lease, seen in self._active.items() if now - seen[0] < RECENT
        }
        self._queue.forget(
            {lease.principal for lease in itertools.chain(self._active, self._prompts)}
        )

    def _seconds_to_wait_for_rounds(self, now: float) -> float:
        """For those that are about to come: in a large batch each costs little, and one of a
        principal that has been served less would wait for the whole forward."""
        ready = self._queue.ready
        wait = self._batch_waiting
        if wait is None:
            wait = _BatchWait(began=now, until=now + self._batch_wait, ready=ready)
        if ready > wait.ready:  # they keep coming
            longest = max(self._batch_wait, _WORTH_WAITING * self._queue.step)
            wait.until = min(wait.began + longest, now + self._batch_wait)
            wait.ready = ready
        self._batch_waiting = wait
        until = wait.until
        if min(self._expected(), self._max_rows) <= ready:
            until = now  # nobody else is expected
        until = max([until, *self._underserved_arrivals(wait.began)])
        if self._batch_wait <= 0 or now >= until:
            self._batch_waiting = None
            return 0.0
        return until - now

    def _underserved_arrivals(self, began: float) -> list[float]:
        """By when principals that have been served less than all whose rounds are ready will have
        sent theirs, if that is worth sparing them the wait for a forward."""
        latest = began + _WORTH_SPARING * self._queue.step
        pauses = self._queue.owed()
        arrivals = [
            seen + _LATE * pauses.get(lease.principal, math.inf)
            for lease, (seen, _) in self._active.items()
        ]
        return [at for at in arrivals if at <= latest]

    def _rounds(self, now: float) -> EngineStep:
        active = {
            lease: tokens
            for lease, (_, tokens) in self._active.items()
            if not self._queue.parked(lease)
        }
        jobs, expired = self._queue.take(now, active, self._cost, self._extra)
        pieces: list[PrefillPiece] = []
        tokens = sum(job.cost for job in jobs)
        if jobs:
            seconds = self._cost.seconds(
                tokens, attention_pairs((job.cost, job.lease.length) for job in jobs)
            )
            # At most twice as many as before: what many tokens take is not known while all forwards
            # are alike.
            most = max(_LEAST_PIECE, 2 * self._latest_prefill)
            if next(self._batches) % _MEASURED:
                least = min(self._queue.served(job.lease.principal) for job in jobs)
                pieces = self._pieces(
                    self._pacing.beside(seconds), most, beside=tokens, served=least
                )
                self._latest_prefill = sum(piece.size for piece in pieces)
            if not self._prompts:
                self._pacing.nothing_waits()
        return EngineStep(
            jobs=jobs,
            expired=expired,
            prefill=pieces,
            worth=least_chance(self._cost, max(1, len(jobs))),
            began=now,
        )

    def _pieces(
        self, seconds: float, most: int | None = None, beside: float = 0, served: float = math.inf
    ) -> list[PrefillPiece]:
        """Pieces of waiting prompts that take so long in all. Those of principals that were served
        least come first, none above `served`; and of one principal's in turn the oldest and the one
        of which least has run: a short one does not wait for a long one."""
        pieces: list[PrefillPiece] = []
        left = min(most or self._prefill_tokens, self._prefill_tokens)
        for lease, prompt in self._order()[: self._max_rows]:
            start = lease.start
            need = max(0, prompt.goal - start)
            size = min(need, left)
            if seconds != math.inf:
                size = min(size, self._cost.fitting(seconds, size, start, beside))
            too_small = size < min(need, _LEAST_PIECE if seconds != math.inf else 1)
            if too_small or self._queue.served(lease.principal) > served:
                break
            left -= size
            if seconds != math.inf:
                seconds -= self._cost.added(size, start, beside)
                beside += size
            prompt.ran += size
            pieces.append(PrefillPiece(lease, prompt.ids, prompt.goal, size, start))
        self._oldest_first ^= bool(pieces)
        return pieces

    def _order(self) -> list[tuple[Lease, _Prompt]]:
        def rank(item: tuple[Lease, _Prompt]) -> tuple[float, int]:
            lease, prompt = item
            return self._queue.served(lease.principal), 0 if self._oldest_first else prompt.ran

        return sorted(self._prompts.items(), key=rank)
