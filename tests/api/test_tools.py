"""Tool calls of each family: the grammar lets a model write exactly what the parser finds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from moa.api.answer import AnswerEvent, Began, Cut, Piece
from moa.api.errors import ApiError
from moa.api.parts import Separator
from moa.api.present import Show
from moa.api.tools import Function, Tool, ToolFormat, Tools, chosen, listed
from moa.grammar.spec import Grammar, GrammarError
from tests.api.scripted import MODEL, Scripted, ended, says, served
from tests.grammar.corpus import FILE, compiler

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool(Function("get_weather", "The weather", PLACE, strict=True))
CLOCK = Tool(Function("clock"))
BOTH = Tools((WEATHER, CLOCK))
TEMPLATES = {
    "qwen": "tools <tool_call>",
    "mistral": "tools [TOOL_CALLS]",
    "llama": "tools",
    "gemma": "",
}
ROME = '{"city": "Rome"}'
NOW = "{}"


def form_of(family: str) -> ToolFormat:
    return ToolFormat.of(TEMPLATES[family])


def written(form: ToolFormat, *calls: tuple[str, str]) -> str:
    each = [
        f'{form.before}{{"name": "{name}", "{form.key}": {given}}}{form.after}'
        for name, given in calls
    ]
    return form.opens + form.between.join(each) + form.closes


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Whether a grammar allows this as a whole answer."""
    assert grammar is not None
    ids = Tokenizer.from_file(str(FILE)).encode(text, add_special_tokens=False).ids
    try:
        return bool(compiler().compile(grammar).matcher(0).after(ids).allowed()[0] & 1)
    except GrammarError as error:
        if "does not match" not in str(error):
            raise
        return False


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_model_writes_what_is_found(family: str) -> None:
    form = form_of(family)
    weather = ("get_weather", ROME)
    clock = ("clock", NOW)
    answer = Grammar.of_schema(
        {"type": "object", "properties": {"t": {"type": "integer"}}, "required": ["t"]}
    )
    allowed = {
        "auto": form.grammar(BOTH, None),
        "required": form.grammar(Tools(BOTH.tools, "required"), None),
        "named": form.grammar(Tools(BOTH.tools, "clock", parallel=False), None),
        "or an answer": form.grammar(BOTH, answer),
    }
    one = written(form, weather)
    two = written(form, weather, clock)
    for text, kinds in (
        (one, {"auto", "required", "or an answer"}),
        (two, {"auto", "required", "or an answer"}),
        (written(form, clock), set(allowed)),
        (written(form, ("get_weather", '{"town": "Rome"}')), set()),
        (written(form, ("other", NOW)), set()),
        (one[:-3], set()),
        ("It is warm.", {"auto"}),
        (
            '{"t": 3}',
            {"or an answer"} if form.before == "" and not form.opens else {"auto", "or an answer"},
        ),
    ):
        assert {kind for kind, grammar in allowed.items() if accepts(grammar, text)} == kinds, text
    assert BOTH.reader().split(two) == ("", [weather, clock])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("family", TEMPLATES)
def test_pieces_of_any_size_give_the_same(family: str, size: int) -> None:
    form = form_of(family)
    before = "Let me see <b>.\n" if family == "qwen" else ""
    calls = written(form, ("get_weather", '{"city": "a } ] </tool_call> \\" {"}'), ("clock", NOW))
    for text, wanted, count in (
        (before + calls, before, 2),
        ("a <tool", "a <tool", 0),
        (calls[:25], calls[:25], 0),
        ("", "", 0),
    ):
        separator = Separator(reader=BOTH.reader())
        shown = ""
        for start in range(0, len(text), size):
            shown += separator.take(Show(text[start : start + size], 0))[1].text
        assert shown + separator.take(None, last=True)[1].text == wanted
        assert len(separator.calls) == count


