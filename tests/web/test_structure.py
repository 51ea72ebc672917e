"""Schemas and tools that are pasted into the page's settings: what is sent, and what is refused with
which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.web.node import Node

IMPORTS = """import {
      argumentsOf, messageOf, structureFields, structureWords, Unusable,
    } from "./../../serve/page/structure.js";
    import { Answer } from "./../../serve/page/answer.js";
    import { asMarkdown, imported } from "./../../serve/page/store.js";"""
HANDLE = """
    const { schema = "", tools = "", calls, node, chunks, conversation } = ask;
    if (calls) return calls.map(argumentsOf);
    if (node) return messageOf(node);
    if (conversation) return [imported(conversation), asMarkdown(conversation)];
    if (chunks) {
      const answer = new Answer();
      for (const chunk of chunks) answer.take(chunk);
      return answer.calls;
    }
    try {
      return [structureFields(schema, tools), structureWords(schema, tools)];
    } catch (error) {
      if (!(error instanceof Unusable)) throw error;
      return error.message;
    }
"""
SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
ADD = {"name": "add", "description": "Add", "parameters": SUM}


def told(node: Node, **fields: Any) -> Any:
    return node.ask({name: json.dumps(value) for name, value in fields.items()})


def test_nothing_is_sent_where_nothing_is_set(node: Node) -> None:
    assert node.ask({"schema": " \n", "tools": ""}) == [{}, ""]


def test_a_schema_and_tools_are_sent_in_the_endpoints_fields(node: Node) -> None:
    fields, words = told(
        node, schema=SUM, tools=[ADD, {"type": "function", "function": ADD | {"name": "b"}}]
    )
    assert fields["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SUM},
    }
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["add", "b"]
    assert fields["tools"][0] == {"type": "function", "function": ADD}
    assert words == "answers in JSON, 2 tools"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("[]", "a schema is an object"),
        ('{"type": "int"}', 'did you mean "integer"?'),
        (
            '{"properties": {"a": {"items": {"type": "str"}}}}',
            'properties.a.items: "str" is no type',
        ),
        ('{"properties": []}', '"properties" is an object'),
        ('{"required": "a"}', '"required" is a list of names'),
        ('{"enum": []}', '"enum" is a list of values'),
        ('{"anyOf": {}}', '"anyOf" is a list of schemas'),
        ('{"type": "object"\n "properties": {}}', "in line 2"),
        ("{'type': 'object'}", "this is no JSON"),
        ('{"items": ' * 70 + "{}" + "}" * 70, "deeper than 64 levels"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_here(node: Node, schema: str, words: str) -> None:
    assert words in node.ask({"schema": schema})


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (ADD, "tools are a list"),
        (["add"], "tool 1: a tool is an object"),
        ([ADD, {"name": "no spaces"}], 'tool 2: "name" is up to 64 letters'),
        ([ADD, ADD], "two tools are called add"),
        ([{"type": "web_search"}], "only functions are called"),
        ([{"name": "a", "parameters": [1]}], 'a: "parameters" is a schema'),
        ([{"name": "a", "parameters": {"type": "text"}}], 'a.parameters: "text" is no type'),
        ([ADD | {"name": f"a{n}"} for n in range(129)], "129 tools, at most 128"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_here(node: Node, tools: Any, words: str) -> None:
    assert words in told(node, tools=tools)


def test_calls_of_the_stream_become_messages_with_their_results(node: Node) -> None:
    call = {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    delta = {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    (kept,) = node.ask({"chunks": [delta]})
    assert kept == {"id": "c1", "name": "add", "arguments": '{"a": 1}'}
    said = node.ask({"node": {"role": "assistant", "text": "", "calls": [kept]}})
    assert said["tool_calls"] == [{name: call[name] for name in ("id", "type", "function")}]
    result = node.ask({"node": {"role": "tool", "text": "2", "call": "c1", "name": "add"}})
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}


def test_arguments_are_shown_by_name(node: Node) -> None:
    calls = [
        {"arguments": '{"a": 1, "b": "two", "c": [3]}'},
        {"arguments": "[1]"},
        {"arguments": "{"},
    ]
    assert node.ask({"calls": calls}) == [
        [["a", "1"], ["b", "two"], ["c", "[3]"]],
        [["", "[1]"]],
        [["", "{"]],
    ]


def test_calls_and_results_are_exported_and_imported(node: Node) -> None:
    call = {"id": "c1", "name": "add", "arguments": '{"a": 1}'}
    nodes: dict[str, Any] = {
        "aaaaaaaa": {"role": "user", "parent": "", "text": "1 + 1?"},
        "bbbbbbbb": {
            "role": "assistant",
            "parent": "aaaaaaaa",
            "text": "",
            "calls": [call, {"id": 1}],
        },
        "cccccccc": {
            "role": "tool",
            "parent": "bbbbbbbb",
            "text": "2",
            "call": "c1",
            "name": "add",
        },
    }
    for id, one in nodes.items():
        one |= {"id": id, "at": 1}
    given = {"id": "dddddddd", "title": "t", "system": "", "leaf": "cccccccc", "nodes": nodes}
    found, text = node.ask({"conversation": given})
    assert found["nodes"]["bbbbbbbb"]["calls"] == [call], "what is no call is left out"
    assert found["nodes"]["cccccccc"]["call"] == "c1"
    assert "Calls `add`" in text
    assert "## Result of add" in text
