"""The real `openai` package against the endpoint, over loopback, and the cases of Open Responses
that concern text."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from moa.api.answer import AnswerEvent, Began, Counts, Cut, Ended, Piece, Scored, Verified
from tests.api.scripted import MODEL, PATIENCE, Script, Scripted, ended, says, served

MESSAGES = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def talking(
    script: Script, key: str = "key"
) -> AsyncIterator[tuple[Scripted, openai.AsyncOpenAI]]:
    async with (
        served(script, keys=["key"]) as (answerer, address),
        openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=PATIENCE
        ) as client,
    ):
        yield answerer, client


async def test_predictions_completions_and_models() -> None:
    async with talking(lambda ask: says("Hel", "lo")) as (answerer, client):
        likely: Any = {"messages": MESSAGES, "prediction": {"type": "content", "content": "likely"}}
        await client.chat.completions.create(model=MODEL, **likely)
        assert answerer.asks[0].question.prediction == "likely"
        text = await client.completions.create(
            model=MODEL, prompt=["a", "b"], max_tokens=5, stop="x"
        )
        assert [choice.text for choice in text.choices] == ["Hello", "Hello"]
        assert (answerer.asks[-1].max_tokens, answerer.asks[-1].stop) == (5, ("x",))
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


def scored() -> list[Any]:
    """ "hé!" by the target, whose second token is confirmed after it was sent."""
    first, second, third = (
        Scored(token, -0.5, ((token, -0.5), ("x", -2.0))) for token in ("h", "é", "!")
    )
    return [
        Began(),
        Piece("h", logprobs=(first,)),
        Piece("é", False),
        Verified(2, (second,)),
        Piece("!", logprobs=(third,)),
        ended("hé!"),
    ]


@pytest.mark.parametrize("mode", ["hold", "provisional", "keep"])
async def test_log_probabilities_of_a_chat(mode: str) -> None:
    async with talking(lambda ask: scored()) as (answerer, client):
        how: Any = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        how |= {"extra_body": {"moa": {"mode": mode}}}
        whole = (await client.chat.completions.create(**how)).choices[0].logprobs
        assert whole is not None
        content = whole.content or []
        assert [(one.token, one.logprob, bytes(one.bytes or ())) for one in content] == [
            ("h", -0.5, b"h"),
            ("é", -0.5, "é".encode()),
            ("!", -0.5, b"!"),
        ]
        assert [other.token for other in content[1].top_logprobs] == ["é", "x"]
        streamed = []
        async for chunk in await client.chat.completions.create(**how, stream=True):
            told = chunk.choices[0].logprobs
            streamed += (told.content or []) if told is not None else []
        assert streamed == content
        assert [ask.logprobs for ask in answerer.asks] == [2, 2]


async def test_log_probabilities_of_completions_and_responses() -> None:
    async with talking(lambda ask: scored()) as (answerer, client):
        told = (
            (await client.completions.create(model=MODEL, prompt="a", logprobs=2))
            .choices[0]
            .logprobs
        )
        assert told is not None
        assert (told.tokens, told.text_offset) == (["h", "é", "!"], [0, 1, 2])
        assert told.top_logprobs == [{one: -0.5, "x": -2.0} for one in ("h", "é", "!")]
        offsets = []
        async for chunk in await client.completions.create(
            model=MODEL, prompt="a", logprobs=0, stream=True
        ):
            offsets += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.text_offset) or []
        assert offsets == [0, 1, 2]
        answer = await client.responses.create(
            model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
        )
        part: Any = answer.output[0].content[0]  # type: ignore[union-attr]
        assert [(one.token, len(one.top_logprobs)) for one in part.logprobs] == [
            ("h", 2),
            ("é", 2),
            ("!", 2),
        ]
        assert [ask.logprobs for ask in answerer.asks] == [2, 0, 2]
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, top_logprobs=2)  # type: ignore[call-overload]


async def test_a_message_is_announced_without_the_log_probabilities_of_its_first_text() -> None:
    async with talking(lambda ask: scored()) as (_, client):
        announced: list[Any] = []
        told: list[Any] = []
        async for event in await client.responses.create(
            model=MODEL, input="hi", include=["message.output_text.logprobs"], stream=True
        ):
            match event.type:
                case "response.content_part.added":
                    announced += event.part.logprobs  # type: ignore[union-attr]
                case "response.output_text.delta":
                    told += [one.token for one in event.logprobs]
                case "response.output_text.done":
                    assert [one.token for one in event.logprobs] == told
        assert not announced
        assert told == ["h", "é", "!"]


async def test_what_nobody_verified_is_counted_over_all_answers_of_a_request() -> None:
    """It was missing where there were several, and an agent took that for none."""
    counts = Counts(prompt_tokens=3, tokens=2, unverified=2)
    end = Ended(reason="eos", verified=False, text="Hello", counts=counts)
    async with talking(lambda ask: [Began(), Piece("Hello", False), end]) as (_, client):
        for count in (1, 3):
            chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=count)
            assert chat.usage is not None
            assert chat.usage.to_dict()["moa"]["unverified_tokens"] == 2 * count  # type: ignore[index]


# ---- responses


FIELDS = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
]
"""Every response of Open Responses has all of them, null or not."""


async def test_responses() -> None:
    async with talking(lambda ask: says("Hel", "lo")) as (answerer, client):
        answer = await client.responses.create(
            model=MODEL, input="hi", instructions="be kind", store=True
        )
        assert (answer.output_text, answer.status) == ("Hello", "completed")
        assert answer.usage is not None
        assert (
            answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens == 5
        )
        assert [name for name in FIELDS if name not in answer.to_dict()] == []
        (item,) = (one.to_dict() for one in answer.output)
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert item["content"] == [
            {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
        ]
        assert (answerer.asks[0].question.messages or ())[0] == {
            "role": "system",
            "content": "be kind",
        }
        assert (answer.to_dict()["store"], answer.background) == (False, False), (
            "nothing is kept, whatever is asked"
        )
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        turns: Any = [
            {"role": role, "content": role} for role in ("system", "user", "assistant", "user")
        ]
        await client.responses.create(
            model=MODEL, input=[{"type": "message", **turn} for turn in turns]
        )
        assert list(answerer.asks[1].question.messages or ()) == turns


async def test_a_response_stream_tells_every_step() -> None:
    async with talking(lambda ask: says("Hel", "lo")) as (_, client):
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    assert events[-1].response.output_text == "Hello"  # type: ignore[union-attr]


async def test_a_response_says_what_the_device_wrote_alone_and_whether_all_is_verified() -> None:
    """Only chats said so."""
    end = ended("Hello", verified=False)
    script = [Began(), Piece("Hel"), Piece("lo", False), end]
    async with talking(lambda ask: script) as (_, client):
        how: Any = {"model": MODEL, "input": "hi", "extra_body": {"moa": {"mode": "keep"}}}
        whole = (await client.responses.create(**how)).to_dict()
        events = [
            event.to_dict() async for event in await client.responses.create(**how, stream=True)
        ]
    assert whole["moa"] == {"reason": end.reason, "verified": False}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [delta.get("moa") for delta in deltas] == [None, {"unverified": True}]
    assert "moa" not in events[0]["response"]  # type: ignore[operator]
    assert events[-1]["response"]["moa"] == whole["moa"]  # type: ignore[index]


async def test_thinking_is_an_item_of_its_own_and_not_said_again() -> None:
    async with talking(lambda ask: says("<think>h", "mm</th", "ink>\n\n4", "2")) as (
        answerer,
        client,
    ):
        async with client.responses.stream(model=MODEL, input="hi") as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_response()
        assert (
            kinds.count("response.output_item.done")
            == kinds.count("response.output_item.added")
            == 2
        )
        assert kinds.index("response.reasoning_text.done") < kinds.index(
            "response.output_text.delta"
        )
        reasoning, message = answer.output
        assert (reasoning.type, reasoning.status, message.type) == (
            "reasoning",
            "completed",
            "message",
        )
        assert reasoning.content is not None
        assert (reasoning.content[0].text, answer.output_text) == ("hmm", "42")
        given: Any = [
            {"role": "user", "content": "hi"},
            *(item.to_dict() for item in answer.output),
        ]
        await client.responses.create(
            model=MODEL, input=[*given, {"role": "user", "content": "and?"}]
        )
        assert [m["content"] for m in answerer.asks[1].question.messages or ()] == [
            "hi",
            "42",
            "and?",
        ]


@pytest.mark.parametrize(
    "script",
    [
        [
            Began(),
            Piece("<think>ab</think>c", verified=False),
            Cut(8),
            Piece("d</think>e"),
            ended("<think>ad</think>e"),
        ],
        [
            Began(),
            Piece("word", verified=False),
            Cut(0),
            Piece("<think>ad</think>e"),
            ended("<think>ad</think>e"),
        ],
    ],
)
async def test_a_response_whose_thinking_is_corrected(script: list[AnswerEvent]) -> None:
    async with talking(lambda ask: script) as (_, client):
        texts = {"output_text": "", "reasoning_text": ""}
        stream = await client.responses.create(
            model=MODEL, input="hi", stream=True, extra_body={"moa": {"mode": "provisional"}}
        )
        async for event in stream:
            name = event.type.removeprefix("moa:").removeprefix("response.")
            kind, _, what = name.partition(".")
            if what == "revised":
                texts[kind] = texts[kind][: event.model_extra["cut"]]  # type: ignore[index]
            elif what == "delta":
                texts[kind] += event.delta  # type: ignore[union-attr]
    assert texts == {"output_text": "e", "reasoning_text": "ad"}
    final = event.response  # type: ignore[union-attr]
    assert {item.type: item.content[0].text for item in final.output} == {
        "message": "e",
        "reasoning": "ad",
    }
