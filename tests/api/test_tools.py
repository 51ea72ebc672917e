"""Tool calls of each family: the grammar lets a model write exactly what the parser finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from moa import demo
from moa.api.errors import ApiError
from moa.api.present import Show
from moa.api.reasoning import Separator
from moa.api.tools import Function, Tool, ToolFormat, Tools, chosen, listed
from moa.grammar.matcher import GrammarCompiler, Matcher
from moa.grammar.spec import Grammar, GrammarError
from tests.api.scripted import MODEL, says, served

WEATHER = Tool(
    Function(
        "get_weather",
        "The weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        strict=True,
    )
)
CLOCK = Tool(Function("clock"))
BOTH = Tools((WEATHER, CLOCK))
TEMPLATES = {"qwen": "tools <tool_call>", "mistral": "tools [TOOL_CALLS]", "llama": "tools", "gemma": ""}
ROME, NOW = '{"city": "Rome"}', "{}"


def form_of(family: str) -> ToolFormat:
    return ToolFormat.of(TEMPLATES[family])


def written(form: ToolFormat, *calls: tuple[str, str]) -> str:
    each = [f'{form.before}{{"name": "{name}", "{form.key}": {given}}}{form.after}' for name, given in calls]
    return form.opens + form.between.join(each) + form.closes


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler((demo.paths().tokenizer / "tokenizer.json").read_text, size=4096, eos_ids=[0])


def accepts(grammars: GrammarCompiler, grammar: Grammar | None, text: str) -> bool:
    """Whether a grammar allows this as a whole answer."""
    from tokenizers import Tokenizer

    assert grammar is not None
    ids = Tokenizer.from_file(str(demo.paths().tokenizer / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    matcher: Matcher = grammars.compile(grammar).matcher(0)
    return matcher.accepts(ids) and bool(matcher.after(ids).allowed()[0] & 1)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_model_writes_what_is_found(grammars: GrammarCompiler, family: str) -> None:
    form = form_of(family)
    one, two = written(form, ("get_weather", ROME)), written(form, ("get_weather", ROME), ("clock", NOW))
    wrong = [written(form, ("get_weather", '{"town": "Rome"}')), written(form, ("other", NOW)), one[:-3]]
    auto, required = form.grammar(BOTH, None), form.grammar(Tools(BOTH.tools, "required"), None)
    named = form.grammar(Tools(BOTH.tools, "clock", parallel=False), None)
    for text in (one, two):
        assert accepts(grammars, auto, text)
        assert accepts(grammars, required, text)
        assert not accepts(grammars, named, text)
    assert accepts(grammars, named, written(form, ("clock", NOW)))
    for text in wrong:
        assert not accepts(grammars, auto, text)
        assert not accepts(grammars, required, text)
    assert accepts(grammars, auto, "It is warm.")
    assert not accepts(grammars, required, "It is warm.")
    answer = Grammar.of_schema({"type": "object", "properties": {"t": {"type": "integer"}}, "required": ["t"]})
    either = form.grammar(BOTH, answer)
    assert accepts(grammars, either, one)
    assert accepts(grammars, either, '{"t": 3}')
    assert not accepts(grammars, either, "It is warm.")
    content, calls, rest = form.split(two)
    assert (content, [(call.name, call.arguments) for call in calls], rest) == (
        "",
        [("get_weather", ROME), ("clock", NOW)],
        "",
    )


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
        separator, shown = Separator(form=form), ""
        for start in range(0, len(text), size):
            shown += separator.take(Show(text[start : start + size], 0))[1].text
        assert shown + separator.take(None, last=True)[1].text == wanted
        assert len(separator.calls) == count


def test_what_a_schema_may_hold(grammars: GrammarCompiler) -> None:
    odd = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
    form = form_of("qwen")
    loose, strict = (Tools((Tool(Function("f", None, odd, strict=one)),)) for one in (False, True))
    assert accepts(grammars, form.grammar(loose, None), written(form, ("f", "{}")))
    with pytest.raises(GrammarError, match="not"):
        accepts(grammars, form.grammar(strict, None), "")
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


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_finds_the_calls(stream: bool) -> None:
    form = form_of("qwen")
    text = "I look.\n" + written(form, ("get_weather", ROME), ("clock", NOW))
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    async with (
        served(says(*pieces)) as (answerer, address),
        AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
    ):
        how: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [listed(WEATHER), listed(CLOCK)],
        }
        if stream:
            async with client.chat.completions.stream(**how) as events:
                async for _ in events:
                    pass
                choice = (await events.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(**how)).choices[0]
        plain = (await client.chat.completions.create(**how | {"tool_choice": "none"})).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    calls = choice.message.tool_calls or []
    assert [(one.function.name, one.function.arguments) for one in calls] == [("get_weather", ROME), ("clock", NOW)]  # type: ignore[union-attr]
    assert len({one.id for one in calls}) == 2
    tools = answerer.asks[0].question.tools
    assert tools is not None
    assert tools.choice == "auto"
    assert plain.finish_reason == "stop"
    assert plain.message.content == text


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_calls_as_items(stream: bool) -> None:
    form = form_of("qwen")
    text = "I look.\n" + written(form, ("get_weather", ROME), ("clock", NOW))
    tools: Any = [{"type": "function", **listed(tool)["function"], "strict": True} for tool in BOTH.tools]
    async with (
        served(says(*(text[at : at + 7] for at in range(0, len(text), 7)))) as (answerer, address),
        AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
    ):
        if stream:
            async with client.responses.stream(model=MODEL, input="hi", tools=tools) as events:
                async for _ in events:
                    pass
                response: Any = await events.get_final_response()
        else:
            response = await client.responses.create(model=MODEL, input="hi", tools=tools)
        message, weather, clock = response.output
        assert message.content[0].text == "I look.\n"
        assert [(one.type, one.name, one.arguments) for one in (weather, clock)] == [
            ("function_call", "get_weather", ROME),
            ("function_call", "clock", NOW),
        ]
        outputs: Any = [{"type": "function_call_output", "call_id": weather.call_id, "output": "warm"}]
        how: Any = {"model": MODEL, "tools": tools}
        await client.responses.create(**how, input=outputs, previous_response_id=response.id)
        await client.responses.create(
            **how, input=[{"role": "user", "content": "hi"}, weather.model_dump(exclude_none=True), *outputs]
        )
    for ask in answerer.asks[1:]:
        messages = ask.question.messages or ()
        assert messages[-1] == {"role": "tool", "content": "warm", "tool_call_id": weather.call_id}
        assert messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ROME}
