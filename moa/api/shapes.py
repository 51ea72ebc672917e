"""Responses of `/v1/chat/completions` and `/v1/completions`, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from moa.api import logprobs
from moa.api.answer import Began, Ended, LinkNews, Note, Reading, Reason, Scored
from moa.api.completions import CompletionCall
from moa.api.errors import ApiError
from moa.api.parts import Separator
from moa.api.present import Show

_FINISH: dict[Reason, str] = {"eos": "stop", "stop": "stop"}
"""All other reasons are reported as `length`, which clients know; `moa.reason` is the exact one."""


class Shape:
    """The envelope of one response: its id, and how choices are written in it."""

    def __init__(self, model: str, call: CompletionCall) -> None:
        """Begin the response to a request (`call`)."""
        self._call = call
        self.marked = call.asks[0].mode == "provisional"
        """For clients that know our field, and so can take text back."""
        prefix = "chatcmpl" if call.chat else "cmpl"
        self.id = f"{prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model
        # All of these are by choice.
        self._parts: dict[int, Separator] = {}
        self._calls_sent: Counter[int] = Counter()
        self._scored: dict[int, list[Scored]] = {index: [] for index in range(len(call.asks))}
        """Log-probabilities that are sent with a whole answer."""
        self._scored_characters: Counter[int] = Counter()
        """Characters of a streamed choice whose log-probabilities have been sent."""
        self.ends: dict[int, Ended] = {}
        """How each choice has ended, when it has."""
        self.verified: Counter[int] = Counter()
        """How many characters of each choice's text its client knows to be verified."""
        self.error: ApiError | None = None

    def snapshot(self) -> dict[str, Any]:
        """The whole response to a request that does not stream, once all its choices (answers) have
        ended."""
        choices = []
        for index, ended in sorted(self.ends.items()):
            if self._call.chat:
                body: dict[str, Any] = {"message": self._message(index)}
            else:
                body = {"text": self._parts[index].answer}
            wants_logprobs = self._call.asks[index].logprobs is not None
            choices.append(
                self._choice(
                    index,
                    body,
                    reason=ended.reason,
                    moa={"reason": ended.reason, "verified": ended.verified, **why_of(ended)},
                    scored=self._scored[index] if wants_logprobs else None,
                )
            )
        kind = "chat.completion" if self._call.chat else "text_completion"
        return self._envelope(kind, choices) | {"usage": _usage(self.ends.values())}

    # ---- chunks

    def begin(self, index: int, event: Began) -> list[Any]:
        """Begin a choice; returns the chunk that opens it in a chat."""
        self._parts[index] = Separator(
            separate=self._call.separate,
            thinking=event.thinking,
            reader=self._call.asks[index].question.call_reader(),
        )
        if not self._call.chat:
            return []
        opening = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([self._choice(index, opening)])]

    def piece(
        self, index: int, show: Show | None, *, alone: bool = False, last: bool = False
    ) -> list[Any]:
        """Returns the chunk for a change of a choice's text, if its client is to be told. `alone`
        says that the device wrote it without the verifier. The `last` change brings what was held
        back; where text may still be withdrawn, only then its calls of tools are sent."""
        if show is not None:
            self.verified[index] = show.verified
        reasoning, answer = self._parts[index].take(show, last=last)
        scored = show.logprobs if show is not None else ()
        if not self._call.stream:
            self._scored[index] += scored
            return []
        delta: dict[str, Any] = {}
        if reasoning.text:
            delta["reasoning_content"] = reasoning.text
        if answer.text:
            delta["content"] = answer.text
        if last or not self.marked:  # else the text of a call may still be withdrawn
            calls = self._new_calls(index)
            if calls:
                delta["tool_calls"] = calls
        is_news_of_verification = self.marked and show is not None
        if not delta and not scored and not is_news_of_verification:
            return []
        body = {"delta": delta} if self._call.chat else {"text": answer.text}
        marks = self._marks(reasoning, answer, alone=alone)
        return [self._chunk([self._choice(index, body, moa=marks, scored=scored or None)])]

    def _marks(self, reasoning: Show, answer: Show, *, alone: bool) -> dict[str, Any]:
        """The field `moa` of a chunk, ours beside OpenAI's: for clients that asked for it
        (`marked`) how many characters are verified and where text is cut; for others that the text
        is unverified, where the device wrote it `alone`, without the verifier."""
        if not self.marked:
            return {"unverified": True} if alone else {}
        marks: dict[str, Any] = {"verified": answer.verified}
        if answer.cut is not None:
            marks["cut"] = answer.cut
        if reasoning.cut is not None:
            marks["reasoning_cut"] = reasoning.cut
        return marks

    def end(self, index: int, ended: Ended) -> list[Any]:
        """The chunk that closes a choice, and that of `stream_options.include_usage`."""
        body: dict[str, Any] = {"delta": {}} if self._call.chat else {"text": ""}
        marks = {"reason": ended.reason, "all_verified": ended.verified, **why_of(ended)}
        chunks = [self._chunk([self._choice(index, body, reason=ended.reason, moa=marks)])]
        self.ends[index] = ended
        if self._call.include_usage and len(self.ends) == len(self._call.asks):
            chunks.append(self._chunk([]) | {"usage": _usage(self.ends.values())})
        return chunks

    def fail(self, error: ApiError) -> Any:
        """The event for an error, the last."""
        self.error = error
        return error.body()

    def news(self, event: LinkNews | Note | Reading) -> Any:
        """The chunk for other events of the answer, for clients that know our field."""
        if isinstance(event, LinkNews):
            return self._chunk([]) | {"moa": {"link": event.state, "detail": event.detail}}
        if isinstance(event, Reading):
            by = {} if event.by == "verifier" else {"by": event.by}
            return self._chunk([]) | {"moa": {"reading": [event.done, event.total], **by}}
        return self._chunk([]) | {"moa": {"notice": event.message}}

    # ---- parts

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        """An event of a stream."""
        kind = "chat.completion.chunk" if self._call.chat else "text_completion"
        return self._envelope(kind, choices)

    def _envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        """A response or chunk of this kind."""
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
        *,
        reason: Reason | None = None,
        moa: dict[str, Any] | None = None,
        scored: Sequence[Scored] | None = None,
    ) -> dict[str, Any]:
        """A choice as an entry of a response or chunk. `body` is its text or change; `reason` says
        why the answer has ended, None while it goes on; `moa` is our own field, and `scored` are
        log-probabilities of its tokens."""
        finish = None
        if reason is not None:
            finish = _FINISH.get(reason, "length")
        if finish == "stop" and self._calls_sent[index]:
            finish = "tool_calls"
        choice = {
            "index": index,
            **body,
            "logprobs": None if scored is None else self._logprobs(index, scored),
            "finish_reason": finish,
        }
        if moa:
            choice["moa"] = moa
        return choice

    def _message(self, index: int) -> dict[str, Any]:
        """The message of a whole answer in a chat: its text, and its reasoning and calls of tools
        if it has any."""
        parts = self._parts[index]
        message: dict[str, Any] = {"role": "assistant", "content": parts.answer, "refusal": None}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        calls = self._new_calls(index)
        if calls:
            message["content"] = parts.answer or None
            message["tool_calls"] = calls
        return message

    def _new_calls(self, index: int) -> list[dict[str, Any]]:
        """Return the complete calls of tools in a choice that have not been sent yet; they count as
        sent from now on."""
        calls = self._parts[index].calls
        first = self._calls_sent[index]
        self._calls_sent[index] = max(first, len(calls))
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
        """The log-probabilities of a choice's next tokens."""
        if self._call.chat:
            return logprobs.chat(scored)
        offset = self._scored_characters[index]
        self._scored_characters[index] += sum(len(entry.token) for entry in scored)
        return logprobs.completion(scored, offset)