def test_what_a_schema_may_hold() -> None:
    odd = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
    form = form_of("qwen")
    loose, strict = (Tools((Tool(Function("f", None, odd, strict=one)),)) for one in (False, True))
    assert accepts(form.grammar(loose, None), written(form, ("f", "{}")))
    with pytest.raises(GrammarError, match="not"):
        accepts(form.grammar(strict, None), "")
    with pytest.raises(ApiError, match="no function"):
        form.grammar(Tools(BOTH.tools, "other"), None)
    with pytest.raises(ApiError, match="response_format"):
        form.grammar(BOTH, Grammar("regex", "a"))
    assert chosen("none", None, None) is None
    assert chosen({"type": "function", "function": {"name": "clock"}}, [CLOCK], False) == Tools(
        (CLOCK,), "clock", False
    )
    for choice, tools in (("required", None), ("maybe", [CLOCK]), ({"type": "file"}, [CLOCK])):
        with pytest.raises(ApiError, match="tool_choice"):
            chosen(choice, tools, None)


def test_a_template_without_tools_is_told_of_them() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "c"},
    ]
    told = form_of("gemma").messages(messages, BOTH)
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    assert told[0]["content"].endswith("What time is it?")
    assert json.dumps(listed(CLOCK)["function"]) in told[0]["content"]
    assert told[1]["content"] == '{"name": "clock", "parameters": {}}'
    known = form_of("qwen").messages(messages, BOTH)
    assert known[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert known[2] == messages[2]


CALLING = "I look.\n" + written(form_of("qwen"), ("get_weather", ROME), ("clock", NOW))
FENCED = """```json
{
  "name": "get_weather",
  "arguments": {
    "city": "Rome"
  }
}
```"""
"""As Qwen2.5-Coder writes a call."""


@contextlib.asynccontextmanager
async def calling(text: str = CALLING) -> AsyncIterator[tuple[Scripted, AsyncOpenAI]]:
    """A model that writes this: it calls both."""
    async with (
        served(says(*(text[at : at + 7] for at in range(0, len(text), 7)))) as (
            answerer,
            address,
        ),
        AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
    ):
        yield answerer, client


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_finds_the_calls(stream: bool) -> None:
    async with calling() as (answerer, client):
        messages = [{"role": "user", "content": "hi"}]
        tools = [listed(WEATHER), listed(CLOCK)]
        how: Any = {"model": MODEL, "messages": messages, "tools": tools}
        if stream:
            async with client.chat.completions.stream(**how) as events:
                choice: Any = (await events.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(**how)).choices[0]
        plain = (await client.chat.completions.create(**how | {"tool_choice": "none"})).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.\n")
    calls = choice.message.tool_calls or []
    assert [(one.function.name, one.function.arguments) for one in calls] == [
        ("get_weather", ROME),
        ("clock", NOW),
    ]
    assert len({one.id for one in calls}) == 2
    asked = answerer.asks[0].question.tools
    assert asked is not None
    assert asked.choice == "auto"
    assert (plain.finish_reason, plain.message.content) == ("stop", CALLING)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("behind", "content"), [("", None), ("\n\nThen I tell you.", True)])
async def test_a_call_in_a_fence_is_one(stream: bool, behind: str, content: bool | None) -> None:
    how: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    how["tools"] = [listed(WEATHER)]
    async with calling(FENCED + behind) as (_, client):
        if stream:
            async with client.chat.completions.stream(**how) as events:
                choice: Any = (await events.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(**how)).choices[0]
        # An ordinary answer in JSON, where nothing of that name is offered.
        how["tools"] = [listed(CLOCK)]
        other = (await client.chat.completions.create(**how)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or None) == (behind.strip() if content else None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ROME)
    assert (other.finish_reason, other.message.content) == ("stop", FENCED + behind)
    assert other.message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
