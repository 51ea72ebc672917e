"""No request that the parser accepts becomes a message that the wire refuses: it would cut every
user's link."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cloud_verifier.openai.answerer import session_for
from edge_client import ClientSettings
from edge_client.serve.answerer import changes_of
from moa.api.answer import AnswerRequest, Encoded
from moa.api.completions import parse_chat, parse_completion
from moa.api.encoding import answer_limit, encoded
from moa.api.errors import ApiError, from_error
from moa.api.requests import Defaults
from moa.api.responses import parse_response
from moa.errors import MoaError
from moa.wire import ClientSession, decode_client, encode
from moa.wire.codec import check
from moa.wire.limits import Limits
from moa.wire.messages import Open
from moa.wire_sampling import wire_sampling

VOCABULARY = 4096
IDS = [1, 2, 3]
TEXT = st.text(max_size=140) | st.sampled_from(["é" * 64, "é" * 65, "x" * 128, "x" * 129])
NUMBER = st.integers(-(2**65), 2**65) | st.integers(-3, 30) | st.floats() | st.floats(-1, 11)


class Reader:
    """A tokenizer and chat template: a token for each character, and what they were given."""

    template = ""

    def __init__(self) -> None:
        self.characters = 0

    def chat(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> str:
        return json.dumps([*messages, template])

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return [1] * len(text)

    plain = encode


MANY = {"enum": list(range(100_000))}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": MANY}}}}]


VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "seed", "top_k"), NUMBER
    ),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "top_logprobs"), NUMBER
    ),
    "stop": TEXT | st.lists(TEXT, max_size=10),
    "n": st.integers(0, 3),
    "logprobs": st.booleans() | st.integers(-1, 21),
    "response_format": st.sampled_from(
        [{"type": "json_object"}, {"type": "regex", "pattern": "a" * 70_000}]
    ),
    "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
    "include": st.just(["message.output_text.logprobs"]),
    "ignore_eos": st.booleans(),
    "moa": st.fixed_dictionaries({}, optional={"patience": NUMBER}),
}
FEW = st.lists(
    st.sampled_from(sorted(VALUES)), unique=True, max_size=2
)  # of many, one is nearly always refused
FIELDS = FEW.flatmap(lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names}))


def asks_of(fields: dict[str, Any], prompt: dict[str, Any]) -> Sequence[AnswerRequest]:
    """The requests that a route's parser makes of these fields; none if they are refused."""
    body = json.dumps({"model": "m", **prompt, **fields}).encode()
    try:
        if "input" in prompt:
            return parse_response(body, Defaults(), "me").asks
        return (parse_chat if "messages" in prompt else parse_completion)(
            body, Defaults(), "me"
        ).asks
    except ApiError as error:
        assert error.status == 400  # noqa: PT017
        return ()


HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def accepted(fields: dict[str, Any]) -> list[AnswerRequest]:
    """The requests that all routes make of these fields."""
    return [
        ask
        for prompt in (HELLO, {"prompt": "hi"}, {"input": "hi"})
        for ask in asks_of(fields, prompt)
    ]


def read(ask: AnswerRequest, context: int = 1792) -> Encoded | None:
    """The question in tokens; None if it is refused."""
    try:
        return asyncio.run(
            encoded(Reader(), ask, context=context, vocabulary=VOCABULARY, longest=10)
        )
    except MoaError as error:
        assert from_error(error).status == 400  # noqa: PT017
    return None


def devices_session(ask: AnswerRequest, made: Encoded) -> ClientSession:
    """A session as a conversation on the device begins it."""
    turn = dataclasses.replace(ClientSettings(), **changes_of(ask, answer_limit(ask, 1024)))
    return ClientSession(
        IDS,
        max_new_tokens=turn.max_new_tokens,
        sampling=wire_sampling(turn.sampling)[0],
        stop=list(turn.stop),
        ignore_eos=turn.ignore_eos,
        logprobs=turn.logprobs,
        grammar=made.grammar,
    )


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(FIELDS)
@example({"stop": "x" * 129})
@example({"top_k": -1, "temperature": 1e-6})
@example({"response_format": {"type": "json_object"}, "ignore_eos": True})
@example({"tools": [{"type": "function", "function": {"name": "f"}}], "ignore_eos": True})
def test_what_is_accepted_can_be_sent(fields: dict[str, Any]) -> None:
    for ask in accepted(fields):
        if (made := read(ask)) is None:
            continue
        for session in (session_for(ask, made, Limits()), devices_session(ask, made)):
            message = decode_client(encode(session.open()))
            assert isinstance(message, Open)
            check(message, Limits(), VOCABULARY)


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": MANY}}}, 1792),
        ({"response_format": {"type": "regex", "pattern": "a" * 70_000}}, 1792),
        ({"tools": TOOLS, "tool_choice": "required"}, 1792),
        ({"tools": TOOLS, "tool_choice": "required"}, 2**20),
        ({"tools": TOOLS}, 1792),  # left out
    ],
)
async def test_structure_that_no_wire_carries_is_refused_and_what_cannot_fit_unread(
    fields: dict[str, Any], context: int
) -> None:
    (ask,) = asks_of(fields, HELLO)
    reader = Reader()
    reading = encoded(reader, ask, context=context, vocabulary=VOCABULARY, longest=10)
    if fields == {"tools": TOOLS}:
        assert (await reading).grammar is None
        assert reader.characters > 0
    else:
        with pytest.raises(MoaError) as refused:
            await reading
        assert from_error(refused.value).status == 400
    assert reader.characters <= context


def test_each_route_accepts_the_limits_themselves() -> None:
    assert len(accepted({"stop": ["x" * 128] * 8, "seed": 2**63 - 1, "temperature": 2})) == 3
    for stop in (["é" * 65], "x" * 129, ["x"] * 9):
        assert not any(ask.stop for ask in accepted({"stop": stop}))  # responses have none
    assert not accepted({"temperature": 3})
