"""Responses of `/v1/chat/completions` and `/v1/completions`, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from moa.api import logprobs
from moa.api.answer import Began, Ended, LinkNews, Note, Reading, Reason, Scored
from moa.api.completions import CompletionCall
from moa.api.errors import ApiError
from moa.api.parts import Separator
from moa.api.present import Show
from moa.api.tools import ToolFormat

_FINISH: dict[Reason, str] = {"eos": "stop", "stop": "stop"}
"""All other reasons are reported as `length`, which clients know; `moa.reason` is the exact one."""


class Shape:
    """The envelope of one response: its id, and how choices are written in it."""

    def __init__(self, model: str, call: CompletionCall, form: ToolFormat | None = None) -> None:
        """`form`: how the model writes calls, if it may."""
        self._call = call
        self._form = form
        self.marked = call.asks[0].mode == "provisional"
        """For clients that know our field, and so can take text back."""
        self._called: Counter[int] = Counter()
        """Calls of each choice that have been sent."""
        self._parts: dict[int, Separator] = {}
        self.id = f"{'chatcmpl' if call.chat else 'cmpl'}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model
        self._scored: dict[int, list[Scored]] = {index: [] for index in range(len(call.asks))}
        """What is to be told with a whole answer."""
        self._told: Counter[int] = Counter()
        """Characters of each streamed choice whose log-probabilities have been sent."""
        self.ends: dict[int, Ended] = {}
        """How each choice has ended, when it has."""
        self.error: ApiError | None = None

    def snapshot(self) -> dict[str, Any]:
        """The response of a request that does not stream, when all choices have ended."""
        choices = [
            self._choice(
                index,
                {"message": self._message(index)}
                if self._call.chat
                else {"text": self._parts[index].answer},
                ended.reason,
                {"reason": ended.reason, "verified": ended.verified},
                None if self._call.asks[index].logprobs is None else self._scored[index],
            )
            for index, ended in sorted(self.ends.items())
        ]
        kind = "chat.completion" if self._call.chat else "text_completion"
        return self._envelope(kind, choices) | {"usage": _usage(self.ends.values())}

    # ---- chunks

    def begin(self, index: int, event: Began) -> list[Any]:
        """A choice begins: the chunk that opens it in a chat."""
        self._parts[index] = Separator(
            separate=self._call.separate, thinking=event.thinking, form=self._form
        )
        opening = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([self._choice(index, opening)])] if self._call.chat else []

    def piece(
        self, index: int, show: Show | None, *, alone: bool = False, last: bool = False
    ) -> Iterator[Any]:
        """The chunk for a change, if there is one. `alone`: the device's own text; the `last`
        change brings what was held back, and calls in texts that may be cut."""
        reasoning, answer = self._parts[index].take(show, last=last)
        scored = show.logprobs if show is not None else ()
        if not self._call.stream:
            self._scored[index] += scored
            return
        delta: dict[str, Any] = {"reasoning_content": reasoning.text, "content": answer.text}
        if last or not self.marked:
            delta["tool_calls"] = self._calls(index)
        if not (any(delta.values()) or scored or (self.marked and show is not None)):
            return
        delta = {name: value for name, value in delta.items() if value}
        marks: dict[str, Any] = {"unverified": True} if alone and not self.marked else {}
        if self.marked:
            marks["verified"] = answer.verified
            cuts = {"cut": answer.cut, "reasoning_cut": reasoning.cut}
            marks |= {name: cut for name, cut in cuts.items() if cut is not None}
        body = {"delta": delta} if self._call.chat else {"text": answer.text}
        yield self._chunk([self._choice(index, body, None, marks, scored or None)])

    def end(self, index: int, ended: Ended) -> Iterator[Any]:
        """The chunk that closes a choice, and that of `stream_options.include_usage`."""
        body: dict[str, Any] = {"delta": {}} if self._call.chat else {"text": ""}
        marks = {"reason": ended.reason, "all_verified": ended.verified}
        yield self._chunk([self._choice(index, body, ended.reason, marks)])
        self.ends[index] = ended
        if self._call.include_usage and len(self.ends) == len(self._call.asks):
            yield self._chunk([]) | {"usage": _usage(self.ends.values())}

    def fail(self, error: ApiError) -> Any:
        """The event for an error, the last."""
        self.error = error
        return error.body()

    def news(self, event: LinkNews | Note | Reading) -> Any:
        """The chunk for other events of the answer, for clients that know our field."""
        if isinstance(event, LinkNews):
            return self._chunk([]) | {"moa": {"link": event.state, "detail": event.detail}}
        if isinstance(event, Reading):
            return self._chunk([]) | {"moa": {"reading": [event.done, event.total]}}
        return self._chunk([]) | {"moa": {"notice": event.message}}

    # ---- parts

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        return self._envelope(
            "chat.completion.chunk" if self._call.chat else "text_completion", choices
        )

    def _envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(
        self,
        index: int,
        body: dict[str, Any],
        reason: Reason | None = None,
        moa: dict[str, Any] | None = None,
        scored: Sequence[Scored] | None = None,
    ) -> dict[str, Any]:
        finish = _FINISH.get(reason, "length") if reason else None
        if finish == "stop" and self._called[index]:
            finish = "tool_calls"
        told = None if scored is None else self._logprobs(index, scored)
        choice = {"index": index, **body, "logprobs": told, "finish_reason": finish}
        return choice | {"moa": moa} if moa else choice

    def _message(self, index: int) -> dict[str, Any]:
        parts = self._parts[index]
        message: dict[str, Any] = {"role": "assistant", "content": parts.answer, "refusal": None}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if calls := self._calls(index):
            message |= {"content": parts.answer or None, "tool_calls": calls}
        return message

    def _calls(self, index: int) -> list[dict[str, Any]]:
        """The complete calls of a choice that have not been sent."""
        calls = self._parts[index].calls
        first = self._called[index]
        self._called[index] = max(first, len(calls))
        return [
            {
                "index": number,
                "id": f"call_{self.id[-24:]}{index}{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls[first:], first)
        ]

    def _logprobs(self, index: int, scored: Sequence[Scored]) -> dict[str, Any]:
        if self._call.chat:
            return logprobs.chat(scored)
        offset = self._told[index]
        self._told[index] += sum(len(entry.token) for entry in scored)
        return logprobs.completion(scored, offset)


def _usage(ends: Iterable[Ended]) -> dict[str, Any]:
    """Tokens of all choices together. Figures of speculation are in `moa`; those of the prediction
    are where OpenAI has them."""
    every = [ended.counts for ended in ends]
    prompt = sum(c.prompt_tokens for c in every)
    tokens = sum(c.tokens for c in every)
    predicted = sum(c.predicted for c in every)
    taken = sum(c.predicted_accepted for c in every)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": taken,
            "rejected_prediction_tokens": predicted - taken,
        },
        "moa": {
            "drafted": sum(c.drafted for c in every),
            "accepted": sum(c.accepted for c in every),
            "calls": sum(c.calls for c in every),
            **(every[0].more if len(every) == 1 else {}),
        },
    }


def model_list(name: str, created: int) -> dict[str, Any]:
    """The list of models: one."""
    return {"object": "list", "data": [model_entry(name, created)]}


def model_entry(name: str, created: int) -> dict[str, Any]:
    """One model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "moa-edge"}