def why_of(ended: Ended) -> dict[str, str]:
    """Returns the entry of the field `moa` that says why an answer is not verified to its end, or
    whose limit has cut it; none where there is nothing to say, or where nobody knows."""
    return {"why": ended.why} if ended.why else {}


def _usage(ends: Iterable[Ended]) -> dict[str, Any]:
    """The field `usage` of a response, over all its choices (answers): their tokens, and in `moa`,
    a field of ours, how many were drafted and accepted. Those of a predicted text are where OpenAI
    has them."""
    counts = [ended.counts for ended in ends]
    prompt_tokens = sum(count.prompt_tokens for count in counts)
    answer_tokens = sum(count.tokens for count in counts)
    predicted = sum(count.predicted for count in counts)
    predicted_accepted = sum(count.predicted_accepted for count in counts)
    # The answerer's own figures are of one answer: there is no sum of them.
    more = counts[0].more if len(counts) == 1 else {}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": predicted_accepted,
            "rejected_prediction_tokens": predicted - predicted_accepted,
        },
        "moa": {
            "drafted": sum(count.drafted for count in counts),
            "accepted": sum(count.accepted for count in counts),
            "calls": sum(count.calls for count in counts),
            "forwards": sum(count.forwards for count in counts),
            "forward_tokens": sum(count.forward_tokens for count in counts),
            "unverified_tokens": sum(count.unverified for count in counts),
            **more,
        },
    }


def model_list(name: str, created: int) -> dict[str, Any]:
    """The list of models: one."""
    return {"object": "list", "data": [model_entry(name, created)]}


def model_entry(name: str, created: int) -> dict[str, Any]:
    """One model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "moa-edge"}
