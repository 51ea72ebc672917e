"""Requests and answers of each kind of engine, as recorded or documented."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import (
    Continuation,
    NotScoredError,
    Piece,
    Reading,
    UpstreamError,
)
from cloud_verifier.upstream.dialects import DIALECTS, dialect
from cloud_verifier.upstream.lines import bounded_lines
from moa.errors import UsageError
from moa.sampling import SamplingSettings
from moa.wire.messages import ChatMessage
from tests.verifier.upstream.scripted import running, whole

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


async def test_llama_server_tells_how_far_it_has_read() -> None:
    """As llama.cpp's server wrote it, with `return_progress`: the token in it is none."""
    began = {"index": 0, "content": "", "tokens": [0], "stop": False, "tokens_predicted": 0}
    told = {"total": 2060, "cache": 0, "processed": 512, "time_ms": 4000}
    nonsense: list[Any] = [7, {}, {"total": 9, "processed": "4"}, {"total": 4, "processed": 9}]
    found = await pieces(
        "llama-server", *[began | {"prompt_progress": one} for one in (told, *nonsense)]
    )
    assert [piece.reading for piece in found] == [Reading(512, 2060), None, None, None, None]
    assert not any(piece.is_answer for piece in found)
    assert dialect("llama-server").body(GREEDY, "big")["return_progress"] is True


async def test_vllm_tells_token_ids() -> None:
    first = {"index": 0, "text": " Paris", "finish_reason": None, "token_ids": [12095]}
    last = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": [151645]}
    assert await pieces("vllm", {"choices": [first]}, {"choices": [last]}, "data: [DONE]") == [
        Piece(ids=(12095,)),
        Piece(ids=(151645,), ending="eos"),
        Piece(ending="done"),
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
    for unknown in ("", "moa-edge", "a company"):
        assert dialect("auto", unknown).name == "chat"
    assert dialect("auto", "system", "api.openai.com").name == "chat-whole"
    assert dialect("auto", "", "api.anthropic.com").name == "anthropic"
    assert dialect("auto", "", "api.mistral.ai").name == "chat-prefix"
    with pytest.raises(UsageError, match="unknown interface 'openai'") as refused:
        dialect("openai")
    assert "one of auto, llama-server" in refused.value.hint
    assert "OpenAI's chats are chat-whole" in refused.value.hint


async def test_lines_are_the_same_wherever_the_body_is_cut() -> None:
    body = "data: é字🙂\r\n\r\ndata: end".encode()

    async def cut(size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    for size in range(1, len(body) + 1):
        assert [line async for line in bounded_lines(cut(size))] == ["data: é字🙂", "", "data: end"]


LOG = [5, 6, 7]
DRAFT = [8, 9]
ASKED_FOR_SCORES = Continuation(
    ids=LOG, text="", sampling=SamplingSettings(), most=7, draft=DRAFT, candidates=2
)


def scored(name: str, answer: Any) -> list[list[int]]:
    """The candidates of each place, the likeliest first."""
    places = dialect(name).scored(answer, ASKED_FOR_SCORES)
    return [[token for token, _ in place.likeliest] for place in places]


def test_sglang_scores_a_draft() -> None:
    """The answer is of the form of one published with sglang-jax's pull request 13: five tokens in,
    `logprob_start_len` 2, so the first entry is that of the log's last token, and is empty."""
    body = dialect("sglang").score_body(ASKED_FOR_SCORES, "big")
    assert body["input_ids"] == [5, 6, 7, 8, 9]
    assert body["logprob_start_len"] == 2
    assert body["top_logprobs_num"] == 2
    meta = {
        "id": "26223ea355df4c0ab45e5af04505ed67",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 5,
        "input_token_logprobs": [[None, 7, None], [-0.58203125, 8, None], [-3.53125, 9, None]],
        "output_token_logprobs": [[-0.73046875, 12095, None]],
        "input_top_logprobs": [
            None,
            [[-0.58203125, 8, None], [-2.140625, 3283, None]],
            [[-1.0390625, 279, None], [-3.53125, 9, None]],
        ],
        "output_top_logprobs": [[[-0.73046875, 12095, None], [-2.734375, 2130, None]]],
    }
    answer = {"text": " Paris", "output_ids": [12095], "meta_info": meta}
    assert scored("sglang", answer) == [[8, 3283], [279, 9], [12095, 2130]]
    meta["input_top_logprobs"] = [None]
    with pytest.raises(UpstreamError, match="other tokens"):
        scored("sglang", answer)


def test_vllm_scores_a_draft() -> None:
    """The fields of vLLM 0.32: the log's own places come first, the first of them empty; a token
    that is less likely than the candidates stands among them."""
    body = dialect("vllm").score_body(ASKED_FOR_SCORES, "big")
    assert body["prompt"] == [5, 6, 7, 8, 9]
    assert body["prompt_logprobs"] == 2
    assert body["stream"] is False

    def told(**likeliest: float) -> dict[str, Any]:
        return {
            name[1:]: {"logprob": number, "rank": rank, "decoded_token": "x"}
            for rank, (name, number) in enumerate(likeliest.items(), 1)
        }

    choice = {
        "index": 0,
        "text": " Paris",
        "logprobs": {
            "text_offset": [0],
            "token_logprobs": [-0.7],
            "tokens": ["token_id:12095"],
            "top_logprobs": [{"token_id:12095": -0.7, "token_id:2130": -2.7}],
        },
        "finish_reason": "length",
        "prompt_logprobs": [
            None,
            told(_6=-0.1, _1=-3.0),
            told(_7=-0.1, _1=-3.0),
            told(_8=-0.5, _3=-2.1),
            told(_9=-7.0, _279=-0.9, _4=-3.5),
        ],
    }
    answer = {"object": "text_completion", "choices": [choice]}
    assert scored("vllm", answer) == [[8, 3], [279, 4], [12095, 2130]]
    choice["prompt_logprobs"] = None
    with pytest.raises(UpstreamError, match="other tokens"):
        scored("vllm", answer)


def test_vllm_scored_a_draft_so() -> None:
    """Recorded of vLLM 0.32 on a CPU with Qwen2.5-Coder-0.5B-Instruct: "The capital of France is",
    and the draft " Paris."."""
    rows: list[dict[str, float] | None] = [
        None,
        {"6722": -9.58912181854248, "1990": -4.1203718185424805, "495": -4.1828718185424805},
        {"315": -0.22821851074695587, "3283": -2.1032185554504395},
        {"9625": -1.483762502670288, "279": -1.858762502670288},
        {"374": -0.1363091617822647, "11": -2.9488091468811035},
        {"12095": -0.0972861498594284, "7148": -4.284786224365234},
        {"13": -0.9582002758979797, "382": -1.083200216293335},
    ]
    prompt = [
        row
        and {token: {"logprob": one, "rank": 1, "decoded_token": "x"} for token, one in row.items()}
        for row in rows
    ]
    written = {
        "text_offset": [0],
        "token_logprobs": [-2.204374313354492],
        "tokens": ["token_id:12095"],
        "top_logprobs": [
            {"token_id:12095": -2.204374313354492, "token_id:576": -2.266874313354492}
        ],
    }
    answer = {
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": " Paris",
                "logprobs": written,
                "finish_reason": "length",
                "token_ids": [12095],
                "prompt_logprobs": prompt,
                "prompt_token_ids": [785, 6722, 315, 9625, 374, 12095, 13],
            }
        ],
    }
    asked = Continuation(
        ids=[785, 6722, 315, 9625, 374],
        text="",
        sampling=SamplingSettings(),
        most=7,
        draft=[12095, 13],
        candidates=2,
    )
    places = dialect("vllm").scored(answer, asked)
    assert [place.likeliest[0][0] for place in places] == [12095, 13, 12095]
    assert places[2].own == pytest.approx(-2.2043743)


