"""Tool calls: how each family writes them, the grammar that makes a model write them so, and their
parts. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from moa.api.errors import bad
from moa.grammar.spec import JSON_STYLE, Grammar

_ANYTHING = "(?s:.*)"
_TOGETHER = ("allOf", "anyOf", "oneOf", "if", "$ref", "unevaluatedProperties")
"""Beside these in a schema, `properties` need not be all properties of the object."""


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


class WrittenCall(NamedTuple):
    """A call that the model has written."""

    name: str
    arguments: str


class ToolFormat(NamedTuple):
    """How a family writes calls: `{"name": ..., KEY: {...}}`, with text around each, and around and
    between all."""

    key: str = "parameters"
    before: str = ""
    after: str = ""
    between: str = "; "
    opens: str = ""
    closes: str = ""
    knows_tools: bool = False
    """Whether the chat template writes the tools, the calls and their results."""

    @classmethod
    def of(cls, template: str) -> ToolFormat:
        """The format of a chat template: that of Qwen and Hermes, of Mistral, or of Llama and
        Gemma."""
        known = "tools" in template
        if "<tool_call>" in template:
            return cls("arguments", "<tool_call>\n", "\n</tool_call>", "\n", knows_tools=known)
        if "[TOOL_CALLS]" in template:
            return cls("arguments", between=", ", opens="[", closes="]", knows_tools=known)
        return cls(knows_tools=known)

    # ---- what the model may write

    def grammar(self, tools: Tools, answer: Grammar | None) -> Grammar | None:
        """What an answer must match: a call, or else `answer` or any text."""
        if not tools.tools or tools.choice == "none":
            return answer
        if answer is not None and answer.kind != "json_schema":
            raise bad(
                "tools go with a response_format of json_schema or json_object",
                "tools",
                "unsupported_parameter",
            )
        offered = [tool.function for tool in tools.tools]
        if tools.choice not in ("auto", "required"):
            offered = [function for function in offered if function.name == tools.choice]
            if not offered:
                raise bad(
                    f"tool_choice: there is no function {tools.choice!r} among the tools",
                    "tool_choice",
                )
        wrapped = f"{json.dumps(self.before)} one {json.dumps(self.after)}"
        more = f"({json.dumps(self.between)} {wrapped})*" if tools.parallel else ""
        calls = f"{json.dumps(self.opens)} {wrapped} {more} {json.dumps(self.closes)}"
        rules = [f"one: {' | '.join(f'call{number}' for number in range(len(offered)))}"]
        for number, function in enumerate(offered):
            # In the pieces in which JSON is read, for an answer may begin in the same way.
            pieces = ("{", '"name"', ": ", json.dumps(function.name), ", ", f'"{self.key}"', ": ")
            rules.append(
                f'call{number}: {" ".join(map(json.dumps, pieces))} arguments{number} "}}"'
            )
            parameters = _closed(function.parameters) if function.parameters else None
            rules.append(f"arguments{number}: {_json(parameters, lenient=not function.strict)}")
        if tools.choice != "auto":
            start = f"start: {calls}"
        elif answer is not None:
            start = f"start: free | {calls}\nfree: {_json(json.loads(answer.text), lenient=False)}"
        elif first := self.before.strip():
            # A text may come before the first call, and holds no beginning of one.
            rest = (
                f"{json.dumps(self.before.removeprefix(first))} one {json.dumps(self.after)} {more}"
            )
            start = f"start: FREE | pre {rest}\npre[lazy]: /{_ANYTHING}{first}/\n"
            start += f"FREE: /{_ANYTHING}/ & ~/{_ANYTHING}{first}{_ANYTHING}/"
        else:
            start = f"start: FREE | {calls}\nFREE: /([^\\{self.opens or '{'}]{_ANYTHING})?/"
        return Grammar("lark", "\n".join([start, *rules]))

    # ---- what it is asked

    def messages(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
        """The conversation for the chat template. One that knows no tools gets them, the calls and
        the results as text."""
        if self.knows_tools:
            return [_parsed(message) for message in messages]
        return self.as_text(messages, tools)

    def as_text(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
        """The conversation as plain texts: tools, calls and results are written into them."""
        told: list[dict[str, Any]] = []
        for message in messages:
            content = message["content"]
            if calls := message.get("tool_calls"):
                content += self.between.join(self._written(call["function"]) for call in calls)
            role = "user" if message["role"] == "tool" else message["role"]
            told.append({"role": role, "content": content})
        if tools.choice != "none" and tools.tools:
            first = next((message for message in told if message["role"] == "user"), told[-1])
            first["content"] = f"{self._introduction(tools)}\n\n{first['content']}"
        return told

    def _written(self, function: Mapping[str, Any]) -> str:
        name = json.dumps(function["name"])
        arguments = function["arguments"]
        return f'{self.before}{{"name": {name}, "{self.key}": {arguments}}}{self.after}'

    def _introduction(self, tools: Tools) -> str:
        functions = "\n".join(
            json.dumps(listed(tool)["function"], ensure_ascii=False) for tool in tools.tools
        )
        form = f'{self.before}{{"name": function name, "{self.key}": dictionary of argument name and its value}}'
        return f"You have access to functions. To call one, answer only {form}{self.after}\n{functions}"

    # ---- what it has written

    def split(self, text: str, *, last: bool = True) -> tuple[str, list[WrittenCall], str]:
        """The text before the first call, the complete calls, and what is left of an incomplete
        one."""
        first = self.before.strip()
        at = text.find(first) if first else 0 if text.startswith(self.opens or "{") else -1
        if at < 0:
            held = (
                0
                if last
                else next((n for n in range(len(first) - 1, 0, -1) if text.endswith(first[:n])), 0)
            )
            return text[: len(text) - held], [], text[len(text) - held :] if held else ""
        calls = list[WrittenCall]()
        rest = text[at:]
        decoder = json.JSONDecoder()
        while (begin := rest.find("{")) >= 0:
            try:
                call, end = decoder.raw_decode(rest, begin)
                arguments = json.dumps(call[self.key], ensure_ascii=False)
                calls.append(WrittenCall(str(call["name"]), arguments))
            except (ValueError, KeyError, RecursionError):
                break
            rest = rest[end:]
        over = begin < 0 and calls
        return text[:at], calls, "" if over else rest


def chosen(choice: Any, tools: Sequence[Tool] | None, parallel: bool | None) -> Tools | None:
    """The tools of a request with its `tool_choice`, or None if there are none to use."""
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
    """A message whose calls have their arguments as objects, as templates expect them."""
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": _object(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _closed(schema: Any) -> Any:
    """The same schema, but an object that lists its properties has no others: whoever calls
    `f(**arguments)` cannot use what the model made up. JSON Schema's own default is that it may
    have. Where parts of a schema hold together (`allOf`), they stay as they are."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict):
            closed[name] = {key: _closed(part) for key, part in value.items()}
        elif name in ("items", "prefixItems", "anyOf", "oneOf"):
            closed[name] = _closed(value)
        else:
            closed[name] = value
    lists = isinstance(schema.get("properties"), dict)
    if lists and not schema.keys() & {"additionalProperties", "patternProperties", *_TOGETHER}:
        closed["additionalProperties"] = False
    return closed


def _json(schema: dict[str, Any] | None, *, lenient: bool) -> str:
    schema = {"type": "object"} if schema is None else schema
    return "%json " + json.dumps(
        {**schema, "x-guidance": {**JSON_STYLE, "lenient": lenient}}, ensure_ascii=False
    )
