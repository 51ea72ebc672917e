"""The generated parts of docs/wire-protocol.md: messages, error codes and close codes."""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import get_args

import msgspec

from moa.wire import codes, messages


def message_lists(direction: UnionType) -> str:
    """Every message of one direction: its tag, what it is for, and its fields in order, with
    defaults."""
    return "\n\n".join(_message(kind) for kind in get_args(direction))


def structure_lists() -> str:
    """The structures inside messages."""
    kinds = (messages.Sampling, messages.RecordContract, messages.WireLimits)
    return "\n\n".join(_message(kind) for kind in kinds)


def code_table() -> str:
    """All error codes, and which are worth another try."""
    notes = _member_notes(Path(codes.__file__).read_text(encoding="utf-8"))
    rows = [
        f"| `{code.value}` | {'yes' if code in codes.RETRYABLE else 'no'} | {notes[code.name]} |"
        for code in codes.Code
    ]
    return "\n".join(["| code | retry | meaning |", "|---|---|---|", *rows])


def close_table() -> str:
    """All websocket close codes in use."""
    notes = _member_notes(Path(codes.__file__).read_text(encoding="utf-8"))
    # Python 3.13 puts an integer of its own, `__firstlineno__`, into every class.
    members = {
        n: value
        for n, value in vars(codes.CloseCode).items()
        if isinstance(value, int) and n.isupper()
    }
    rows = [f"| {value} | `{name}` | {notes.get(name, '')} |" for name, value in members.items()]
    return "\n".join(["| code | name | when |", "|---|---|---|", *rows])


def filled(document: str) -> str:
    """The document with its generated parts written anew."""
    parts = {
        "client": message_lists(messages.ClientMessage),
        "server": message_lists(messages.ServerMessage),
        "structures": structure_lists(),
        "codes": code_table(),
        "closes": close_table(),
    }
    for name, text in parts.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        document = pattern.sub(lambda found, text=text: f"{found[1]}{text}{found[2]}", document)  # type: ignore[misc]
    return document


def _message(kind: type[msgspec.Struct]) -> str:
    info = msgspec.structs.fields(kind)
    tag = kind.__struct_config__.tag
    title = f'### {kind.__name__} `"{tag}"`' if tag else f"### {kind.__name__}"
    rows = []
    for field in info:
        if field.default is not msgspec.NODEFAULT:
            default = (
                f" = {field.default!r}"
                if not isinstance(field.default, msgspec.Struct)
                else ", its defaults"
            )
        elif field.default_factory is not msgspec.NODEFAULT:
            default = f" = {field.default_factory()!r}"
        else:
            default = ""
        rows.append(f"* `{field.name}: {_annotation(kind, field.name)}{default}`")
    note = " ".join((kind.__doc__ or "").split())
    return "\n".join([title, "", note, "", *rows])


def _annotation(kind: type, name: str) -> str:
    text = str(kind.__annotations__[name])
    text = re.sub(r"Annotated\[((?:[^\[\],]|\[[^\]]*\])+), Meta\(([^)]*)\)\]", r"\1 (\2)", text)
    return text.replace("|", "or")


def _member_notes(source: str) -> dict[str, str]:
    """Docstrings below assignments, which Python does not keep."""
    found = re.findall(
        r'^    ([A-Z_]+) = [^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL
    )
    return {name: " ".join(note.split()) for name, note in found}
