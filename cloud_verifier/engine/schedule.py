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
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.pacing import RECENT, Pacing
from cloud_verifier.engine.queue import RoundQueue
from moa.speculation.cost import Cost, attention_pairs
from moa.speculation.policy import least_chance
from moa.wire.limits import Limits

_WORTH_WAITING = 0.25
"""A forward waits for rounds that keep coming at most for this share of the latest forward's time."""
_LATE = 1.5
"""A principal that has been served less is waited for at most so many times as long as it usually
pauses after a verdict."""
_WORTH_SPARING = 0.5
"""No such principal is waited for longer than this share of the time of the forward that waits."""
_EXTRA_WEIGHT = 0.1
"""Weight of the latest forward in the average seconds of drafts and masks."""
_LEAST_PIECE = 8
"""Prompt tokens: smaller pieces are not worth a place in a forward, unless the prompt ends with
one."""
_FIRST_PIECE = 64
"""Prompt tokens of the first forward without rounds, before anything was measured."""
_PIECE_SECONDS = 2.0
"""About how long a forward of prompts without rounds may take."""
_MEASURED = 8
"""One of so many forwards with rounds takes no prompts along, to measure what the rounds take
alone."""
_PRIOR = 0.0008
"""Seconds of a token before any has run."""
_SHORTEST_WAIT = 1e-4
"""Seconds: less would keep a thread busy with waiting."""


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """A piece of a prompt: run up to `size` tokens of `ids` after those in the lease's slot, but
    none from `goal` on. A prompt that is shared whole has a piece of size 0, which takes its slot."""

    lease: Lease
    ids: Sequence[int]
    goal: int
    size: int
    start: int
    """Tokens before it, which are in the slot already, or will be shared."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineStep:
    """One forward of rounds and pieces of prompts, after slots were given back."""

    releases: list[Lease] = field(default_factory=list)
    heirs: list[Lease] = field(default_factory=list)
    """Leases that begin with what is in a slot that is given back: they take theirs before that. A
    device opens another session and closes the one that it branches from in the same moment."""
    jobs: list[Job] = field(default_factory=list)
    expired: list[Job] = field(default_factory=list)
    """Rounds that are not to be run: cancelled, or too late."""
    prefill: list[PrefillPiece] = field(default_factory=list)
    least_chance: float = 1.0
    """A guessed token that is less likely than this is not verified: higher with more rounds in the
    batch, which all wait for it."""
    began: float = 0.0
    """When the step was made, by the clock."""

    def without(self, leases: Collection[Lease]) -> EngineStep:
        """Returns the step without the rounds and pieces of prompts of these leases."""
        jobs = [job for job in self.jobs if job.lease not in leases]
        prefill = [piece for piece in self.prefill if piece.lease not in leases]
        return replace(self, jobs=jobs, prefill=prefill)


@dataclass(slots=True)
class StepOutcome:
    """What became of a step."""

    ran: bool = True
    """Whether it ran as planned, in one forward: else nothing is learned of its time."""
    left_out: Collection[Lease] = ()
    """Leases whose round or piece of a prompt was not run: they had no slot, or their device had
    sent no guess yet."""
    run_again: list[Job] = field(default_factory=list)
    """Rounds that want their next forward: streams, and rounds whose masks were late."""
    full: list[Lease] = field(default_factory=list)
    """Prompts that found no memory: they are given up."""
    extra_seconds: float = 0.0
    """Seconds of drafts, and of masks where the forward was over sooner."""
    ended: float | None = None
    """When its latest forward ended; None if none has run."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that waits until its first `goal` tokens are in a slot."""

    ids: Sequence[int]
    goal: int
    ran: int = 0
    """Tokens that have been planned so far."""


class _Seen(NamedTuple):
    """A session in the middle of an answer: its last round or verdict."""

    at: float
    tokens: int
    """Tokens that this round ran."""


@dataclass(slots=True)
class _BatchWait:
    """A batch that waits for more rounds."""

    began: float
    until: float
    """It waits no longer than this, unless another round comes."""
    ready: int
    """Rounds that were ready when this was last looked at."""


