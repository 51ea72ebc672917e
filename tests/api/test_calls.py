"""Calls in what a model writes freely: found in every style, in pieces of any size, and nothing else
taken for one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moa.api.calls import CallReader, WrittenCall
from moa.api.parts import Separator
from moa.api.present import Show
from moa.api.tools import Function, Tool, Tools

NAMES = ("find_flight", "clock")
READER = CallReader(NAMES)
FLIGHT = {"to": 'Lisbon "{"', "day": "2026-12-03"}
FLIGHT_CALL = WrittenCall("find_flight", json.dumps(FLIGHT))
CLOCK_CALL = WrittenCall("clock", "{}")
OBJECT: dict[str, Any] = {"name": "find_flight", "arguments": FLIGHT}
CLOCK: dict[str, Any] = {"name": "clock", "parameters": {}}


def fenced(*objects: Any, kind: str = "json") -> str:
    """As Qwen2.5-Coder writes a call in words of its own."""
    texts = "\n".join(json.dumps(one, indent=2) for one in objects)
    return f"```{kind}\n{texts}\n```"


def marked(value: Any) -> str:
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


def in_pieces(
    text: str, sizes: Sequence[int] = (1,), reader: CallReader | None = None
) -> tuple[str, list[WrittenCall]]:
    """What a client has of a text that comes in pieces: nothing is ever taken back."""
    separator = Separator(reader=reader or CallReader(NAMES))
    shown = ""
    calls: list[WrittenCall] = []
    place = 0
    number = 0
    while place < len(text):
        size = sizes[number % len(sizes)]
        piece = text[place : place + size]
        place += size
        number += 1
        _, answer = separator.take(Show(piece, min(place, len(text))))
        assert answer.cut is None
        shown += answer.text
        assert answer.verified == len(shown)
        assert separator.calls[: len(calls)] == calls
        calls = separator.calls
    _, answer = separator.take(None, last=True)
    assert answer.cut is None
    assert separator.calls[: len(calls)] == calls
    return shown + answer.text, separator.calls


FOUND = {
    "in a fence": (fenced(OBJECT), ""),
    "in a fence of no kind": (fenced(OBJECT, kind=""), ""),
    "in a fence of a call": (fenced(OBJECT, kind="tool_call"), ""),
    "in an indented fence": (f"1. It:\n   {fenced(OBJECT)}\n", "1. It:\n   "),
    "bare": (json.dumps(OBJECT), ""),
    "behind space": ("\n " + json.dumps(OBJECT), ""),
    "with parameters": (json.dumps({"name": "find_flight", "parameters": FLIGHT}), ""),
    "with its arguments first": (json.dumps({"arguments": FLIGHT, "name": "find_flight"}), ""),
    "with arguments as a text": (json.dumps(OBJECT | {"arguments": json.dumps(FLIGHT)}), ""),
    "as OpenAI's": (json.dumps({"id": "1", "type": "function", "function": OBJECT}), ""),
    "in a mark": (marked(OBJECT), ""),
    "in another mark": (f"[TOOL_CALLS] [{json.dumps(OBJECT)}]", ""),
    "in a list": (f"[{json.dumps(OBJECT)}]", ""),
    "a fence behind words": (f"Let me look.\n\n{fenced(OBJECT)}", "Let me look.\n\n"),
    "a mark behind words": (f"Let me look.\n{marked(OBJECT)}", "Let me look.\n"),
    "another mark behind words": (f"I look: [TOOL_CALLS] [{json.dumps(OBJECT)}]", "I look: "),
    "behind code": (
        f"```python\nprint(1)\n```\nNow:\n{fenced(OBJECT)}",
        "```python\nprint(1)\n```\nNow:\n",
    ),
    "before words": (f"{fenced(OBJECT)}\n\nThen I book it.", "Then I book it."),
    "with more in its fence": (f"```json\n{json.dumps(OBJECT)}\nso\n```", "so\n```"),
}
"""Texts with the one call, and what else they say."""


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("how", FOUND)
def test_a_call_is_found_however_it_is_written(how: str, size: int) -> None:
    text, said = FOUND[how]
    assert in_pieces(text, [size]) == (said, [FLIGHT_CALL])


@pytest.mark.parametrize(
    "text",
    [
        fenced(OBJECT, CLOCK),
        fenced([OBJECT, CLOCK]),
        f"{fenced(OBJECT)}\n\n{fenced(CLOCK)}",
        f"{fenced(OBJECT)}\n{marked(CLOCK)}",
        f"{marked(OBJECT)}\n{fenced(CLOCK)}",
        f"{json.dumps(OBJECT)}; {json.dumps(CLOCK)}",
        json.dumps({"tool_calls": [{"function": OBJECT}, {"function": CLOCK}]}),
    ],
)
def test_several_calls_are_found_or_the_first_alone(text: str) -> None:
    assert in_pieces(text) == ("", [FLIGHT_CALL, CLOCK_CALL])
    one = CallReader(NAMES, parallel=False)
    assert one.split(f"{text}\nBoth.") == ("Both.", [FLIGHT_CALL])


@pytest.mark.parametrize(
    "text",
    [
        "It is warm.",
        "",
        "``",
        '```json\n{"name": "Ada", "born": 1815}\n```',
        '```json\n{"name": "Ada", "arguments": {"born": 1815}}\n```',
        '{"name": "clock", "price": 3}',
        '{"name": "clock"}',
        '{"name": "clock", "arguments": [1]}',
        '{"name": "clock", "arguments": {}, "why": "to know"}',
        '{"name": "clock", "arguments": {"a" 1}}',
        '{"name": "clock", "arguments": {"a": 1',
        "[1] is a footnote, {this} is none.",
        "[TODO]",
        "<tool_call> is Qwen's mark.",
        f"```python\ncall = {json.dumps(OBJECT)}\n```",
        f"The call is ```{json.dumps(OBJECT)}``` here.",
        f"The call is {json.dumps(OBJECT)}.",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert in_pieces(text) == (text, [])


@pytest.mark.parametrize(
    ("begun", "shown"),
    [
        ("```", ""),
        ("```js", ""),
        ("```p", "```p"),
        ("```json\n", ""),
        ("```json\n[1", "```json\n[1"),
        ('```json\n{"na', ""),
        ('```json\n{"no', '```json\n{"no'),
        ('{"name": "Ad', '{"name": "Ad'),
        ('{"name": "clo', ""),
        ('{"name": "clock", "pri', '{"name": "clock", "pri'),
        ('{"name": "clock", "arguments": "no', ""),
        ('{"name": "clock", "arguments": 3', '{"name": "clock", "arguments": 3'),
        ("It is `", "It is "),
        ("It is `x", "It is `x"),
        ("It is <tool", "It is "),
        ("It is <b", "It is <b"),
    ],
)
def test_text_is_held_back_only_while_it_may_become_a_call(begun: str, shown: str) -> None:
    assert READER.split(begun, last=False) == (shown, [])
    assert READER.split(begun) == (begun, [])


def test_what_is_held_back_is_bounded_beside_the_arguments_of_a_call() -> None:
    long = "x" * 2**15
    of_a_call = f'{{"name": "clock", "arguments": {{"text": "{long}'
    assert READER.split(of_a_call, last=False) == ("", [])
    perhaps = f'{{"arguments": {{"text": "{long}'
    assert READER.split(perhaps[:100], last=False) == ("", [])
    assert READER.split(perhaps, last=False) == (perhaps, [])
    whole = perhaps + '"}, "name": "clock"}'
    assert READER.split(whole) == (whole, []), "what was shown stays text"


PARTS = (
    "```",
    "json",
    "python",
    "\n",
    " ",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    "`",
    "<",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    '"name"',
    '"clock"',
    '"arguments"',
    ": ",
    "{}",
    "\\u00e9",
    "-",
    "1.5e3",
    "true",
    "word",
    json.dumps(CLOCK),
    json.dumps(OBJECT, indent=1),
    fenced(OBJECT),
    '{"arguments": ',
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_pieces_of_any_text_give_what_the_whole_gives(text: str, sizes: list[int]) -> None:
    assert in_pieces(text, sizes) == CallReader(NAMES).split(text)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from(PARTS), st.floats(0, 1), st.booleans(), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_withdrawn_its_client_has_what_the_whole_gives(changes: list[Any]) -> None:
    separator = Separator(reader=CallReader(NAMES))
    text = shown = ""
    verified = 0
    for number, (added, where, cuts, verifies) in enumerate(changes):
        cut = None
        if cuts:
            cut = verified + int(where * (len(text) - verified))
        text = text[:cut] + added
        if verifies:
            verified = len(text)
        last = number == len(changes) - 1
        _, answer = separator.take(Show(added, verified, cut), last=last)
        assert answer.cut is None or cuts, "what only grows takes nothing back"
        shown = shown[: answer.cut] + answer.text
        assert answer.verified <= len(shown)
        certain = shown[: answer.verified]
        assert CallReader(NAMES).split(text[:verified], last=False)[0] == certain or last
    assert (shown, separator.calls) == CallReader(NAMES).split(text)


def test_what_a_withdrawn_text_decided_is_open_again() -> None:
    separator = Separator(reader=CallReader(NAMES))
    shown = separator.take(Show("```", 3))[1].text
    shown += separator.take(Show("python", 3))[1].text
    assert shown == "```python"
    _, answer = separator.take(Show(f"json\n{json.dumps(OBJECT)}\n```", 3, cut=3), last=True)
    assert shown[: answer.cut] + answer.text == ""
    assert separator.calls == [FLIGHT_CALL]


def test_a_long_answer_in_small_pieces_is_read_once() -> None:
    """Read from its beginning with each piece it takes twenty seconds."""
    fences = f"{fenced({'name': 'Ada', 'born': [1815]})}\n```python\nprint(1)\n```\n"
    began = time.process_time()
    assert in_pieces(200 * fences, [4]) == (200 * fences, [])
    assert time.process_time() - began < 5


_STRICT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form", ["```json\n{}\n```", "{}", "[TOOL_CALLS] {}", "Yes.\n```\n{}\n```\n"]
)
@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"city": "Rome", "days": 3}, True),
        ({"city": "Rome", "days": 30}, False),
        ({"city": "Rome", "days": "3"}, False),
        ({"city": "Rome"}, False),
        ({"city": "Rome", "days": 3, "unit": "C"}, False),
        ({}, False),
    ],
)
def test_a_call_that_breaks_the_promise_of_strict_is_text(
    form: str, arguments: dict[str, Any], fits: bool
) -> None:
    """A program that asked for `strict` does not look whether a key is there."""
    call = json.dumps({"name": "weather", "arguments": arguments})
    text = form.replace("{}", call)
    reader = CallReader(["weather"], strict={"weather": _STRICT})
    said, calls = reader.split(text)
    if fits:
        assert [json.loads(one.arguments) for one in calls] == [arguments]
        assert call not in said
    else:
        assert (said, calls) == (text, [])
    assert in_pieces(text, [3], CallReader(["weather"], strict={"weather": _STRICT})) == (
        said,
        calls,
    )
    assert CallReader(["weather"]).split(text)[1], "without strict it is a call"


def test_in_a_fence_a_schema_that_is_not_understood_gives_no_call() -> None:
    """Elsewhere the model's grammar may have held it, which understands more."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^R"}}}
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    reader = CallReader(["weather"], strict={"weather": schema})
    assert reader.split(f"```json\n{call}\n```")[1] == []
    behind = f"```json\n{json.dumps(CLOCK)}\n{call}\n```"
    both = CallReader(["weather", "clock"], strict={"weather": schema})
    assert both.split(behind)[1] == [CLOCK_CALL]
    assert len(reader.split(f"<tool_call>\n{call}\n</tool_call>")[1]) == 1


def test_a_strict_function_takes_no_property_that_it_does_not_list() -> None:
    tools = Tools(
        (
            Tool(Function("strict", parameters={"properties": {"a": {}}}, strict=True)),
            Tool(Function("free", parameters={"properties": {"a": {}}})),
        )
    )
    calls = [
        f'```\n{{"name": "{name}", "arguments": {{"b": 1}}}}\n```' for name in ("strict", "free")
    ]
    assert [len(tools.reader().split(call)[1]) for call in calls] == [0, 1]
