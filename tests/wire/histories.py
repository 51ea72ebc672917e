"""A verifier without wire, threads or torch: the real session histories, and a target that is a function of the log."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moa.logprobs import pack
from moa.tree import accept
from moa.wire import Code, History, Refusal, Timing
from moa.wire.finish import Decode, cut_path, first_finish
from moa.wire.messages import Append, Open, Resume, Resumed, Stream, Verify


def rows(history: History, tokens: int) -> bytes:
    """Made-up log-probabilities of the next tokens: a function of their positions."""
    places = np.arange(len(history.ids), len(history.ids) + tokens)
    best = np.repeat(places[:, None], max(history.logprobs, 0), axis=1)
    return pack(-places / 8, best, -best / 8) if history.logprobs >= 0 else b""


class Histories:
    """Sessions by id. What a test forgets here, the verifier has lost."""

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
        parents = request.parents or range(-1, len(request.tokens) - 1)

        def choose(node: int) -> int:
            path = []
            while node > 0:
                path.append(request.tokens[node])
                node = parents[node]
            return self._says([*history.ids, *reversed(path)])

        found = accept(request.tokens, parents, choose)
        cut = cut_path(history.rules, history.ids, request.tokens, found.path, found.next_token, self._decode)
        return [history.settle(*cut, timing, rows(history, len(cut[0])))]

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
