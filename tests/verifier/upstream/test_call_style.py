"""Calls of tools as services write them become those that our grammars know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_verifier.upstream.call_style import CallStyle
from moa.api.tools import Function, Tool, ToolFormat, Tools, offered_calls
from moa.grammar.spec import Grammar

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    Tool(Function("temperature", parameters=CITY)),
    Tool(Function("clock", parameters={"type": "object", "properties": {}})),
)
PLAIN = ToolFormat.of("")
QWEN = ToolFormat.of("<tool_call>")
MISTRAL = ToolFormat.of("[TOOL_CALLS]")
ROME = {"city": 'Rome, "{"'}
CALL: dict[str, Any] = {"name": "temperature", "arguments": ROME}
IN_OPENAIS_WAY = {"name": "temperature", "arguments": json.dumps(ROME)}
WRITTEN = {
    "ours": json.dumps({"name": "temperature", "parameters": ROME}),
    "with arguments": json.dumps(CALL),
    "compact": json.dumps(CALL, separators=(",", ":")),
    "in a fence": f"```json\n{json.dumps(CALL, indent=2)}\n```",
    "in a mark": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "in a list": f"[{json.dumps(CALL)}]",
    "in another mark": f"[TOOL_CALLS] [{json.dumps(CALL)}]",
    "arguments as a text": json.dumps(IN_OPENAIS_WAY),
    "as a function": json.dumps({"type": "function", "function": IN_OPENAIS_WAY}),
    "as OpenAI's message": json.dumps({"tool_calls": [{"id": "1", "function": IN_OPENAIS_WAY}]}),
    "in another order": json.dumps({"arguments": ROME, "name": "temperature"}),
    "with words behind it": f"{json.dumps(CALL)}\nThis is {{the}} call.",
}


def style_of(
    form: ToolFormat, choice: str = "auto", *, parallel: bool = True, answer: Grammar | None = None
) -> CallStyle:
    """The style for a request with these tools."""
    grammar = form.grammar(Tools(TOOLS, choice, parallel), answer)
    assert grammar is not None
    offered = offered_calls(grammar)
    assert offered is not None
    assert offered.form.before == form.before
    return CallStyle(offered)


def styled(style: CallStyle, text: str, cuts: Sequence[int] = ()) -> str:
    """What comes out of a text in pieces."""
    told = ""
    begun = 0
    for at in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        told += style.add(text[begun:at])
        begun = at
    return told + style.rest()


def ours(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as the device's model writes them."""
    between = [
        f'{form.before}{{"name": "{name}", "{form.key}": {json.dumps(arguments)}}}{form.after}'
        for name, arguments in calls
    ]
    return f"{form.opens}{form.between.join(between)}{form.closes}"


@settings(max_examples=200, deadline=None)
@given(
    how=st.sampled_from(sorted(WRITTEN)),
    form=st.sampled_from([PLAIN, QWEN, MISTRAL]),
    choice=st.sampled_from(["auto", "required", "temperature"]),
    parallel=st.booleans(),
    cuts=st.lists(st.integers(0, 120), max_size=12),
)
def test_a_call_of_any_style_becomes_ours(
    how: str, form: ToolFormat, choice: str, parallel: bool, cuts: list[int]
) -> None:
    told = styled(style_of(form, choice, parallel=parallel), WRITTEN[how], cuts)
    assert told == ours(form, ("temperature", ROME))


@pytest.mark.parametrize("form", [PLAIN, QWEN, MISTRAL])
def test_words_before_a_call_are_left_out_where_only_calls_are_allowed(form: ToolFormat) -> None:
    text = f"I look at {{it}} with clock.\n\n```json\n{json.dumps(CALL)}\n```"
    told = styled(style_of(form, "required"), text, range(len(text)))
    assert told == ours(form, ("temperature", ROME))
    if form is not QWEN:  # whose calls may stand behind words: see below
        assert styled(style_of(form), text, range(len(text))) == text


def test_words_before_a_mark_of_the_devices_model_stay() -> None:
    text = 'One moment.\n<tool_call>{"name":"clock","arguments":{}}</tool_call>'
    told = styled(style_of(QWEN), text, range(len(text)))
    assert told == "One moment.\n" + ours(QWEN, ("clock", {}))


@pytest.mark.parametrize("form", [PLAIN, QWEN, MISTRAL])
@pytest.mark.parametrize("between", ["\n", ", ", "; ", "\n</tool_call>\n<tool_call>\n"])
def test_several_calls_are_all_there_or_the_first_alone(form: ToolFormat, between: str) -> None:
    text = between.join([json.dumps(CALL), json.dumps({"name": "clock", "arguments": {}})])
    told = styled(style_of(form), text, range(len(text)))
    assert told == ours(form, ("temperature", ROME), ("clock", {}))
    told = styled(style_of(form, parallel=False), text, range(len(text)))
    assert told == ours(form, ("temperature", ROME))


@pytest.mark.parametrize(
    "text",
    [
        "It is warm in Rome.",
        "```python\nprint(1)\n```",
        "[1] is a footnote, {this} is none.",
        '```json\n{"city": "Rome"}\n```',
        '```json\n{"name": "Ada", "born": 1815}\n```',
        '```json\n{"name": "other", "arguments": {}}\n```',
        "``",
        "",
    ],
)
def test_what_is_no_call_stays_as_it_is(text: str) -> None:
    for form in (PLAIN, QWEN, MISTRAL):
        assert styled(style_of(form), text, range(len(text))) == text


def test_text_is_not_kept_back() -> None:
    style = style_of(PLAIN)
    assert style.add("It") == "It"
    assert style.add(" is warm.") == " is warm."
    style = style_of(PLAIN, "required")
    assert style.add("```json\n") == ""
    assert style.add('{"name":"temperature","arguments":{"ci') == (
        '{"name": "temperature", "parameters": {"ci'
    )


def test_a_json_answer_beside_tools_is_in_our_style_too() -> None:
    answer = Grammar.of_schema({"type": "object", "properties": {"sum": {"type": "integer"}}})
    text = '```json\n{\n "sum":42}\n```'
    told = styled(style_of(PLAIN, answer=answer), text, range(len(text)))
    assert told == '{"sum": 42}```'  # the grammar ends behind the object
    told = styled(style_of(PLAIN, answer=answer), json.dumps(CALL))
    assert told == ours(PLAIN, ("temperature", ROME))


def test_other_grammars_offer_no_calls() -> None:
    assert offered_calls(Grammar("regex", "a")) is None
    assert offered_calls(Grammar("lark", 'start: "a"')) is None