@dataclass(slots=True)
class _Room:
    """What a forward has room for, beside what it has already."""

    cost: Cost
    """Seconds of a forward, by its tokens."""
    tokens: int
    """Tokens of prompts that may still be added."""
    seconds: float
    """Seconds that they may take; infinite where nobody waits for the forward."""
    beside: float
    """Tokens that the forward has by now."""

    @property
    def least_piece(self) -> int:
        """Tokens of a prompt that are worth running, if more of it are missing."""
        return 1 if self.seconds == math.inf else _LEAST_PIECE

    def fitting(self, missing: int, start: int) -> int:
        """Returns how many of the `missing` tokens of a prompt fit, which go on at position
        `start`."""
        size = min(missing, self.tokens)
        if self.seconds == math.inf:
            return size
        return min(size, self.cost.fitting(self.seconds, size, start, self.beside))

    def take(self, size: int, start: int) -> None:
        """Give room to so many tokens of a prompt from position `start` on."""
        self.tokens -= size
        if self.seconds != math.inf:
            self.seconds -= self.cost.added(size, start, self.beside)
            self.beside += size


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
        """Begin with nothing to run. A forward has at most so many rows and tokens of rounds, and
        so many `prefill_tokens` of prompts; it waits for about `batch_wait` seconds for more
        rounds."""
        self._max_rows = max_batch_rows
        self._prefill_tokens = prefill_tokens
        self._batch_wait = batch_wait
        self._queue = RoundQueue(limits, max_batch_rows, max_batch_tokens)
        self._prompts: dict[Lease, _Prompt] = {}
        """Prompts that wait, the oldest first."""
        self._releases: list[Lease] = []
        """Leases whose slots are to be given back."""
        self._active: dict[Lease, _Seen] = {}
        """Sessions in the middle of an answer: they are about to send a round."""
        self._cost = Cost(_PRIOR, cautious=True)
        """Seconds of a forward, by its tokens."""
        self._pacing = Pacing(now)
        """How much of prompts and records runs beside rounds."""
        self._latest_prefill = 0
        """Prompt tokens in the latest forward where rounds waited for them."""
        self._batches = itertools.count(1)
        """Numbers of the forwards with rounds."""
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
        """Queue a round, or raise a `Refusal` if there is no room. If tokens before its base are
        missing in the slot, they are run first, as a prompt."""
        ready = self._queue.admit(job)
        seen = self._active.get(job.lease)
        if seen is not None:
            self._queue.came_back(job.lease, now - seen.at)
        self._active[job.lease] = _Seen(now, job.cost)
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
        """Returns the next step, one forward with what is to run in it, or the seconds until there
        may be one."""
        if self._releases:
            # First and by themselves, which takes no time.
            releases = self._releases
            self._releases = []
            heirs = [
                lease for lease in self._prompts if lease.slot is None and lease.share in releases
            ]
            return EngineStep(releases=releases, heirs=heirs, began=now)
        self._forget_inactive(now)
        if self._queue.ready:
            seconds = self._seconds_to_wait_for_rounds(now)
            return seconds if seconds else self._step_with_rounds(now)
        if self._prompts:
            return self._step_of_prompts(now)
        self._pacing.nothing_waits()
        return math.inf

    def finished(self, step: EngineStep, outcome: StepOutcome, now: float) -> list[Job]:
        """Learn how long a step took, and queue what goes on: rounds whose prompt is complete now,
        and streams. Returns rounds that cannot run, because their prompts found no memory."""
        self._learn_time(step, outcome, now)
        for piece in step.prefill:
            prompt = self._prompts.get(piece.lease)
            if prompt is not None and piece.lease.length >= prompt.goal:
                del self._prompts[piece.lease]
                self._queue.prompt_ran(piece.lease)
        for job in outcome.run_again:
            if not job.lease.revoked:
                self._queue.run_again(job)
        if self._queue.ready and (step.jobs or step.prefill):
            self._pacing.round_ready(now)
        return self._give_up_prompts(outcome.full)

    def _give_up_prompts(self, leases: Iterable[Lease]) -> list[Job]:
        """Run the prompts of these leases no further; returns the rounds that waited for them."""
        jobs = []
        for lease in leases:
            self._prompts.pop(lease, None)
            job = self._queue.remove(lease)
            if job is not None:
                jobs.append(job)
        return jobs

    def background_room(self, now: float) -> float:
        """Seconds for which activation records may be made now."""
        self._forget_inactive(now)
        if self._queue.ready or self._expected_rounds():
            return self._pacing.room_with_credit(now)
        return math.inf

    def background_ran(self, began: float, now: float) -> None:
        """Count activation records that were made from the time `began` until `now`."""
        self._pacing.piece_ran(began, now)

    # ---- what a step took

    def _learn_time(self, step: EngineStep, outcome: StepOutcome, now: float) -> None:
        """Learn how long a forward takes by its tokens, charge the principals with the step's
        seconds, and note when its rounds and pieces of prompts ran."""
        spent = now - step.began
        # A stream that waits for its device has taken no time: it would make forwards seem short.
        part = step.without(outcome.left_out)
        if outcome.ran:
            self._learn_cost(part, spent, min(outcome.extra_seconds, spent))
        if part.jobs:
            self._pace_rounds(part, spent, now)
        elif part.prefill:
            self._pacing.piece_ran(step.began, now)
        for job in step.jobs:
            if not job.lease.revoked:
                self._active[job.lease] = _Seen(now, job.cost)

    def _learn_cost(self, step: EngineStep, spent: float, extra: float) -> None:
        """Learn what a step's forward took, and charge its principals with that: `spent` seconds in
        all, of which `extra` were drafts and masks."""
        # Each row as the number of its tokens, and of those before them, which they attend to.
        rows = [(job.cost, job.base) for job in step.jobs]
        rows += [(piece.size, piece.start) for piece in step.prefill]
        tokens = sum(count for count, _ in rows)
        if not tokens:
            return
        pairs = attention_pairs(rows)
        self._cost.observe(tokens, spent - extra, pairs)
        # The estimate, where there is one: what other programs use of the processor is nobody's
        # doing here.
        forward = self._cost.seconds(tokens, pairs) if self._cost else spent - extra
        self._queue.charge(self._shares(step, forward, extra), spent)

    def _pace_rounds(self, step: EngineStep, spent: float, now: float) -> None:
        """Note which part of a step's seconds went to its rounds, and which to pieces of prompts
        beside them."""
        tokens = sum(job.cost for job in step.jobs)
        of_prompts = 0.0
        for piece in step.prefill:
            of_prompts += self._cost.added(piece.size, piece.start, beside=tokens)
        self._pacing.rounds_ran(max(0.0, spent - of_prompts), min(of_prompts, spent), now)

    def _shares(self, step: EngineStep, forward: float, extra: float) -> dict[str, float]:
        """Returns the seconds of a step that each principal is charged with. The seconds of drafts
        and masks, `extra`, go to those whose rounds need them. Of the `forward`, what even an empty
        one takes is shared evenly, and the rest by tokens."""
        with_extra_work = [job.lease.principal for job in step.jobs if job.takes_extra_work]
        if with_extra_work:
            self._extra += _EXTRA_WEIGHT * (extra - self._extra)
        tokens = [(job.lease.principal, job.cost) for job in step.jobs]
        tokens += [(piece.lease.principal, piece.size) for piece in step.prefill]
        empty_forward = min(self._cost.seconds(0), forward)
        seconds_per_token = (forward - empty_forward) / sum(count for _, count in tokens)
        principals = {principal for principal, _ in tokens}
        seconds = dict.fromkeys(principals, empty_forward / len(principals))
        for principal, count in tokens:
            seconds[principal] += seconds_per_token * count
        for principal in with_extra_work:
            seconds[principal] += extra / len(with_extra_work)
        return seconds

    # ---- which rounds are about to come

    def _expected_rounds(self) -> list[Lease]:
        """Returns the sessions that are about to send a round."""
        return [lease for lease in self._active if not self._queue.parked(lease)]

    def _forget_inactive(self, now: float) -> None:
        """Expect no more rounds of sessions that have sent none for long."""
        self._active = {
            lease: seen for lease, seen in self._active.items() if now - seen.at < RECENT
        }
        present = {lease.principal for lease in itertools.chain(self._active, self._prompts)}
        self._queue.forget(present)

    def _seconds_to_wait_for_rounds(self, now: float) -> float:
        """Returns for how many seconds the rounds that are ready should wait for more that are
        about to come; 0 to run them now. In a larger batch each round costs less; and whoever has
        been served least would otherwise wait for the whole forward."""
        ready = self._queue.ready
        wait = self._batch_wait_now(now, ready)
        until = wait.until
        if min(len(self._expected_rounds()), self._max_rows) <= ready:
            until = now  # nobody else is expected
        until = max([until, *self._underserved_arrivals(wait.began)])
        if self._batch_wait <= 0 or now >= until:
            self._batch_waiting = None
            return 0.0
        return until - now

    def _batch_wait_now(self, now: float, ready: int) -> _BatchWait:
        """Returns for how long the batch waits for more rounds: a little, and again so long with each
        that comes, up to a share of the time of the latest forward."""
        wait = self._batch_waiting
        if wait is None:
            wait = _BatchWait(began=now, until=now + self._batch_wait, ready=ready)
        if ready > wait.ready:  # they keep coming
            longest = max(self._batch_wait, _WORTH_WAITING * self._queue.step)
            wait.until = min(wait.began + longest, now + self._batch_wait)
            wait.ready = ready
        self._batch_waiting = wait
        return wait

    def _underserved_arrivals(self, began: float) -> list[float]:
        """Returns the times by which principals that have been served less than all others will
        probably have sent their rounds, as far as these are soon enough to be waited for."""
        latest = began + _WORTH_SPARING * self._queue.step
        pauses = self._queue.owed()
        arrivals = [
            seen.at + _LATE * pauses.get(lease.principal, math.inf)
            for lease, seen in self._active.items()
        ]
        return [at for at in arrivals if at <= latest]

    # ---- steps

    def _step_with_rounds(self, now: float) -> EngineStep:
        """Returns a step with the rounds of the next forward, and beside them pieces of prompts."""
        active = {lease: self._active[lease].tokens for lease in self._expected_rounds()}
        prompts = self._prompt_tokens()
        jobs, expired = self._queue.take(now, active, prompts, self._cost, self._extra)
        pieces: list[PrefillPiece] = []
        if jobs:
            if next(self._batches) % _MEASURED:  # now and then none, to measure the rounds alone
                pieces = self._pieces_beside(jobs)
            if not self._prompts:
                self._pacing.nothing_waits()
        return EngineStep(
            jobs=jobs,
            expired=expired,
            prefill=pieces,
            least_chance=least_chance(self._cost, max(1, len(jobs))),
            began=now,
        )

    def _prompt_tokens(self) -> Counter[str]:
        """Returns how many tokens of prompts wait, by principal."""
        tokens: Counter[str] = Counter()
        for lease, prompt in self._prompts.items():
            tokens[lease.principal] += max(0, prompt.goal - lease.start)
        return tokens

    def _pieces_beside(self, jobs: Sequence[Job]) -> list[PrefillPiece]:
        """Returns pieces of prompts that make a forward of these rounds hardly longer; none of a
        principal that has been served more than the least served one of the rounds."""
        tokens = sum(job.cost for job in jobs)
        pairs = attention_pairs((job.cost, job.lease.length) for job in jobs)
        served_here = [self._queue.served(job.lease.principal) for job in jobs]
        least_served = min(served_here)
        # What each waiting prompt's principal was served; who was served more has no say here.
        waiting = [self._queue.served(lease.principal) for lease in self._prompts]
        waiting = [served for served in waiting if served <= least_served]
        owed = self._owed_prompts(served_here)
        seconds = self._pacing.beside(
            self._cost.seconds(tokens, pairs),
            rounds=len(jobs),
            prompts=len(waiting),
            owed=bool(owed),
        )
        if owed:
            seconds = max(seconds, self._pacing.room_of_owed)
        pieces = self._pieces(
            seconds,
            self._most_beside(tokens, owed=bool(owed)),
            beside=tokens,
            # Who is owed waits for this forward: prompts of the others do not make it longer.
            served=max(owed, default=least_served),
        )
        self._latest_prefill = sum(piece.size for piece in pieces)
        return pieces

    def _owed_prompts(self, served: Collection[float]) -> list[float]:
        """Returns the seconds that the principals of owed prompts have been served. A prompt is owed
        where there are rounds of principals that have been `served` so much if its own one has been
        served less than some of these, and no more than any."""
        least = min(served)
        most = max(served)
        waiting = [self._queue.served(lease.principal) for lease in self._prompts]
        return [own for own in waiting if own <= least and own < most]

    def _step_of_prompts(self, now: float) -> EngineStep | float:
        """Returns a step of prompts alone, as long as it may be while no round is ready; or the
        seconds to wait until one may run, because a round would probably come before it ends."""
        expected = [self._queue.served(lease.principal) for lease in self._expected_rounds()]
        if not expected:  # no round to delay: as much as fits
            return EngineStep(prefill=self._pieces(math.inf, self._most_alone()), began=now)
        owed = self._owed_prompts(expected)
        seconds = self._pacing.room(now) - self._cost.seconds(0)
        if owed:
            seconds = max(seconds, self._pacing.room_of_owed)
        pieces = self._pieces(
            seconds, self._most_beside(0, owed=bool(owed)), served=max(owed, default=math.inf)
        )
        if pieces:
            self._latest_prefill = sum(piece.size for piece in pieces)
            return EngineStep(prefill=pieces, began=now)
        return self._pacing.hold(self._shortest_piece_seconds(), now) + _SHORTEST_WAIT

    def _shortest_piece_seconds(self) -> float:
        """Returns the seconds of a forward of the least piece of the prompt that runs next."""
        lease, prompt = self._next_prompt()
        tokens = min(_LEAST_PIECE, prompt.goal - lease.start)
        return self._cost.seconds(tokens, attention_pairs([(tokens, lease.start)]))

    def _most_beside(self, beside: int, *, owed: bool) -> int:
        """Tokens of prompts that may join `beside` other tokens in a forward for which rounds wait:
        at most twice as many as before, because what many tokens take is not known while all
        forwards are alike. Those of an `owed` prompt may be as many as were measured at any time,
        so that it need not begin with few."""
        most = max(_LEAST_PIECE, 2 * self._latest_prefill)
        return max(most, int(self._cost.largest) - beside) if owed else most

    def _most_alone(self) -> int:
        """Tokens of prompts in a forward without rounds. A target on a CPU would take a quarter of
        a minute for as many as an accelerator likes; but what has been read is told after each
        forward, and a round that comes meanwhile waits for its end."""
        if not self._cost:
            return min(self._prefill_tokens, _FIRST_PIECE)
        fitting = self._cost.fitting(_PIECE_SECONDS, self._prefill_tokens)
        # Each principal may have as many tokens here as the one that goes first.
        tokens = self._prompt_tokens()
        first, _ = self._next_prompt()
        fair = len(tokens) * tokens[first.principal]
        return max(_LEAST_PIECE, min(fitting, fair))

    def _pieces(
        self, seconds: float, most: int, beside: float = 0, served: float = math.inf
    ) -> list[PrefillPiece]:
        """Returns pieces of waiting prompts, `most` tokens of them in all, that make a forward of
        `beside` other tokens longer by at most so many seconds. None is of a principal that has
        been served more than `served` seconds."""
        pieces: list[PrefillPiece] = []
        room = _Room(self._cost, min(most, self._prefill_tokens), seconds, beside)
        for lease, prompt in self._prompts_in_order()[: self._max_rows]:
            start = lease.start
            missing = max(0, prompt.goal - start)
            size = room.fitting(missing, start)
            too_small = size < min(missing, room.least_piece)
            if too_small or self._queue.served(lease.principal) > served:
                break
            room.take(size, start)
            prompt.ran += size
            pieces.append(PrefillPiece(lease, prompt.ids, prompt.goal, size, start))
        if pieces:
            self._oldest_first = not self._oldest_first  # so that the two orders alternate
        return pieces

    def _prompts_in_order(self) -> list[tuple[Lease, _Prompt]]:
        """Returns the waiting prompts in the order in which they run: those of principals that were
        served least first. Of one principal's, alternately the oldest and the one of which least
        has run goes first, so that a short prompt does not wait for a long one."""
        return sorted(self._prompts.items(), key=self._prompt_rank)

    def _next_prompt(self) -> tuple[Lease, _Prompt]:
        """Returns the first of the waiting prompts in that order."""
        return min(self._prompts.items(), key=self._prompt_rank)

    def _prompt_rank(self, item: tuple[Lease, _Prompt]) -> tuple[float, int]:
        """Returns a prompt's place in that order, as a key to sort by."""
        lease, prompt = item
        return self._queue.served(lease.principal), 0 if self._oldest_first else prompt.ran
