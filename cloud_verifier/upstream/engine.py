"""Runs the streams of sessions at an upstream. Lives in the event loop, in the place of the model's
thread.

A job is a request: the engine behind gets the session's log, and what it answers becomes the next
tokens. It keeps no state that a job needs, so after a cut, or at another upstream, the next request
simply goes on behind the last token that the device has.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from cloud_verifier.engine.contract import Answered, Dropped, Failed, Report
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.logs import log
from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import Continuation, TooLongError, UpstreamError
from cloud_verifier.upstream.tokens import Decode, Encode, TokensOfText
from moa.grammar.matcher import has
from moa.grammar.spec import GrammarError
from moa.wire.codes import Code, Refusal
from moa.wire.finish import first_finish
from moa.wire.messages import Stream, StreamTokens

_LOOK_SECONDS = 0.05
"""So often a job that waits for the upstream looks whether it was cancelled."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`encode` and `decode` leave special tokens out; `prompt` writes them as text."""
        self._upstreams = upstreams
        self._encode = encode
        self._decode = decode
        self._prompt = prompt
        self._eos_ids = tuple(eos_ids)
        self._post = post
        self._most_running = most_running
        self._clock = clock
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._silent = 0

    # ---- what sessions ask for

    @property
    def queued(self) -> int:
        """Jobs whose upstream has not answered yet."""
        return self._silent

    def submit(self, job: Job) -> None:
        """Run a stream; a `Refusal` when there is no room."""
        if not isinstance(job.request, Stream):
            raise Refusal(Code.UNSUPPORTED, "drafts are not verified at an upstream: streams only")
        if len(self._tasks) >= self._most_running:
            raise Refusal(Code.BUSY, "too many answers at once", retry_after_ms=250)
        self._tasks[job] = asyncio.create_task(self._run(job))

    def prefill(self, lease: Lease, ids: Sequence[int], goal: int) -> None:
        """The upstream reads the prompt with the first request."""
        lease.length = goal

    def release(self, lease: Lease) -> None:
        """End what runs for this lease."""
        lease.revoked = True
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
        report: Report | None = None
        try:
            report = await self._stream(job)
        except UpstreamError as error:
            report = self._refused(job, error)
        except GrammarError as error:
            report = Dropped(job, Refusal(Code.GRAMMAR, error.line()))
        except Exception as error:
            log.exception("a stream failed", extra={"session": job.lease.session})
            report = Failed(job.lease, job, type(error).__name__)
        finally:
            self._tasks.pop(job, None)
        self._post([report])

    async def _stream(self, job: Job) -> Report:
        """Send tokens as they come; returns the last report."""
        asked_at = self._clock()
        forbidden = False
        room = min(
            job.rules.max_new_tokens - (len(job.ids) - job.rules.start),
            job.rules.max_context - len(job.ids),
        )
        asked = Continuation(
            ids=list(job.ids),
            text=self._prompt(job.ids),
            sampling=job.sampling,
            most=max(1, room),
            messages=job.messages,
            begun=self._begun(job),
            begun_tokens=len(job.ids) - job.rules.start,
            grammar=job.grammar,
        )
        async with contextlib.aclosing(self._tokens(job, asked)) as parts:
            async for written in parts:
                now = self._clock()
                new = self._allowed(job, written)
                forbidden = new != written
                if not new:
                    break
                kept, finish = first_finish(job.rules, job.ids, new, self._decode)
                answer = StreamTokens(
                    session=job.lease.session,
                    round=job.request.round,
                    base=job.base,
                    tokens=list(new[:kept]),
                    done=bool(finish) or job.cancelled,
                    finish=finish,
                    queue_ms=1000 * max(0.0, asked_at - job.enqueued),
                    forward_ms=1000 * (now - asked_at),
                )
                job.ids += new[:kept]
                job.enqueued = now
                asked_at = now
                if answer.done:
                    return Answered(job, answer)
                self._post([Answered(job, answer)])
                if forbidden:
                    break
        if forbidden and job.base == job.request.base:
            return Dropped(
                job,
                Refusal(Code.UNSUPPORTED, "the upstream does not write what the grammar demands"),
            )
        return Answered.ended(job)

    def _allowed(self, job: Job, new: list[int]) -> list[int]:
        """The tokens up to the first one that the answer's grammar forbids; an end token in its
        place where the answer is complete, so what an engine goes on to say is no part of it."""
        mask = job.mask
        if mask is None:
            return new
        kept: list[int] = []
        for token in new:
            bits = mask.allowed(kept)
            if has(bits, token):
                kept.append(token)
                continue
            return [*kept, *[end for end in self._eos_ids if has(bits, end)][:1]]
        return kept

    def _begun(self, job: Job) -> str:
        """The answer so far. A last message of the assistant's is its beginning."""
        last = job.messages[-1] if job.messages else None
        before = last.content if last is not None and last.role == "assistant" else ""
        return before + self._decode(job.ids[job.rules.start :])

    async def _tokens(self, job: Job, asked: Continuation) -> AsyncGenerator[list[int], None]:
        """Tokens as they come, at least one at a time, until the upstream ends or the job is
        cancelled."""
        text = TokensOfText(self._encode, self._decode)
        pieces = self._upstreams.go_on(asked)
        coming: asyncio.Future[Any] | None = None
        self._silent += 1
        silent = True
        try:
            while True:
                coming = asyncio.ensure_future(anext(pieces, None))
                while not coming.done() and not job.cancelled:
                    await asyncio.wait({coming}, timeout=_LOOK_SECONDS)
                if job.cancelled:
                    return
                piece = coming.result()
                if silent:
                    self._silent -= 1
                    silent = False
                if piece is None:
                    return
                new = [*piece.ids, *text.add(piece.text)]
                if piece.ending:
                    new += text.rest()
                if piece.ending == "eos" and self._eos_ids and not set(new) & set(self._eos_ids):
                    new.append(self._eos_ids[0])
                if new:
                    yield new
                if piece.ending:
                    return
        finally:
            self._silent -= silent
            if coming is not None and not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            await pieces.aclose()

    def _refused(self, job: Job, error: UpstreamError) -> Report:
        """A stream that has begun keeps its tokens; the device asks for the rest."""
        if job.base > job.request.base and error.later:
            return Answered.ended(job)
        if isinstance(error, TooLongError):
            return Dropped(job, Refusal(Code.LIMIT, error.line(), limit="max_context_tokens"))
        if not error.later:
            return Dropped(job, Refusal(Code.UNSUPPORTED, error.line()))
        wait = int(1000 * max(0.25, error.retry_after))
        return Dropped(job, Refusal(Code.BUSY, error.line(), retry_after_ms=wait))
