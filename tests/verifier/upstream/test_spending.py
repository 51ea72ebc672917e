"""A budget of money: counted as the upstream tells, else as we count, and its end is said."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cloud_verifier.settings import Settings
from cloud_verifier.upstream import client
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import Continuation, Piece, UpstreamError, Usage
from cloud_verifier.upstream.spending import Prices, Spending, in_words
from edge_client import EdgeClient
from moa.errors import ConfigError
from moa.sampling import SamplingSettings
from tests.verifier.upstream.scripted import Request, chunk, end_of, running, stream
from tests.verifier.upstream.test_dialects import pieces

DAY = 24 * 3600.0
TEXT = " The upstream says this."


class Clock:
    """Time that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_money_of_the_last_day() -> None:
    clock = Clock()
    spending = Spending(Prices(read=1.0, written=10.0, budget=0.5), clock)
    request = spending.request(100_000)
    assert spending.spent == pytest.approx(0.1)
    request.wrote(20_000)
    assert spending.spent == pytest.approx(0.3)
    request.told(Usage(read=200_000, written=10_000))  # another tokenizer, or a cache
    assert spending.spent == pytest.approx(0.3)
    spending.check()
    clock.now += DAY / 2
    spending.request(200_000)
    with pytest.raises(UpstreamError, match=r"budget of 0.50 .* is spent \(0.50\): more from 12.0"):
        spending.check()
    clock.now += DAY / 2
    assert spending.spent == pytest.approx(0.2)
    spending.check()


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0.0, "0.00"),
        (0.000_8, "0.0008"),
        (0.000_001_234, "0.0000012"),
        (0.05, "0.05"),
        (0.25, "0.25"),
        (3.0, "3.00"),
        (1234.567, "1234.57"),
    ],
)
def test_money_is_told_with_as_many_digits_as_it_takes(amount: float, words: str) -> None:
    assert in_words(amount) == words


def test_without_a_budget_nothing_is_over() -> None:
    spending = Spending(Prices(read=1.0))
    spending.request(10**9)
    spending.check()


async def test_usage_as_each_engine_tells_it() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    expected = Usage(read=5, written=3)

    async def last(name: str, *events: Any) -> Piece:
        return (await pieces(name, *events))[-1]

    done = {"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]}
    for name in ("completions", "vllm", "chat"):
        assert (await last(name, done, {"choices": [], "usage": usage})).usage == expected
    told = {"stop": True, "stop_type": "eos", "tokens_evaluated": 5, "tokens_predicted": 3}
    assert (await last("llama-server", told)).usage == expected
    meta = usage | {"finish_reason": {"type": "length"}}
    assert (await last("sglang", {"output_ids": [1], "meta_info": meta})).usage == expected
    told = {"response": "", "done": True, "prompt_eval_count": 5, "eval_count": 3}
    assert (await last("ollama", json.dumps(told))).usage == expected
    began = {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 5, "output_tokens": 1}},
    }
    ended = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}
    assert (await last("anthropic", began, ended)).usage == expected
    for wrong in (None, 7, {}, {"prompt_tokens": -1, "completion_tokens": 3}, {"prompt_tokens": 1}):
        assert all(
            one.usage is None for one in await pieces("completions", done | {"usage": wrong})
        )


async def test_an_end_is_told_before_its_count_and_no_body_is_waited_for_behind_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that hears nothing for a second goes on by itself."""
    monkeypatch.setattr(client, "_USAGE_SECONDS", 300.0)
    over = asyncio.Event()
    end = {"choices": [{"text": " it", "finish_reason": "stop"}]}
    counted = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await stream(end)(request, writer)
        await writer.drain()
        await over.wait()
        writer.write(f"data: {json.dumps(counted)}\n\n".encode())
        await writer.drain()
        await asyncio.Event().wait()  # the body never ends

    async with running(answer) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions")
        asked = Continuation(ids=[1], text="a", sampling=SamplingSettings(), most=8)
        async with asyncio.timeout(60):
            came = []
            async for piece in upstreams.go_on(asked):
                came.append(piece)
                if piece.is_complete:
                    over.set()
        await upstreams.close()
    assert came == [
        Piece(is_complete=True),
        Piece(text=" it", ending="eos", usage=Usage(read=5, written=3)),
    ]


class Paid:
    """A service that tells what it bills, if it is asked to."""

    def __init__(self, *, tells: bool) -> None:
        self.tells = tells
        self.requests = 0

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """One answer of two chunks."""
        self.requests += 1
        assert request.body["stream_options"] == {"include_usage": True}
        usage = {"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000}
        told = [{"choices": [], "usage": usage}] if self.tells else []
        await stream(chunk(TEXT), chunk("", "stop"), *told, "data: [DONE]\n\n")(request, writer)


@pytest.mark.parametrize("tells", [True, False])
async def test_an_answer_that_would_cost_too_much_is_the_devices(tells: bool) -> None:
    """The first answer uses the budget up, and is whole. The second is not asked for."""
    service = Paid(tells=tells)
    async with running(service.answer) as upstream:
        settings = Settings(
            port=0,
            upstream=(upstream.url,),
            upstream_api="completions",
            upstream_price_in=1.0,
            upstream_price_out=2.0,
            upstream_budget=3.0 if tells else 0.000_001,
        )
        async with (
            UpstreamVerifier(settings, upstreams_of(settings)).open() as front,
            EdgeClient(
                verifier=front.transport.url, settle_seconds=60, max_new_tokens=30
            ) as device,
        ):
            await device.wait_online(60)
            first, _ = await end_of(device)
            asked = service.requests
            second, said = await end_of(device)
        assert service.requests == asked
    if tells:
        assert first.verified
        assert first.text == TEXT
        assert asked == 1
    assert second.text
    assert not second.verified
    assert "budget" in said
    assert "is spent" in said


@pytest.mark.parametrize(
    "wrong",
    [
        {"upstream_budget": 5.0},
        {"upstream_budget": -1.0, "upstream_price_in": 1.0},
        {"upstream_price_in": float("nan")},
    ],
)
def test_money_that_cannot_be_counted_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--upstream-"):
        Settings(upstream=("gpu:8000",), **wrong)  # type: ignore[arg-type]
