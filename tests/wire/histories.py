"""A verifier without wire, threads or torch: the real session histories, and a target that is a function of the log."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moa.logprobs import pack
from moa.speculation.guess_tree import Foreseen, Picked
from moa.tree import Accepted, accept
from moa.wire import Code, History, Refusal, Timing
from moa.wire.finish import Decode, cut_path, first_finish
from moa.wire.messages import Append, Cancel, Foresee, Open, Resume, Resumed, Stream, StreamTokens, Verify


def path_to(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens of a tree from below its root to a node."""
    path = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def rows(history: History, tokens: int) -> bytes:
    """Made-up log-probabilities of the next tokens: a function of their positions."""
    places = np.arange(len(history.ids), len(history.ids) + tokens)
    best = np.repeat(places[:, None], max(history.logprobs, 0), axis=1)
    return pack(-places / 8, best, -best / 8) if history.logprobs >= 0 else b""


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
        self.known: dict[bytes, History] = {}
        self._says, self._eos, self._max_context = says, frozenset({eos}), max_context
        self._decode, self._stream_tokens = decode, stream_tokens

    def answers(self, message: Any, timing: Timing) -> list[Any]:
        """What the verifier sends back."""
        history = self.known.get(message.session)
        try:
            match message:
                case Open():
                    if history is None:
                        history = History(message, message.ids, eos_ids=self._eos, max_context=self._max_context)
                        self.known[message.session] = history
                    return [history.reopen(message.ids)]
                case Resume() if history is None:
                    return [Resumed(message.session, "gone")]
                case _ if history is None:
                    raise Refusal(Code.UNKNOWN_SESSION, "no such session", session=message.session)
                case Resume():
                    return [history.resume(message, "resumed")]
                case Append():
                    return [history.append(message)]
                case Verify() | Stream():
                    settled = history.admit(message)
                    return self.run(history, timing) if settled is None else [] if settled == "running" else [settled]
                case _:
                    return []
        except Refusal as refusal:
            return [refusal.error(session=message.session, round=getattr(message, "round", 0))]

    def run(self, history: History, timing: Timing) -> list[Any]:
        """The answers of the admitted round."""
        request = history.running
        if isinstance(request, Stream):
            return self._stream(history, timing)
        assert isinstance(request, Verify)
        found = self._accept(history, request.tokens, request.parents or range(-1, len(request.tokens) - 1))
        cut = cut_path(history.rules, history.ids, request.tokens, found.path, found.next_token, self._decode)
        return [history.settle(*cut, timing, rows(history, len(cut[0])))]

    def _accept(self, history: History, tokens: Sequence[int], parents: Sequence[int]) -> Accepted:
        return accept(tokens, parents, lambda node: self._says([*history.ids, *path_to(tokens, parents, node)]))

    def _stream(self, history: History, timing: Timing) -> list[Any]:
        answers = []
        for count in itertools.count(1):
            new = [self._says(history.ids)]
            _, finish = first_finish(history.rules, history.ids, new, self._decode)
            done = bool(finish) or count == self._stream_tokens
            told = rows(history, len(new))
            answers.append(history.emit(new, finish, timing, drafted=0, done=done, logprobs=told))
            if done:
                break
        return answers


class SteppedHistories(Histories):
    """Its streams run a forward at a time, over what the edge foresees, its own draft, or the pending token alone."""

    forwards = 0
    most = 12
    """Nodes of a draft."""
    drafter: Callable[[Sequence[int]], int] | None = None
    """Guesses the token after a log."""
    drafted = 4
    """Tokens of an own draft."""
    matching: float = 0.0
    """How many of them are right, as it expects; guesses that promise less are not used."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._foreseen: dict[bytes, Foreseen] = {}
        self._waits: dict[bytes, bool] = {}

    def answers(self, message: Any, timing: Timing) -> list[Any]:
        """What the verifier sends back at once."""
        history = self.known.get(message.session)
        running = history.running if history is not None else None
        match message:
            case Foresee() if history is not None:
                if running is not None and running.round == message.round:
                    where = message.base, message.tokens, message.parents, message.doubts
                    self._foreseen[message.session].add(history.ids, *where)
                    if message.waits is not None:
                        self._waits[message.session] = message.waits
                return []
            case Cancel() if history is not None and running is not None and running.round == message.round:
                return [history.emit([], "", Timing(), drafted=0, done=True)]
            case _:
                return super().answers(message, timing)

    def abandon(self) -> None:
        """The connection is gone: streams end where they are."""
        for history in self.known.values():
            if history.running is not None:
                history.emit([], "", Timing(), drafted=0, done=True)

    def streams(self, session: bytes) -> bool:
        """Whether there is a forward to run for a stream of this session."""
        history = self.known.get(session)
        if history is None or not isinstance(history.running, Stream):
            return False
        return not self._waits[session] or len(self._guesses(history).tokens) > 1

    def step(self, session: bytes, timing: Timing) -> StreamTokens:
        """The next forward of a stream."""
        history = self.known[session]
        tokens, parents, expected = self._guesses(history)
        foreseen = len(tokens) - 1
        if not foreseen or (expected < self.matching and not self._waits[session]):
            foreseen = 0
            tokens, parents = self._own(history)
        found = self._accept(history, tokens, parents)
        new = [*(tokens[node] for node in found.path[1:]), found.next_token]
        count, finish = first_finish(history.rules, history.ids, new, self._decode)
        sent, told = len(tokens) - 1, rows(history, count)
        self.forwards += 1
        told_by = {"drafted": sent, "foreseen": foreseen, "logprobs": told}
        return history.emit(new[:count], finish, timing, done=bool(finish), **told_by)

    def run(self, history: History, timing: Timing) -> list[Any]:
        """The answer of the admitted round; a stream's follow step by step."""
        self.forwards += isinstance(history.running, Verify)
        return super().run(history, timing)

    def _stream(self, history: History, timing: Timing) -> list[Any]:
        self._foreseen[history.session] = Foreseen()
        self._waits[history.session] = isinstance(history.running, Stream) and history.running.waits
        return []

    def _own(self, history: History) -> tuple[list[int], list[int]]:
        tokens, drafts = [history.ids[-1]], isinstance(history.running, Stream) and history.running.speculate
        for _ in range(self.drafted if self.drafter is not None and drafts else 0):
            tokens.append(self.drafter([*history.ids[:-1], *tokens]))
        return tokens, list(range(-1, len(tokens) - 1))

    def _guesses(self, history: History) -> Picked:
        foreseen = self._foreseen[history.session]
        foreseen.follow(history.ids)
        return foreseen.pick(self.most, 0.0)
