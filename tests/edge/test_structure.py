"""`--json-schema` and `--tools`: what the command line makes of them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_client.cli.structure import Structure
from edge_client.device import Device
from moa.errors import UsageError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}]


def structure(folder: Path, **given: Any) -> Structure:
    files: dict[str, Any] = {"json_schema": None, "tools": None}
    for name, content in given.items():
        files[name] = folder / name
        files[name].write_text(content if isinstance(content, str) else json.dumps(content))
    return Structure.of(argparse.Namespace(**files))


def device(context: int = 1000) -> Any:
    """As much of an open client as a prompt needs."""
    return SimpleNamespace(device=Device.load(), shared=SimpleNamespace(max_context=context))


def generate(*arguments: str) -> Any:
    command = [sys.executable, "-c", "from edge_client.cli import main; main()", "generate", "--offline", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)


def test_an_answer_fits_the_schema_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "schema").write_text(json.dumps(SCHEMA))
    question = "Can you find name and age and answer in JSON: At the age of 32, Sofia moved to Denver."
    told = generate("-q", "--json-schema", str(tmp_path / "schema"), question)
    assert set(json.loads(told.stdout)) == {"name", "age"}, told.stderr
    (tmp_path / "schema").write_text(json.dumps({"properties": {"a": {"not": {}}}}))
    told = generate("-q", "--json-schema", str(tmp_path / "schema"), question)
    assert told.returncode == 2
    line = f"edge-client: error: the schema in {tmp_path}/schema cannot be used: json_schema at #/properties/a: Unimpl"
    assert told.stderr.decode().startswith(line)


def test_the_line_after_a_call_is_its_result(tmp_path: Path) -> None:
    shape, client = structure(tmp_path, tools=TOOLS), device()
    call = '{"name": "weather", "parameters": {"city": "Rome"}}'
    chat = [{"role": "user", "content": "How warm is it?"}, {"role": "assistant", "content": call}]
    prompt, asked = shape.question(client, [*chat, {"role": "user", "content": "20 degrees"}], 100)
    assert prompt is None
    text = client.device.codec.decode_all(asked["ids"])
    assert text.index('"weather"') < text.index("How warm is it?") < text.index(call) < text.index("20 degrees")
    compiled = client.device.grammars.compile(asked["grammar"])
    accepts = {one: compiled.matcher(0).accepts(client.device.codec.encode(one)) for one in (call, '{"name": "x"')}
    assert accepts == {call: True, '{"name": "x"': False}
    assert shape.called(client, call) == "weather"
    assert shape.called(client, "It is warm.") == ""
    assert Structure().question(client, chat, 100) == (chat, {})


def test_a_chat_with_tools_that_outgrows_the_context_goes_on_without_its_oldest_turns(tmp_path: Path) -> None:
    shape, client = structure(tmp_path, tools=TOOLS), device(context=400)
    chat = [{"role": role, "content": f"Line {number}."} for number in range(100) for role in ("user", "assistant")]
    _, asked = shape.question(client, [*chat, {"role": "user", "content": "And now?"}], 100)
    text = client.device.codec.decode_all(asked["ids"])
    assert len(asked["ids"]) <= 300
    assert "weather" in text
    assert "Line 1." not in text
    assert text.index("Line 99.") < text.index("And now?")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("json_schema", "[]", "not a JSON schema"),
        ("json_schema", "{", "not a JSON schema"),
        ("json_schema", '"' + "x" * 70_000 + '"', "too large"),
        ("tools", {"type": "function"}, "not a list of tools"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "not a list of tools"),
    ],
)
def test_a_file_that_is_none_is_one_line(name: str, content: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        structure(tmp_path, **{name: content})