@pytest.mark.parametrize(
    "wrong", [None, 7, [], [[None, 3, None]], [[5.0, 3, None]], [[-1.0, -3, None]], ["no"]]
)
def test_candidates_that_are_none_are_refused(wrong: Any) -> None:
    meta = {
        "input_top_logprobs": [None, wrong, wrong],
        "output_token_logprobs": [[-0.7, 1, None]],
        "output_top_logprobs": [[[-0.7, 1, None]]],
    }
    with pytest.raises(UpstreamError, match="candidates"):
        scored("sglang", {"meta_info": meta})


async def test_candidates_beside_a_stream() -> None:
    """As llama.cpp's server, SGLang and vLLM write them; SGLang those of all tokens so far."""
    probabilities = [
        {
            "id": 12095,
            "token": " Paris",
            "bytes": [32],
            "logprob": -0.0995979756116867,
            "top_logprobs": [
                {"id": 12095, "token": " Paris", "bytes": [32], "logprob": -0.0995979756116867},
                {"id": 7148, "token": " London", "bytes": [32], "logprob": -4.309314727783203},
            ],
        }
    ]
    (piece,) = await pieces(
        "llama-server",
        {"tokens": [12095], "stop": False, "completion_probabilities": probabilities},
    )
    assert [token for token, _ in piece.candidates[0].likeliest] == [12095, 7148]
    assert piece.candidates[0].own == pytest.approx(-0.0996, abs=1e-4)

    rows = [[[-1.83, 16, None], [-2.2, 6648, None]], [[-1.49, 13, None], [-1.87, 15, None]]]
    own = [[-1.83, 16, None], [-1.49, 13, None]]
    found = await pieces(
        "sglang",
        {
            "output_ids": [16],
            "meta_info": {"output_token_logprobs": own[:1], "output_top_logprobs": rows[:1]},
        },
        {
            "output_ids": [16, 13],
            "meta_info": {"output_token_logprobs": own, "output_top_logprobs": rows},
        },
    )
    assert [len(piece.candidates) for piece in found] == [1, 1]
    assert [token for token, _ in found[1].candidates[0].likeliest] == [13, 15]

    told = {
        "tokens": ["token_id:16"],
        "token_logprobs": [-9.0],
        "top_logprobs": [{"token_id:16": -9.0, "token_id:1": -0.2, "token_id:2": -1.2}],
    }
    (piece,) = await pieces(
        "vllm", {"choices": [{"text": "x", "token_ids": [16], "logprobs": told}]}
    )
    assert piece.candidates[0].own == -9.0
    assert piece.candidates[0].likeliest[0] == (1, -0.2)


async def test_an_engine_that_keeps_answering_without_scores_is_asked_to_write() -> None:
    """One such answer may be a login page of the network: it is asked again."""
    now = 0.0
    page = whole("<html>", "200 OK", "text/html")
    async with running(page, whole({"data": [{"id": "big", "owned_by": "vllm"}]})) as engine:
        upstreams = Upstreams([engine.url], interface="vllm", clock=lambda: now)
        await upstreams.probe()
        for _ in range(2):
            with pytest.raises(UpstreamError, match="not JSON"):
                await anext(upstreams.go_on(ASKED_FOR_SCORES))
            assert upstreams.abilities.scores
            now += 100.0
        with pytest.raises(NotScoredError):
            await anext(upstreams.go_on(ASKED_FOR_SCORES))
        assert not upstreams.abilities.scores
        await upstreams.close()
