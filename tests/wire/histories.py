"""A verifier without wire, threads or torch: its real sessions, and a target that is a function of
the log."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cloud_verifier.engine.contract import Answered, Waiting
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.sessions.session import Output, Prefill, Run, ServerSession
from moa.logprobs import pack
from moa.speculation.guess_tree import Picked
from moa.tree import Accepted, accept, path_of
from moa.wire import FEATURES, Code, Limits, Refusal
from moa.wire import messages as m
from moa.wire.finish import Decode, first_finish

Times = tuple[float, float]
"""Milliseconds that a round waits and runs."""
AT_ONCE: Times = 0.0, 0.0
EOS = 0


def says(log: Sequence[int]) -> int:
    """A "target": a fixed function of everything before."""
    return (sum(log) * 31 + len(log) * 17) % 50 + 1


def rows(session: ServerSession, tokens: int) -> bytes:
    """Made-up log-probabilities of the next tokens: a function of their positions."""
    places = np.arange(len(session.log), len(session.log) + tokens)
    best = np.repeat(places[:, None], max(session.logprobs, 0), axis=1)
    return pack(-places / 8, best, -best / 8) if session.logprobs >= 0 else b""


class Histories:
    """Sessions by id. A test that removes one here simulates a verifier that has lost it."""

    def __init__(
        self,
        says: Callable[[Sequence[int]], int],
        eos: int,
        *,
        max_context: int,
        decode: Decode | None = None,
        stream_tokens: int = 0,
    ) -> None:
        """`says` is the target; a stream ends after `stream_tokens` (0: with the turn)."""
        self.known: dict[bytes, ServerSession] = {}
        self._says = says
        self._eos = frozenset({eos})
        self._max_context = max_context
        self._decode = decode
        self._stream_tokens = stream_tokens

    def answers(self, message: Any, times: Times) -> list[Any]:
        """What the verifier sends back at once."""
        session = self.known.get(message.session)
        try:
            match message:
                case m.Open() if session is None:
                    session = ServerSession(
                        message,
                        Limits(),
                        eos_ids=self._eos,
                        max_context=self._max_context,
                        features=FEATURES,
                    )
                    session.lease = Lease(session.id, "")
                    self.known[session.id] = session
                    outputs = session.open(message)
                case m.Resume() if session is None:
                    outputs = [m.Resumed(message.session, "gone")]
                case m.Foresee() if session is None:
                    outputs = []
                case _ if session is None:
                    raise Refusal(Code.UNKNOWN_SESSION, "no such session")
                case m.Open():
                    outputs = session.open(message)
                case m.Resume():
                    outputs = session.resume(message)
                case m.Append():
                    outputs = session.append(message)
                case m.Stream():
                    outputs = session.stream(message, 0.0)
                case m.Cancel():
                    outputs = session.cancel(message.round)
                case m.Foresee():
                    outputs, _ = session.foresee(message, 0.0)
                case _:
                    outputs = []
        except Refusal as refusal:
            return [refusal.error(session=message.session, round=m.round_of(message))]
        return [
            answer for output in outputs for answer in self._carry_out(session, output, times)
        ] + self._end(session)

    def _carry_out(self, session: ServerSession | None, output: Output, times: Times) -> list[Any]:
        match output:
            case Prefill():
                return []
            case Run() if session is not None:
                return self.run(session, times)
            case _:
                return [output]

    def _end(self, session: ServerSession | None) -> list[Any]:
        """The end of a stream that was cancelled."""
        if session is None or session.job is None or not session.job.cancelled:
            return []
        end = Answered.ended(session.job).message
        session.stream_on(end, 0.0)
        return [end]

    def job(self, session: ServerSession) -> Job:
        """The running round, handed to the engine."""
        assert session.lease is not None
        session.job = session.as_job(session.lease, 0.0)
        return session.job

    def run(self, session: ServerSession, times: Times) -> list[Any]:
        """The answers of the admitted round."""
        return self._stream(session, self.job(session), times)

    def _accept(
        self, session: ServerSession, tokens: Sequence[int], parents: Sequence[int]
    ) -> Accepted:
        return accept(
            tokens,
            parents,
            lambda node: self._says([*session.log, *path_of(tokens, parents, node)]),
        )

    def _stream(self, session: ServerSession, job: Job, times: Times) -> list[Any]:
        answers: list[Any] = []
        for count in itertools.count(1):
            new = [self._says(session.log)]
            _, finish = first_finish(session.rules, session.log, new, self._decode)
            done = bool(finish) or count == self._stream_tokens
            told = rows(session, len(new))
            answer = m.StreamTokens(
                session.id, job.request.round, session.base, new, done, finish, 0, *times, told
            )
            session.stream_on(answer, 0.0)
            answers.append(answer)
            if done:
                break
        return answers


class SteppedHistories(Histories):
    """Its streams run a forward at a time, over what the edge foresees, its own draft, or the
    pending token alone."""

    forwards = 0
    most = 12
    """Nodes of a draft."""
    drafter: Callable[[Sequence[int]], int] | None = None
    """Guesses the token after a log."""
    drafted = 4
    """Tokens of an own draft."""
    matching: float = 0.0
    """How many of them are right, as it expects; guesses that promise less are not used."""

    def abandon(self, *, in_forward: bool = False) -> None:
        """The connection is gone: streams end where they are, or behind the forward that is under
        way."""
        for id in self.known:
            if in_forward and self.streams(id):
                self.known[id].abandon()
            else:
                self.end(id)

    def is_cancelled(self, id: bytes) -> bool:
        """Whether the stream of this session, if one runs, is to end."""
        session = self.known.get(id)
        return session is not None and session.job is not None and session.job.cancelled

    def end(self, id: bytes) -> list[Any]:
        """End a stream where it is."""
        self.known[id].abandon()
        return self._end(self.known[id])

    def streams(self, id: bytes) -> bool:
        """Whether there is a forward to run for a stream of this session."""
        session = self.known.get(id)
        if session is None or session.job is None or session.guesses is None:
            return False
        if not session.guesses.waits or len(self._guesses(session).tokens) > 1:
            return True
        assert session.wait(Waiting(session.job), 0.0) == [], "all guesses have been looked at"
        return False

    def step(self, id: bytes, times: Times) -> m.StreamTokens:
        """The next forward of a stream."""
        session = self.known[id]
        assert session.job is not None
        assert session.guesses is not None
        picked = self._guesses(session)
        tokens = picked.tokens
        parents = picked.parents
        foreseen = len(tokens) - 1
        if not foreseen or (picked.expected < self.matching and not session.guesses.waits):
            foreseen = 0
            tokens, parents = self._own(session)
        found = self._accept(session, tokens, parents)
        new = [*(tokens[node] for node in found.path[1:]), found.next_token]
        count, finish = first_finish(session.rules, session.log, new, self._decode)
        self.forwards += 1
        told = rows(session, count)
        round = session.job.request.round
        base = session.base
        done = bool(finish)
        made = m.StreamTokens(
            id, round, base, new[:count], done, finish, len(tokens) - 1, *times, told, foreseen
        )
        session.job.ids += made.tokens
        session.stream_on(made, 0.0)
        return made

    def _stream(self, session: ServerSession, job: Job, times: Times) -> list[Any]:
        return []

    def _own(self, session: ServerSession) -> tuple[list[int], list[int]]:
        tokens = [session.log[-1]]
        drafts = session.running is not None and session.running.speculate
        for _ in range(self.drafted if self.drafter is not None and drafts else 0):
            tokens.append(self.drafter([*session.log[:-1], *tokens]))
        return tokens, list(range(-1, len(tokens) - 1))

    def _guesses(self, session: ServerSession) -> Picked:
        assert session.guesses is not None
        return session.guesses.pick(session.log, self.most, 0.0, branches=True)
