"""What answers must match: `--json-schema FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from edge_client.device import Device
from moa.errors import UsageError
from moa.grammar.spec import MAX_BYTES, Grammar
from moa.safe_text import safe_line


def add(command: argparse.ArgumentParser) -> None:
    """The flag."""
    group = command.add_argument_group("structure")
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="answer in JSON that fits this schema")


def read_schema(path: Path | None) -> Grammar | None:
    """The schema in the file that the flag names."""
    if path is None:
        return None
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is too large", hint=f"at most {MAX_BYTES} bytes")
        return Grammar.of_schema(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a JSON schema: {safe_line(str(error))}") from None


def check_schema(schema: Grammar | None, path: Path | None, device: Device) -> None:
    """Refuse a schema that cannot be followed, by its file's name."""
    try:
        if schema is not None:
            device.grammars.compile(schema)
    except UsageError as error:
        raise UsageError(f"the schema in {path} cannot be used: {error}", hint=error.hint) from None
