"""Answers that must match a grammar: passed on where a service can, and checked here in any case."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_verifier.upstream.contract import Continuation
from cloud_verifier.upstream.dialects import dialect
from cloud_verifier.upstream.json_style import JsonStyle
from moa.grammar.spec import Grammar
from moa.sampling import SamplingSettings
from moa.wire.messages import ChatMessage
from tests.verifier.upstream.scripted import running
from tests.verifier.upstream.test_chats import Service, answer, device

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.of_schema(SCHEMA)
PERSON = {"name": 'Ada, {"A"}: x', "age": 36}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab",:\\{}[] é', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='a":\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(
    value=VALUES,
    indent=st.sampled_from([None, 2]),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")]),
    cuts=st.lists(st.integers(0, 80), max_size=8),
    fenced=st.booleans(),
)
def test_json_of_any_style_becomes_ours(
    value: Any, indent: int | None, separators: tuple[str, str], cuts: list[int], fenced: bool
) -> None:
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=False)
    text = f"```json\n{text}" if fenced else text
    style = JsonStyle()
    told = ""
    begun = 0
    for at in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        told += style.add(text[begun:at])
        begun = at
    assert told == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(PERSON, separators=(",", ":")),
        json.dumps(PERSON, indent=2),
        f"```json\n{json.dumps(PERSON, indent=2)}\n```",
        f"{json.dumps(PERSON)} That is the person you asked for.",
    ],
    ids=["compact", "indented", "fenced", "with more behind it"],
)
async def test_json_is_asked_for_checked_and_verified(written: str) -> None:
    service = Service(answer=written)
    async with running(service) as upstream, device(upstream, "chat-whole") as client:
        done = await answer(client, grammar=GRAMMAR)
    assert done.verified
    assert done.text == json.dumps(PERSON)
    assert service.asked[0]["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.parametrize("written", ["Her name is Ada.", '{"name": "Ada", "height": 170}'])
async def test_what_the_grammar_forbids_is_not_verified(written: str) -> None:
    """The device goes on alone, within the grammar."""
    service = Service(answer=written)
    async with running(service) as upstream, device(upstream, "chat-whole") as client:
        done = await answer(client, grammar=GRAMMAR, max_new_tokens=200)
    assert not done.verified
    assert len(service.asked) < 6  # it is not asked for ever
    if done.reason == "eos":
        assert set(json.loads(done.text)) == {"name", "age"}


async def test_a_cut_json_goes_on() -> None:
    service = Service(answer=json.dumps(PERSON, indent=2), cuts=[4])
    async with running(service) as upstream, device(upstream, "chat-whole") as client:
        done = await answer(client, grammar=GRAMMAR)
    assert done.verified
    assert json.loads(done.text) == PERSON


async def test_a_refused_format_is_left_out() -> None:
    refuses = {"response_format": "response_format is not supported"}
    service = Service(answer=json.dumps(PERSON), refuses=refuses)
    async with running(service) as upstream, device(upstream, "chat") as client:
        done = await answer(client, grammar=GRAMMAR)
    assert done.verified
    assert json.loads(done.text) == PERSON


async def test_a_regular_expression_is_checked_here() -> None:
    for written, verified in (("yes", True), ("no", True), ("perhaps", False)):
        async with (
            running(Service(answer=written)) as upstream,
            device(upstream, "chat-whole") as client,
        ):
            done = await answer(client, grammar=Grammar("regex", "yes|no"))
        assert done.verified == verified
        assert done.text in ("yes", "no")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("llama-server", ["json_schema"]),
        ("vllm", ["structured_outputs", "json"]),
        ("sglang", ["sampling_params", "json_schema"]),
        ("ollama", ["format"]),
        ("chat", ["response_format", "json_schema", "schema"]),
    ],
)
def test_engines_are_told_a_schema_for_an_answer_from_its_beginning(
    name: str, place: list[str]
) -> None:
    for begun in ("", '{"name": '):
        asked = Continuation(
            ids=[1],
            text="a",
            sampling=SamplingSettings(),
            most=7,
            messages=[ChatMessage("user", "a")],
            begun=begun,
            grammar=GRAMMAR,
        )
        found: Any = dialect(name).body(asked, "big")
        for key in place:
            found = found.get(key) if isinstance(found, dict) else None
        found = json.loads(found) if isinstance(found, str) else found
        assert found == (None if begun else SCHEMA)
