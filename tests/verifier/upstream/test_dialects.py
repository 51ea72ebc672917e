"""Requests and answers of each kind of engine, as recorded or documented."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cloud_verifier.upstream.client import address_of
from cloud_verifier.upstream.contract import Continuation, Piece, UpstreamError
from cloud_verifier.upstream.dialects import DIALECTS, dialect
from cloud_verifier.upstream.lines import bounded_lines
from moa.errors import UsageError
from moa.sampling import SamplingSettings
from moa.wire.messages import ChatMessage

ASKED = [ChatMessage("system", "Be brief."), ChatMessage("user", "a b")]
GREEDY = Continuation(
    ids=[1, 2], text="a b", sampling=SamplingSettings(), most=7, messages=ASKED, way="anew"
)


def lines(*events: Any) -> AsyncIterator[str]:
    """Events as lines."""

    async def told() -> AsyncIterator[str]:
        for event in events:
            yield event if isinstance(event, str) else f"data: {json.dumps(event)}"
            yield ""

    return told()


async def pieces(name: str, *events: Any) -> list[Piece]:
    return [piece async for piece in dialect(name).pieces(lines(*events))]


async def test_llama_server() -> None:
    """As llama.cpp's server wrote it, with `return_tokens`, fields left out that are not read."""
    assert await pieces(
        "llama-server",
        {"index": 0, "content": " Paris", "tokens": [12095], "stop": False, "tokens_predicted": 1},
        {"index": 0, "content": ".", "tokens": [13], "stop": False, "tokens_predicted": 2},
        {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "truncated": False},
    ) == [Piece(ids=(12095,)), Piece(ids=(13,)), Piece(ending="eos")]


async def test_vllm_tells_token_ids() -> None:
    first = {"index": 0, "text": " Paris", "finish_reason": None, "token_ids": [12095]}
    last = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": [151645]}
    assert await pieces("vllm", {"choices": [first]}, {"choices": [last]}, "data: [DONE]") == [
        Piece(ids=(12095,)),
        Piece(ids=(151645,), ending="eos"),
    ]
    with pytest.raises(UpstreamError, match="tells no token ids") as error:
        await pieces("vllm", {"choices": [{"text": " Paris", "finish_reason": None}]})
    assert not error.value.later


@pytest.mark.parametrize("incremental", [False, True])
async def test_sglang_tells_all_ids_or_the_new_ones(incremental: bool) -> None:
    told = [[5], [6], [7]] if incremental else [[5], [5, 6], [5, 6, 7]]
    reasons = [None, None, {"type": "stop", "matched": 7}]
    events = [
        {"output_ids": ids, "meta_info": {"finish_reason": reason}}
        for ids, reason in zip(told, reasons, strict=True)
    ]
    assert await pieces("sglang", *events, "data: [DONE]") == [
        Piece(ids=(5,)),
        Piece(ids=(6,)),
        Piece(ids=(7,), ending="eos"),
    ]


async def test_ollama_writes_an_object_a_line() -> None:
    assert await pieces(
        "ollama",
        '{"model":"m","response":" Paris","done":false}',
        '{"model":"m","response":"","done":true,"done_reason":"length"}',
    ) == [Piece(text=" Paris"), Piece(ending="length")]


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_nothing_of_an_engines_own_sampling_is_left(name: str) -> None:
    """Greedy is greedy, and the prompt's tokens or text go as they are."""
    body = json.loads(json.dumps(dialect(name).body(GREEDY, "big")))
    said = json.dumps(body)
    if dialect(name).takes == "chat":
        assert body["messages"][-1] == {"role": "user", "content": "a b"}
        assert said.count("Be brief.") == 1
    else:
        assert ([1, 2] in body.values()) or body["prompt"] == "a b"
        assert '"top_p": 1.0' in said  # an engine's own default may be another; a service's is not
    assert '"temperature": 0.0' in said
    assert any(
        f'"{key}": 7' in said
        for key in ("n_predict", "max_tokens", "max_new_tokens", "num_predict")
    )


def test_auto_goes_by_who_owns_the_models() -> None:
    assert dialect("auto", "llamacpp").name == "llama-server"
    assert dialect("auto", "vllm").name == "vllm"
    assert dialect("auto", "moa-edge").name == "completions"
    assert dialect("auto", "system", "api.openai.com").name == "chat-whole"
    assert dialect("auto", "", "api.anthropic.com").name == "anthropic"
    assert dialect("auto", "", "api.mistral.ai").name == "chat-prefix"
    with pytest.raises(UsageError, match="unknown interface"):
        dialect("telepathy")


def test_addresses() -> None:
    assert address_of("gpu:8000") == "http://gpu:8000/v1"
    assert address_of("https://api.example/openai/v1/") == "https://api.example/openai/v1"
    for wrong in ("ftp://x", "http://", "http://me:secret@gpu/v1", "http://gpu/v1?key=1"):
        with pytest.raises(UsageError):
            address_of(wrong)


async def test_lines_are_the_same_wherever_the_body_is_cut() -> None:
    body = "data: é字🙂\r\n\r\ndata: end".encode()

    async def cut(size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    for size in range(1, len(body) + 1):
        assert [line async for line in bounded_lines(cut(size))] == ["data: é字🙂", "", "data: end"]
