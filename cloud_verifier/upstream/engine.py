"""Runs the streams of sessions at an upstream. Lives in the event loop, in the place of the model's
thread.

A job is a request: the engine behind gets the session's log, and what it answers becomes the next
tokens. It keeps no state that a job needs, so after a cut, or at another upstream, the next request
simply goes on behind the last token that the device has.

An engine that scores tokens also checks the device's drafts: offline text in one request, and
guesses where the device asks the stream to wait for them. What it tells of each place decides by
the rule of a verifier of our own (`scoring.py`). Sampled text follows that rule there throughout:
what the engine writes, its likeliest tokens, is a draft, too, and where the rule takes another token
the engine is asked again behind that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import structs

from cloud_verifier.engine.contract import Answered, Dropped, Failed, Report, Waiting
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.logs import log
from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import (
    Candidates,
    Continuation,
    Ending,
    NotScoredError,
    Piece,
    TooLongError,
    UpstreamError,
    Usage,
)
from cloud_verifier.upstream.early_ends import ROOM, EarlyEnds
from cloud_verifier.upstream.scoring import accepted, follows, packed, wanted, with_own
from cloud_verifier.upstream.spending import Request, Spending
from cloud_verifier.upstream.tokens import Decode, Encode, TokensOfText
from moa.grammar.matcher import Bits, has
from moa.grammar.spec import GrammarError
from moa.sampling import SamplingSettings
from moa.wire import messages as wire
from moa.wire.codes import Code, Refusal
from moa.wire.finish import first_finish
from moa.wire.messages import Stream, StreamTokens

_LOOK_SECONDS = 0.05
"""So often a job that waits for the upstream looks whether it was cancelled, and for guesses."""
_LEAST_RETRY_SECONDS = 0.25
"""A device whose request was refused for now is asked to wait for so long at least."""
_USAGE_SECONDS = 0.05
"""For so long an answer that is as long as it may be waits for the upstream's own count of it."""
_USUAL_FIRST_SECONDS = 1.0
"""Until the first text at most, beside reading the prompt: by that a service differs from another."""
_LONG_PROMPT = 500
"""Tokens of a prompt from which on its first text tells how fast prompts are read."""
_NEWEST = 0.2
"""How much the latest token counts in the usual time of a token."""
_EARLY_SECONDS = 5.0
"""After which an upstream that has ended an answer early again and again may be asked for another."""
_ENDINGS: dict[Ending, str] = {
    "": "it has not said why",
    "cut": "it gives a reason that is not the answer's own, such as a filter",
    "length": "it calls its part long enough",
    "eos": "by an end that the device has no token for",
}
"""Why an upstream has ended an answer, in words."""
_WORTH_A_REQUEST = 4
"""Tokens of known text for which an engine that writes is broken off, and asked about them."""


class Pace:
    """How long an upstream takes, as devices are told it: they expect the next answer by that. The
    wait for a first text is for the most part the reading of the prompt, and no forward; taken for
    one, a single long prompt would have devices wait for minutes in the next outage."""

    def __init__(self) -> None:
        self._first = _USUAL_FIRST_SECONDS
        """Until a first text at least, in seconds."""
        self._token = 0.05
        """Between two tokens, usually."""

    def took(self, seconds: float, prompt: int) -> tuple[float, float]:
        """Returns how much of the wait for new tokens was reading, and how much a forward. `prompt`
        is the prompt's length where they are the first of an answer, else 0."""
        if not prompt:
            self._token += (seconds - self._token) * _NEWEST
            return 0.0, seconds
        self._first = min(self._first, seconds)
        forward = min(seconds, self._token)
        # Of a short prompt the wait says little: it may be a service's own, whatever the length.
        share = min(1.0, prompt / _LONG_PROMPT)
        return share * max(0.0, seconds - forward - self._first), forward


class Written(NamedTuple):
    """Tokens that an engine wrote, and what it tells of the place of each."""

    ids: list[int]
    candidates: Sequence[Candidates]


@dataclass
class _Awaited:
    """A request without an answer."""

    since: float
    read: int = 0
    """Tokens that the upstream says it has read for it."""