async def test_what_stands_behind_a_call_is_a_message_of_its_own(stream: bool) -> None:
    text = f"I look.\n{FENCED}\nThen I tell you."
    how: Any = {"model": MODEL, "input": "hi"}
    how["tools"] = [{"type": "function", **listed(WEATHER)["function"]}]
    async with calling(text) as (_, client):
        if not stream:
            response: Any = await client.responses.create(**how)
        else:
            done = []
            async with client.responses.stream(**how) as events:
                async for event in events:
                    if event.type == "response.output_item.done":
                        done.append(event.item.id)
                response = await events.get_final_response()
            assert done == [item.id for item in response.output], "each is ended once"
    first, call, second = response.output
    assert first.content[0].text == "I look.\n"
    assert (call.name, call.arguments) == ("get_weather", ROME)
    assert second.content[0].text == "Then I tell you."


@pytest.mark.parametrize("confirmed", [True, False])
async def test_a_call_that_may_be_withdrawn_is_sent_at_the_end(confirmed: bool) -> None:
    told = f"I look.\n{FENCED}"
    script: list[AnswerEvent] = [Began(), Piece("I look.\n"), Piece(FENCED, verified=False)]
    if not confirmed:
        told = "I look.\n```json\n{}\n```"
        script += [Cut(len("I look.\n```json\n{")), Piece("}\n```")]
    script.append(ended(told))
    how: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with (
        served(script) as (_, address),
        AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            **how, tools=[listed(WEATHER)], extra_body={"moa": {"mode": "provisional"}}
        )
        choices = [chunk.choices[0] async for chunk in stream]
    text = ""
    for choice in choices:
        marks: dict[str, Any] = getattr(choice, "moa", {})
        text = text[: marks.get("cut")] + (choice.delta.content or "")
        assert marks.get("verified", 0) <= len(text)
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert not any(choice.delta.tool_calls for choice in choices[:-2])
    assert len(calls) == confirmed
    assert text == ("I look.\n" if confirmed else "I look.\n```json\n{}\n```")
    assert choices[-1].finish_reason == ("tool_calls" if confirmed else "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_calls_as_items(stream: bool) -> None:
    tools: Any = [
        {"type": "function", **listed(tool)["function"], "strict": True} for tool in BOTH.tools
    ]
    async with calling() as (answerer, client):
        if stream:
            async with client.responses.stream(model=MODEL, input="hi", tools=tools) as events:
                response: Any = await events.get_final_response()
        else:
            response = await client.responses.create(model=MODEL, input="hi", tools=tools)
        message, weather, clock = response.output
        assert message.content[0].text == "I look.\n"
        assert [(one.type, one.name, one.arguments) for one in (weather, clock)] == [
            ("function_call", "get_weather", ROME),
            ("function_call", "clock", NOW),
        ]
        outputs: Any = [
            {"type": "function_call_output", "call_id": weather.call_id, "output": "warm"}
        ]
        how: Any = {"model": MODEL, "tools": tools}
        await client.responses.create(
            **how,
            input=[
                {"role": "user", "content": "hi"},
                weather.model_dump(exclude_none=True),
                *outputs,
            ],
        )
    messages = answerer.asks[1].question.messages or ()
    assert messages[-1] == {"role": "tool", "content": "warm", "tool_call_id": weather.call_id}
    assert messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ROME}


def test_arguments_have_no_more_than_the_function_lists() -> None:
    """`add(**arguments)` raises for what the model has made up."""
    form = form_of("qwen")

    def takes(parameters: dict[str, Any], arguments: str) -> bool:
        tool = Tool(Function("add", parameters=parameters))
        grammar = form.grammar(Tools((tool,), "required"), None)
        return accepts(grammar, written(form, ("add", arguments)))

    number = {"type": "integer"}
    listed = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    assert takes(listed, '{"a": 1, "b": 2}')
    assert not takes(listed, '{"a": 1, "b": 2, "city": "Rome"}')
    inner = {"type": "object", "properties": {"at": listed}}
    assert not takes(inner, '{"at": {"a": 1, "b": 2, "c": 3}}')
    assert takes({**listed, "additionalProperties": True}, '{"a": 1, "b": 2, "city": "Rome"}')
    assert takes({"type": "object"}, '{"anything": 1}')
    parts = {"allOf": [listed, {"type": "object", "properties": {"c": number}}]}
    assert takes(parts, '{"a": 1, "b": 2, "c": 3}')
