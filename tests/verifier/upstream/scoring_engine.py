"""The embedded target behind vLLM's and SGLang's interfaces: an engine that really scores tokens.

Requests and answers have the fields of vLLM 0.32's `/v1/completions` and of SGLang's `/generate`,
as far as they are read or sent.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from tests.edge.serve.pair import embedded
from tests.verifier.upstream.scripted import Answer, Request, stream, whole

NEVER = -9999.0
"""vLLM writes this for a log-probability of minus infinity, which JSON cannot hold."""


class Place(NamedTuple):
    """What the model says of one place: all log-probabilities."""

    logprobs: torch.Tensor

    def top(self, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens."""
        found = self.logprobs.topk(count)
        return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))

    def of(self, token: int) -> float:
        """A token's log-probability."""
        return float(self.logprobs[token])


def places(ids: Sequence[int]) -> list[Place]:
    """For the place behind each token."""
    with torch.inference_mode():
        logits = embedded().target.model(torch.tensor([list(ids)])).logits[0]
    return [Place(row) for row in logits.float().log_softmax(dim=-1)]


@cache
def place_behind(ids: tuple[int, ...]) -> Place:
    """For the place behind the last one. The answers of these tests have few texts among them."""
    return Place(places(ids)[-1].logprobs.clone())


Text = list[tuple[int, Place]]
"""Tokens, and what the model says of the place of each."""


def written(ids: Sequence[int], most: int, temperature: float) -> Iterator[tuple[int, Place]]:
    """What it writes, by chance of its own where it is to sample."""
    text = list(ids)
    for _ in range(most):
        place = place_behind(tuple(text))
        token = int(place.logprobs.argmax())
        if temperature > 0:
            weights = (place.logprobs / temperature).softmax(dim=-1).tolist()
            token = random.choices(range(len(weights)), weights)[0]
        yield token, place
        text.append(token)
        if token in embedded().target.facts.eos_ids:
            return