@dataclass
class _Turn:
    """A job that runs, and when its next tokens were asked for."""

    job: Job
    asked_at: float
    by_rule: bool = False
    """Whether tokens are chosen here, from what the engine tells of each place."""
    draft: list[int] = field(default_factory=list)
    """What is to be checked next."""
    unheard: bool = True
    """Whether the latest request has brought no tokens yet."""
    has_text: bool = False
    """Whether the latest request has brought text, of which a part may still be kept back."""
    ending: Ending = ""
    """Why the latest request's answer has ended, as the upstream says."""
    usages: list[Usage | None] = field(default_factory=list)
    """What the upstream has counted for each request; None where it did not tell."""

    @property
    def usage(self) -> wire.Usage | None:
        """What the upstream has counted for all requests; None if it did not tell that of each."""
        read = written = 0
        for one in self.usages:
            if one is None:
                return None
            read += one.read
            written += one.written
        return wire.Usage(read, written) if self.usages else None


class UpstreamEngine:
    """What sessions need of an engine: queue a round, void a lease."""

    def __init__(
        self,
        upstreams: Upstreams,
        *,
        encode: Encode,
        decode: Decode,
        prompt: Decode,
        eos_ids: Sequence[int],
        post: Callable[[list[Report]], None],
        most_running: int,
        most_guesses: int,
        spending: Spending,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Run streams at these upstreams, engines behind HTTP, and tell what becomes of them by
        `post`. `encode` and `decode` are the device's tokenizer without special tokens; `prompt`
        writes these as text."""
        self._upstreams = upstreams
        self._encode = encode
        self._decode = decode
        self._prompt = prompt
        self._eos_ids = tuple(eos_ids)
        self._post = post
        self._most_running = most_running
        self._most_guesses = most_guesses
        self._spending = spending
        self._clock = clock
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._pace = Pace()
        self._early: dict[Lease, EarlyEnds] = {}
        """By session, how often the upstream has ended its latest answer early."""
        self._awaited: dict[Job, _Awaited] = {}
        """Requests that have no answer yet."""
        self._complete: set[Job] = set()
        """Jobs whose answer is complete, and of which only the upstream's count is awaited."""

    # ---- what sessions ask for

    @property
    def queued(self) -> int:
        """Jobs whose upstream has not answered yet."""
        return len(self._awaited)

    def read_for(self, job: Job) -> int | None:
        """Returns how many tokens the upstream says it has read for this job's request; None if it
        has begun to answer, or was not asked. One that says nothing may be reading, too: how long
        that is believed, the device decides.

        An answer that has begun may stand still because the upstream reads another prompt: a second
        choice is asked for beside the first. Its next word may be its end, which nothing that the
        device writes is to come before. So all is read of it then; and where its end has come.
        """
        request = self._awaited.get(job)
        if request is not None:
            return request.read
        if self._awaited or job in self._complete:
            return len(job.ids)
        return None

    def awaited_for(self, now: float) -> float:
        """For how long the oldest request without an answer has been waiting; 0 without one."""
        return now - min((request.since for request in self._awaited.values()), default=now)

    @property
    def running(self) -> int:
        """Jobs whose answers are being written."""
        return len(self._tasks)

    def submit(self, job: Job) -> None:
        """Run a stream, a session's request for tokens; a `Refusal` if there is no room."""
        if not isinstance(job.request, Stream):
            raise Refusal(Code.UNSUPPORTED, "an upstream runs streams only")
        if len(self._tasks) >= self._most_running:
            wait = _milliseconds(_LEAST_RETRY_SECONDS)
            raise Refusal(Code.BUSY, "too many answers at once", retry_after_ms=wait)
        self._tasks[job] = asyncio.create_task(self._run(job))

    def prefill(self, lease: Lease, ids: Sequence[int], goal: int) -> None:
        """The upstream reads the prompt with the first request."""
        lease.length = goal

    def release(self, lease: Lease) -> None:
        """End what runs for this lease."""
        lease.revoked = True
        self._early.pop(lease, None)
        for job, task in self._tasks.items():
            if job.lease is lease:
                task.cancel()

    def holds(self, job: Job) -> bool:
        """Whether it runs."""
        return job in self._tasks

    def wake(self) -> None:
        """Nothing waits here."""

    # ---- the process

    def start(self) -> None:
        """Jobs start by themselves."""

    async def stop(self) -> None:
        """End all jobs and connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._upstreams.close()

    def wrong(self) -> str:
        """Healthy whatever the upstream does: devices are told, and go on alone."""
        return ""

    # ---- a job

    async def _run(self, job: Job) -> None:
        """Run a stream to its end and report what became of it, whatever happens."""
        report: Report | None = None
        turn = _Turn(job, self._clock())
        try:
            report = await self._stream(turn)
        except UpstreamError as error:
            report = self._refused(turn, error)
        except GrammarError as error:
            report = Dropped(job, Refusal(Code.GRAMMAR, error.line()))
        except Exception as error:
            log.exception("a stream failed", extra={"session": job.lease.session})
            report = Failed(job.lease, job, type(error).__name__)
        finally:
            self._tasks.pop(job, None)
        self._post([report])

    async def _stream(self, turn: _Turn) -> Report:
        """Run a stream to its end, or until it waits for the device's guesses; returns the last
        report. Each time round the upstream either checks tokens that may come next, or writes."""
        job = turn.job
        if len(job.ids) == job.rules.start:
            self._early.pop(job.lease, None)  # those were of another answer
        turn.by_rule = self._by_rule(job)
        while True:
            if turn.by_rule and not turn.draft:
                turn.draft = self._draft(job)
            if turn.draft:
                report = await self._check(turn)
            elif turn.by_rule and job.guesses.waits:
                return Waiting(job)
            else:
                report = await self._write(turn)
            if isinstance(report, Answered):
                message = structs.replace(report.message, usage=turn.usage)
                return dataclasses.replace(report, message=message)
            if report is not None:
                return report

    def _by_rule(self, job: Job) -> bool:
        """Whether tokens are chosen here, from what the engine tells of each place. Under a grammar
        the likeliest tokens may all be forbidden ones, so there the engine chooses."""
        able = self._upstreams.abilities
        return able.scores and job.mask is None and follows(job.sampling, able.candidates)

    def _candidates(self, job: Job, *, by_rule: bool) -> int:
        """Returns how many of the likeliest tokens the upstream is to tell for each place: as many
        as the device wants to see, and as a choice by our own rule needs. An error if it cannot
        tell so many."""
        able = self._upstreams.abilities
        to_show = max(1, job.logprobs) if job.logprobs >= 0 else 0
        if to_show > able.candidates:
            raise UpstreamError(
                "the upstream tells no log-probabilities"
                if not able.candidates
                else f"the upstream tells {able.candidates} log-probabilities at most",
                later=False,
            )
        to_choose_from = 0
        if by_rule and not job.sampling.greedy:
            to_choose_from = wanted(job.sampling, able.candidates)
        return max(to_show, to_choose_from)

    def _draft(self, job: Job) -> list[int]:
        """Returns those of the device's guesses that are worth a request: the likeliest chain, as
        an engine scores one text. Where the stream does not wait for guesses, the engine writes
        faster than they are checked: there only text that is known counts, such as what was written
        offline."""
        if not (job.guesses.waits or job.guesses.waiting):
            return []
        most = min(self._room(job), self._most_guesses)
        picked = job.guesses.pick(job.ids, most, 0.0, branches=False)
        draft = picked.tokens[1:]
        is_worth_a_request = picked.is_known and len(draft) >= _WORTH_A_REQUEST
        if not job.guesses.waits and not is_worth_a_request:
            return []
        return draft

    @staticmethod
    def _room(job: Job) -> int:
        """Tokens that the answer may still have."""
        room = min(
            job.rules.max_new_tokens - (len(job.ids) - job.rules.start),
            job.rules.max_context - len(job.ids),
        )
        return max(1, room)

    def _asked(self, job: Job) -> Continuation:
        """Returns the request for what follows the job's text, as it is now."""
        most = self._room(job)
        early = self._early.get(job.lease)
        if early is not None and early.short:
            most = min(max(most, ROOM), job.rules.max_context - len(job.ids))
        return Continuation(
            ids=list(job.ids),
            text=self._prompt(job.ids),
            sampling=job.sampling,
            most=max(1, most),
            messages=job.messages,
            begun=self._begun(job),
            begun_tokens=len(job.ids) - job.rules.start,
            grammar=job.grammar,
        )

    async def _check(self, turn: _Turn) -> Report | None:
        """Have the upstream score the draft, and send the tokens that hold, with one more that it
        would choose behind them. Returns the job's last report if it ends here."""
        job = turn.job
        draft = turn.draft
        turn.draft = []
        count = self._candidates(job, by_rule=True)
        count = max(count, wanted(job.sampling, self._upstreams.abilities.candidates))
        asked = dataclasses.replace(self._asked(job), draft=draft, candidates=count)
        try:
            async with contextlib.aclosing(self._pieces(turn, asked)) as pieces:
                async for piece in pieces:  # there is only one
                    new = accepted(piece.candidates, draft, job.sampling, len(job.ids))
                    places = with_own(piece.candidates[: len(new)], new)
                    return self._send(turn, new, places, drafted=len(draft))
        except NotScoredError:
            turn.by_rule = False  # from now on the engine writes and chooses itself
            return None
        return Answered.ended(job)  # it was cancelled

    async def _write(self, turn: _Turn) -> Report | None:
        """Have the upstream write, and send its tokens as they come. Returns the job's last report;
        None if the job goes on, with guesses, or behind a token that was chosen here in place of
        the upstream's."""
        job = turn.job
        count = self._candidates(job, by_rule=turn.by_rule)
        asked = dataclasses.replace(self._asked(job), candidates=count)
        draws = turn.by_rule and not job.sampling.greedy
        if draws:
            # What the engine would write itself is a draft as any other: the likeliest one is best.
            asked = dataclasses.replace(asked, sampling=SamplingSettings())
        base = job.base
        forbidden = False
        async with contextlib.aclosing(self._tokens(turn, asked)) as parts:
            async for written in parts:
                new, forbidden = self._drawn(job, written) if draws else self._allowed(job, written)
                if not new.ids:
                    break
                report = self._send(turn, new.ids, new.candidates)
                if report is not None:
                    # Behind the last token an engine ends by itself, too, and tells its count; behind
                    # a stop string it may go on for long.
                    if report.message.finish in ("length", "eos"):
                        await _read_on(parts)
                    return report
                if forbidden:
                    break
                if new.ids != written.ids:
                    # Another token was drawn: what follows the engine's own is of no use.
                    return None
        has_said_why = turn.ending in ("eos", "length")
        if draws and has_said_why and job.base > base and not job.cancelled:
            return None  # the greedy text has ended there, but a drawn one need not
        return self._end_of_writing(turn, forbidden=forbidden)

    def _end_of_writing(self, turn: _Turn, *, forbidden: bool) -> Report | None:
        """Returns the job's last report where the upstream has written to the end of its answer, or
        was broken off; None if the job goes on, with guesses. `forbidden`: the grammar allows no
        more of that answer."""
        job = turn.job
        if forbidden and job.base == job.request.base:
            return Dropped(
                job,
                Refusal(Code.UNSUPPORTED, "the upstream does not write what the grammar demands"),
            )
        if job.cancelled:
            return Answered.ended(job)
        if turn.draft or (turn.by_rule and job.guesses.waits):
            return None
        if self._spending.is_over:
            return Answered.ended(job)  # the device asks for the rest, and is told
        why = "it does not write what the grammar demands" if forbidden else _ENDINGS[turn.ending]
        return self._ended_early(job, turn.ending, why)

    def _ended_early(self, job: Job, ending: Ending, why: str) -> Report:
        """Returns the last report of a stream that the upstream has ended before the answer's end,
        for this reason. What it wrote is kept, and the device asks for the rest; too often, and it
        is told to do without. Before the answer's first word there is nothing to count: the device
        itself does not ask long for a text that does not begin."""
        tokens = len(job.ids) - job.rules.start
        if not tokens or job.cancelled or job.lease.revoked:
            return Answered.ended(job)
        early = self._early.setdefault(job.lease, EarlyEnds())
        early.short = early.short or ending == "length"
        count = early.add(tokens)
        if not count:
            return Answered.ended(job)
        words = f"the upstream has ended this answer early {count} times in a row: {why}"
        log.warning("%s", words, extra={"event": "upstream", "session": job.lease.session})
        wait = _milliseconds(_EARLY_SECONDS)
        return Dropped(job, Refusal(Code.UNSUPPORTED, words, retry_after_ms=wait))

    def _drawn(self, job: Job, written: Written) -> tuple[Written, bool]:
        """Returns the tokens that our own sampling rule chooses for the engine's places, up to the
        first that the engine did not write. No grammar forbids any: where there is one, the engine
        chooses."""
        if len(written.candidates) != len(written.ids):
            raise UpstreamError("the upstream tells no candidates for its tokens")
        new = accepted(written.candidates, written.ids, job.sampling, len(job.ids))
        return Written(new, with_own(written.candidates[: len(new)], new)), False

    def _send(
        self,
        turn: _Turn,
        new: Sequence[int],
        places: Sequence[Candidates],
        drafted: int = 0,
    ) -> Answered | None:
        """Send new tokens, as far as they belong to the turn. Returns the job's last report if it
        ends with them."""
        job = turn.job
        now = self._clock()
        kept, finish = first_finish(job.rules, job.ids, new, self._decode)
        logprobs = b""
        if job.logprobs >= 0:
            if len(places) < kept:
                raise UpstreamError("the upstream tells too few log-probabilities", later=False)
            logprobs = packed(places[:kept], job.logprobs)
        is_first = turn.unheard and not drafted
        turn.unheard = False
        reading, forward = self._pace.took(now - turn.asked_at, len(job.ids) if is_first else 0)
        answer = StreamTokens(
            session=job.lease.session,
            round=job.request.round,
            base=job.base,
            tokens=list(new[:kept]),
            done=bool(finish) or job.cancelled,
            finish=finish,
            drafted=drafted,
            queue_ms=1000 * (max(0.0, turn.asked_at - job.enqueued) + reading),
            forward_ms=1000 * forward,
            logprobs=logprobs,
            foreseen=drafted,
        )
        job.ids += new[:kept]
        job.enqueued = now
        turn.asked_at = now
        if answer.done:
            return Answered(job, answer)
        self._post([Answered(job, answer)])
        return None

    def _allowed(self, job: Job, written: Written) -> tuple[Written, bool]:
        """Returns these tokens up to the first one that the answer's grammar forbids, and whether
        there is one. If the answer is complete there, an end token takes its place: what an engine
        goes on to say is no part of it."""
        mask = job.mask
        if mask is None:
            return written, False
        kept: list[int] = []
        for token in written.ids:
            allowed = mask.allowed(kept)
            if not has(allowed, token):
                kept += self._end_token(allowed)
                break
            kept.append(token)
        return Written(kept, written.candidates[: len(kept)]), kept != written.ids

    def _end_token(self, allowed: Bits) -> list[int]:
        """Returns an end token that a mask allows, in a list; an empty one if it allows none."""
        for token in self._eos_ids:
            if has(allowed, token):
                return [token]
        return []

    def _begun(self, job: Job) -> str:
        """The text of the answer so far. If the conversation ends with a message of the assistant's,
        that is its beginning."""
        before = ""
        if job.messages and job.messages[-1].role == "assistant":
            before = job.messages[-1].content
        return before + self._decode(job.ids[job.rules.start :])

    async def _tokens(self, turn: _Turn, asked: Continuation) -> AsyncGenerator[Written, None]:
        """Yield the tokens that the upstream writes as they come, until it ends or is broken off; a
        text is turned into the device's tokens."""
        # A grammar may demand another token than the first piece of a word.
        begins = asked.begun_tokens == 0 and asked.grammar is None
        text = TokensOfText(self._encode, self._decode, begins=begins)
        async with contextlib.aclosing(self._pieces(turn, asked)) as pieces:
            async for piece in pieces:
                new = [*piece.ids, *text.add(piece.text)]
                if piece.ending:
                    turn.ending = piece.ending
                    new += text.rest()
                has_no_end_token = not set(new) & set(self._eos_ids)
                if piece.ending == "eos" and self._eos_ids and has_no_end_token:
                    new.append(self._eos_ids[0])  # by which the device sees the end
                if new:
                    yield Written(new, piece.candidates)
                if piece.ending:
                    return

    async def _pieces(self, turn: _Turn, asked: Continuation) -> AsyncGenerator[Piece, None]:
        """Yield what the upstream answers, until it ends, is broken off, or has cost as much as it
        may."""
        self._spending.check()
        tokens = len(asked.ids) + len(asked.draft)
        cost = self._spending.request(tokens)
        pieces = self._upstreams.go_on(asked)
        coming: asyncio.Future[Any] | None = None
        usage: Usage | None = None
        awaited = _Awaited(self._clock())
        self._awaited[turn.job] = awaited
        turn.unheard = True
        turn.has_text = False
        turn.ending = ""
        try:
            while True:
                coming = asyncio.ensure_future(anext(pieces, None))
                if not await self._has_come(coming, turn, asked):
                    return
                piece = coming.result()
                if piece is None:
                    return
                if piece.is_answer:
                    self._awaited.pop(turn.job, None)
                if piece.reading is not None:
                    awaited.read = piece.reading.done
                if piece.is_complete:
                    self._complete.add(turn.job)
                turn.has_text = turn.has_text or bool(piece.text)
                usage = piece.usage or usage
                if self._spending.limited:
                    self._count(piece, cost)
                yield piece
                if self._spending.is_over:
                    return  # the device asks for the rest, and is told
        finally:
            turn.usages.append(usage)
            self._awaited.pop(turn.job, None)
            self._complete.discard(turn.job)
            await _end(pieces, coming)

    async def _has_come(
        self, coming: asyncio.Future[Any], turn: _Turn, asked: Continuation
    ) -> bool:
        """Wait for the upstream's next piece; returns False if the answer is broken off first. A
        silent upstream must not keep a cancelled job, or guesses that come, waiting."""
        while not coming.done() and not self._is_broken_off(turn, asked):
            await asyncio.wait({coming}, timeout=_LOOK_SECONDS)
        return not self._is_broken_off(turn, asked)

    def _count(self, piece: Piece, cost: Request) -> None:
        """Add what a piece costs."""
        cost.wrote(len(piece.ids) or len(self._encode(piece.text)))
        if piece.usage is not None:
            cost.told(piece.usage)

    def _is_broken_off(self, turn: _Turn, asked: Continuation) -> bool:
        """Whether nobody wants the rest of the upstream's answer: the job was cancelled, or an
        engine that writes is to check the device's guesses instead, now or when they come."""
        if turn.job.cancelled:
            return True
        if asked.draft or not turn.by_rule:
            return False
        turn.draft = turn.draft or self._draft(turn.job)
        return bool(turn.draft) or turn.job.guesses.waits

    def _refused(self, turn: _Turn, error: UpstreamError) -> Report:
        """Returns the report of a stream that the upstream has refused. One that has sent tokens
        keeps them, and the device asks for the rest. So it does where a piece of a word came behind
        them: that was paid for."""
        job = turn.job
        has_sent = job.base > job.request.base
        if error.later and (has_sent or (turn.has_text and len(job.ids) > job.rules.start)):
            return self._ended_early(job, "", _of_it(error.line()))
        if isinstance(error, TooLongError):
            return Dropped(job, Refusal(Code.LIMIT, error.line(), limit="max_context_tokens"))
        if not error.later:
            return Dropped(job, Refusal(Code.UNSUPPORTED, error.line()))
        wait = _milliseconds(max(_LEAST_RETRY_SECONDS, error.retry_after))
        return Dropped(job, Refusal(Code.BUSY, error.line(), retry_after_ms=wait))


def _of_it(line: str) -> str:
    """An error's line behind a sentence that names the upstream already."""
    subject = "the upstream "
    return f"it {line.removeprefix(subject)}" if line.startswith(subject) else line


def _milliseconds(seconds: float) -> int:
    return int(1000 * seconds)


async def _end(pieces: AsyncGenerator[Piece, None], coming: asyncio.Future[Any] | None) -> None:
    """End an upstream's answer, also while its next piece is still to come."""
    if coming is not None:
        coming.cancel()
        # Nobody may have looked at it: the upstream can fail while the answer is broken off.
        await asyncio.gather(coming, return_exceptions=True)
    await pieces.aclose()


async def _read_on(parts: AsyncGenerator[Written, None]) -> None:
    """Read an answer that is complete to its own end, if that comes at once: the upstream's count
    of its tokens comes with it. Where more text comes instead, the upstream would go on for long:
    its tokenizer needs fewer tokens than the device's."""
    with contextlib.suppress(TimeoutError, UpstreamError):
        async with asyncio.timeout(_USAGE_SECONDS):
            await anext(parts, None)
