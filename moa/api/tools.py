"""Tool calls: how each family writes them, and the grammar that makes a model write them so. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from moa.api.calls import CallReader
from moa.api.errors import bad
from moa.grammar.spec import JSON_STYLE, Grammar, closed

_ANYTHING = "(?s:.*)"
"""A regular expression for any text, line breaks included."""


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool: a function."""

    function: Function
    type: Literal["function"] = "function"


class Tools(msgspec.Struct, frozen=True):
    """The tools of a request. `choice`: none, auto, required, or the name of a function."""

    tools: tuple[Tool, ...]
    choice: str = "auto"
    parallel: bool = True

    def reader(self) -> CallReader:
        """Returns what finds calls of them in one answer."""
        functions = [tool.function for tool in self.tools]
        return CallReader(
            [function.name for function in functions],
            parallel=self.parallel,
            strict={
                function.name: closed(function.parameters)
                for function in functions
                if function.strict and function.parameters
            },
        )


Instead = Literal["call", "json", "text"]
"""What an answer may be instead of calls: nothing else, JSON of a schema, or any text."""


class ToolFormat(NamedTuple):
    """How a family writes calls: `{"name": ..., KEY: {...}}`, with text around each, and around and
    between all."""

    key: str = "parameters"
    """The name of the arguments."""
    before: str = ""
    """Text before each call."""
    after: str = ""
    """Text after each call."""
    between: str = "; "
    """Text between two calls."""
    opens: str = ""
    """Text before all calls."""
    closes: str = ""
    """Text after all calls."""
    knows_tools: bool = False
    """Whether the chat template writes the tools, the calls and their results."""

    @classmethod
    def of(cls, template: str) -> ToolFormat:
        """How a model writes calls of tools, by marks in the source of its chat template: as Qwen
        and Hermes do, as Mistral does, or else as Llama and Gemma."""
        knows_tools = "tools" in template
        if "<tool_call>" in template:
            return cls(
                key="arguments",
                before="<tool_call>\n",
                after="\n</tool_call>",
                between="\n",
                knows_tools=knows_tools,
            )
        if "[TOOL_CALLS]" in template:
            return cls(
                key="arguments", between=", ", opens="[", closes="]", knows_tools=knows_tools
            )
        return cls(knows_tools=knows_tools)

    # ---- what the model may write

    def grammar(self, tools: Tools, answer: Grammar | None) -> Grammar | None:
        """The grammar that an answer must match, as the request's `tool_choice` has it: calls of
        the tools, or else what `answer` says, or any text. None is any text without calls."""
        if not tools.tools or tools.choice == "none":
            return answer
        if answer is not None and answer.kind != "json_schema":
            raise bad(
                "tools go with a response_format of json_schema or json_object",
                "tools",
                "unsupported_parameter",
            )
        rules = self._rules_of_calls(_offered(tools))
        if tools.choice != "auto":
            return _lark(*self._start("call", tools.parallel), *rules)
        if answer is not None:
            schema = _json(json.loads(answer.text), lenient=False)
            return _lark(*self._start("json", tools.parallel), f"free: {schema}", *rules)
        return _lark(*self._start("text", tools.parallel), *rules)

    def _start(self, instead: Instead, parallel: bool) -> list[str]:
        """The first rules of a Lark grammar: calls, in the model's own marks, or what may come
        `instead` of them. `one` is the rule for the JSON of a call, and `free` for that of a JSON
        answer."""
        one = f"{json.dumps(self.before)} one {json.dumps(self.after)}"
        others = f"({json.dumps(self.between)} {one})*" if parallel else ""
        calls = f"{json.dumps(self.opens)} {one} {others} {json.dumps(self.closes)}"
        if instead == "call":
            return [f"start: {calls}"]
        if instead == "json":
            return [f"start: free | {calls}"]
        mark = self.before.strip()
        if not mark:
            # A call is told from a text by its first character.
            first = self.opens or "{"
            return [f"start: FREE | {calls}", f"FREE: /([^\\{first}]{_ANYTHING})?/"]
        # A text may come before the first call, and holds no beginning of one.
        rest = f"{json.dumps(self.before.removeprefix(mark))} one {json.dumps(self.after)} {others}"
        return [
            f"start: FREE | pre {rest}",
            f"pre[lazy]: /{_ANYTHING}{mark}/",
            f"FREE: /{_ANYTHING}/ & ~/{_ANYTHING}{mark}{_ANYTHING}/",
        ]

    def _rules_of_calls(self, functions: Sequence[Function]) -> list[str]:
        """The rules of a Lark grammar for one call. The rule `one` is a call of any of the
        functions, and each function has a rule for its call and one for its arguments, by its
        number."""
        names = [f"call{number}" for number in range(len(functions))]
        rules = [f"one: {' | '.join(names)}"]
        for number, function in enumerate(functions):
            # In the pieces in which JSON is read, for an answer may begin in the same way.
            pieces = ("{", '"name"', ": ", json.dumps(function.name), ", ", f'"{self.key}"', ": ")
            head = " ".join(json.dumps(piece) for piece in pieces)
            rules.append(f'call{number}: {head} arguments{number} "}}"')
            parameters = closed(function.parameters) if function.parameters else None
            rules.append(f"arguments{number}: {_json(parameters, lenient=not function.strict)}")
        return rules

    # ---- what it is asked

    def messages(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
        """The conversation for the chat template. One that knows no tools gets them, the calls and
        the results as text."""
        if self.knows_tools:
            return [_parsed(message) for message in messages]
        return self.as_text(messages, tools)

    def as_text(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
        """The conversation as plain texts, for a model or a server that knows no tools: calls are
        written into the answers, results become messages of the user, and the tools are described
        before the first question."""
        plain: list[dict[str, Any]] = []
        for message in messages:
            content = message["content"]
            calls = message.get("tool_calls")
            if calls:
                content += self.between.join(self._written(call["function"]) for call in calls)
            role = "user" if message["role"] == "tool" else message["role"]
            plain.append({"role": role, "content": content})
        if tools.choice != "none" and tools.tools:
            questions = [message for message in plain if message["role"] == "user"]
            first = questions[0] if questions else plain[-1]
            first["content"] = f"{self._introduction(tools)}\n\n{first['content']}"
        return plain

    def for_service(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools
    ) -> list[dict[str, Any]]:
        """The conversation as plain texts for a service, which cannot be made to follow a grammar:
        where `tool_choice` demands a call, the last question says so."""
        plain = self.as_text(messages, tools)
        if tools.tools and tools.choice not in ("auto", "none"):
            function = "one of the functions"
            if tools.choice != "required":
                function = f"the function {tools.choice}"
            questions = [message for message in plain if message["role"] == "user"]
            last = questions[-1] if questions else plain[-1]
            last["content"] += f"\n\nAnswer with a call of {function}, and with nothing else."
        return plain

    def _written(self, function: Mapping[str, Any]) -> str:
        """A call as the model writes it."""
        name = json.dumps(function["name"])
        arguments = function["arguments"]
        return f'{self.before}{{"name": {name}, "{self.key}": {arguments}}}{self.after}'

    def _introduction(self, tools: Tools) -> str:
        """What tells the model of the tools, where its chat template does not."""
        functions = "\n".join(
            json.dumps(listed(tool)["function"], ensure_ascii=False) for tool in tools.tools
        )
        call = f'{{"name": function name, "{self.key}": dictionary of argument name and its value}}'
        form = f"{self.before}{call}{self.after}"
        return f"You have access to functions. To call one, answer only {form}\n{functions}"


class OfferedCalls(NamedTuple):
    """What a grammar of calls allows, as far as somebody must know who writes an answer anew in our
    style."""

    form: ToolFormat
    names: frozenset[str]
    """The functions that may be called."""
    instead: Instead
    parallel: bool
    """Whether there may be several calls."""


_FORMS = (ToolFormat.of("<tool_call>"), ToolFormat.of("[TOOL_CALLS]"), ToolFormat.of(""))
_CALL_RULE = re.compile(r"call\d+: ")
_TEXT_IN_RULE = re.compile(r'"(?:[^"\\]|\\.)*"')


def offered_calls(grammar: Grammar) -> OfferedCalls | None:
    """Read a grammar of `ToolFormat.grammar`; None for any other."""
    if grammar.kind != "lark":
        return None
    lines = grammar.text.splitlines()
    for form, instead, parallel in product(_FORMS, get_args(Instead), (True, False)):
        start = form._start(instead, parallel)
        if lines[: len(start)] == start:
            break
    else:
        return None
    names = []
    for line in lines:
        if _CALL_RULE.match(line):
            texts = [json.loads(text) for text in _TEXT_IN_RULE.findall(line)]
            names.append(json.loads(texts[3]))  # behind `{`, `"name"` and `: `
    return OfferedCalls(form, frozenset(names), instead, parallel)


def chosen(choice: Any, tools: Sequence[Tool] | None, parallel: bool | None) -> Tools | None:
    """The tools of a request, with its `tool_choice` as a word or a function's name; None if it has
    no tools. An `ApiError` for a choice that is none, or that demands a call without tools."""
    match choice:
        case None | "auto" | "none" | "required":
            name = choice or "auto"
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            pass
        case _:
            raise bad(
                "tool_choice: it is none, auto, required, or a function by its name", "tool_choice"
            )
    if not tools:
        if name not in ("auto", "none"):
            raise bad("tool_choice demands a call, and there are no tools", "tool_choice")
        return None
    return Tools(tuple(tools), name, parallel is not False)


def _offered(tools: Tools) -> list[Function]:
    """The functions that may be called: all, or the one of `tool_choice`."""
    functions = [tool.function for tool in tools.tools]
    if tools.choice in ("auto", "required"):
        return functions
    named = [function for function in functions if function.name == tools.choice]
    if not named:
        raise bad(
            f"tool_choice: there is no function {tools.choice!r} among the tools", "tool_choice"
        )
    return named


def listed(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it."""
    function = tool.function
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.parameters or {"type": "object", "properties": {}},
        },
    }


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in which the arguments of calls are objects, as chat templates expect them; in
    requests they are JSON texts."""
    parsed = dict(message)
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = _object(function["arguments"])
        calls.append({**call, "function": {**function, "arguments": arguments}})
    if calls:
        parsed["tool_calls"] = calls
    return parsed


def _object(arguments: str) -> Any:
    """Arguments as an object; as they are if they are no JSON."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _lark(*rules: str) -> Grammar:
    """A grammar of rules, the one for the start first."""
    return Grammar("lark", "\n".join(rules))


def _json(schema: dict[str, Any] | None, *, lenient: bool) -> str:
    """The right side of a rule for the JSON texts of a schema; of any object for None."""
    if schema is None:
        schema = {"type": "object"}
    styled = {**schema, "x-guidance": {**JSON_STYLE, "lenient": lenient}}
    return "%json " + json.dumps(styled, ensure_ascii=False)