@dataclass
class ScoringEngine:
    """One of the two."""

    kind: str
    most_logprobs: int = 20
    scored: list[int] = field(default_factory=list)
    """Drafted tokens of each request that had any."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    breaks_off: bool = False
    """Whether its next stream breaks off behind two tokens, and the engine is away from then on."""
    away: bool = False

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """One request."""
        if self.away:
            return
        if request.path == "/tokenize":
            tokens = embedded().target.tokenizer.encode(
                request.body["prompt"], add_special_tokens=False
            )
            await whole({"tokens": tokens, "count": len(tokens)})(request, writer)
            return
        self.asked.append(request.body)
        answer = self._vllm(request.body) if self.kind == "vllm" else self._sglang(request.body)
        await answer(request, writer)

    def _stream(self, events: Iterator[dict[str, Any]]) -> Answer:
        """Each event is made when the one before has been sent."""
        most = 2 if self.breaks_off else None
        self.away |= self.breaks_off
        self.breaks_off = False

        async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
            await stream()(request, writer)  # the head
            for event in islice(events, most):
                if writer.is_closing():
                    return
                writer.write(f"data: {json.dumps(event)}\n\n".encode())
                await writer.drain()
                await asyncio.sleep(0)  # so that a connection that was closed is noticed
            if most is None:
                writer.write(b"data: [DONE]\n\n")

        return answer

    # ---- vLLM

    def _vllm(self, body: dict[str, Any]) -> Answer:
        ids = body["prompt"]
        count = body.get("prompt_logprobs")
        if count is not None and count > self.most_logprobs:
            said = f"Requested prompt logprobs of {count}, which is greater than max allowed"
            return whole({"error": {"message": said, "code": 400}}, "400 Bad Request")
        if body["stream"]:
            return self._stream(self._vllm_chunks(body))
        assert body["max_tokens"] == 1
        assert count is not None
        said_of = places(ids)
        prompt: list[dict[str, Any] | None] = [None]
        for place, token in zip(said_of, ids[1:], strict=False):
            top = dict(place.top(count))
            entries = {token: place.of(token)} | top
            ranks = {one: rank for rank, one in enumerate(top, 1)}
            prompt.append(
                {
                    str(one): {
                        "logprob": max(number, NEVER),
                        "rank": ranks.get(one, 99),
                        "decoded_token": "x",
                    }
                    for one, number in entries.items()
                }
            )
        token = int(said_of[-1].logprobs.argmax())
        choice = {
            "index": 0,
            "text": "x",
            "token_ids": [token],
            "finish_reason": "length",
            "logprobs": self._vllm_logprobs([(token, said_of[-1])], body["logprobs"]),
            "prompt_logprobs": prompt,
        }
        self.scored.append(len(ids))
        return whole({"object": "text_completion", "choices": [choice], "usage": {}})

    def _vllm_chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        most = body["max_tokens"]
        text = written(body["prompt"], most, body["temperature"])
        for size, (token, place) in enumerate(text, 1):
            choice: dict[str, Any] = {"index": 0, "text": "x", "token_ids": [token]}
            choice["finish_reason"] = _reason(token, size, most)
            if body.get("logprobs"):
                assert body["return_tokens_as_token_ids"]
                choice["logprobs"] = self._vllm_logprobs([(token, place)], body["logprobs"])
            yield {"choices": [choice]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": size}
        yield {"choices": [], "usage": usage}

    @staticmethod
    def _vllm_logprobs(text: Text, count: int) -> dict[str, Any]:
        return {
            "tokens": [f"token_id:{token}" for token, _ in text],
            "token_logprobs": [place.of(token) for token, place in text],
            "text_offset": [0 for _ in text],
            "top_logprobs": [
                {f"token_id:{token}": place.of(token)}
                | {f"token_id:{one}": number for one, number in place.top(count)}
                for token, place in text
            ],
        }

    # ---- SGLang

    def _sglang(self, body: dict[str, Any]) -> Answer:
        ids = body["input_ids"]
        count = body.get("top_logprobs_num", 0)
        asked = body["sampling_params"]
        text = written(ids, asked["max_new_tokens"], asked["temperature"])
        if body["stream"]:
            return self._stream(self._sglang_events(text, asked["max_new_tokens"], count))
        start = body["logprob_start_len"]
        said_of = places(ids)
        given: list[Any] = [None]
        own: list[Any] = [[None, ids[start], None]]
        for index in range(start, len(ids) - 1):
            given.append(self._triples(said_of[index].top(count)))
            own.append([said_of[index].of(ids[index + 1]), ids[index + 1], None])
        meta = {"finish_reason": {"type": "length", "length": 1}, "prompt_tokens": len(ids)}
        meta |= {"input_token_logprobs": own, "input_top_logprobs": given}
        meta |= self._sglang_written(found := list(text), count)
        self.scored.append(len(ids) - start - 1)
        return whole({"text": "x", "output_ids": [found[0][0]], "meta_info": meta})

    def _sglang_events(
        self, text: Iterator[tuple[int, Place]], most: int, count: int
    ) -> Iterator[dict[str, Any]]:
        so_far: Text = []
        for token, place in text:
            so_far.append((token, place))
            reason = _reason(token, len(so_far), most)
            ended: dict[str, Any] = {"type": reason, "matched": token, "length": len(so_far)}
            meta: dict[str, Any] = {"finish_reason": ended if reason else None}
            if count:
                meta |= self._sglang_written(so_far, count)
            ids = [one for one, _ in so_far]
            yield {"text": "x", "output_ids": ids, "meta_info": meta}

    def _sglang_written(self, text: Text, count: int) -> dict[str, Any]:
        return {
            "output_token_logprobs": [[place.of(token), token, None] for token, place in text],
            "output_top_logprobs": [self._triples(place.top(count)) for _, place in text],
        }

    @staticmethod
    def _triples(top: list[tuple[int, float]]) -> list[list[Any]]:
        return [[number, token, None] for token, number in top]


def _reason(token: int, size: int, most: int) -> str | None:
    """Why a text ends behind this token."""
    if token in embedded().target.facts.eos_ids:
        return "stop"
    return "length" if size == most else None
