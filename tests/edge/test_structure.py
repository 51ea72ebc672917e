"""`--json-schema`: what the command line makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_client.cli.options import read_schema
from moa.errors import UsageError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


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


@pytest.mark.parametrize(
    ("content", "why"),
    [("[]", "not a JSON schema"), ("{", "not a JSON schema"), ('"' + "x" * 70_000 + '"', "too large")],
)
def test_a_file_that_is_none_is_one_line(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "schema").write_text(content)
    with pytest.raises(UsageError, match=why):
        read_schema(tmp_path / "schema")
