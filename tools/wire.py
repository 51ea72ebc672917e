"""The generated parts of docs/wire-protocol.md: messages, error codes and close codes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import msgspec

from moa.wire import codes, messages

_TYPES = (
    "SessionId",
    "TokenId",
    "Ids",
    "Position",
    "Round",
    "Count",
    "Milliseconds",
    "Digest",
    "Parent",
    "NegLogProb",
    "Name",
    "Top",
    "RowRange",
    "RecordDtype",
    "Finish",
)
"""Names in `moa.wire.messages` that stand for a type of fields."""


def message_lists(direction: UnionType) -> str:
    """Every message of one direction: its tag, what it is for, and its fields in order, with
    defaults."""
    return "\n\n".join(_message(kind) for kind in get_args(direction))


def structure_lists() -> str:
    """The structures inside messages."""
    kinds = (
        messages.Sampling,
        messages.Penalties,
        messages.ChatMessage,
        messages.Usage,
        messages.RecordContract,
        messages.WireLimits,
    )
    return "\n\n".join(_message(kind) for kind in kinds)


def type_table() -> str:
    """The types of fields that have a name of their own: how each is encoded, and its range."""
    source = Path(messages.__file__).read_text(encoding="utf-8")
    notes = {
        name: " ".join(note.split())
        for name, note in re.findall(
            r'^([A-Z]\w+) = [^\n]*\n"""(.*?)"""', source, re.MULTILINE | re.DOTALL
        )
    }
    rows = [
        f"| `{name}` | {_encoding(getattr(messages, name))} | {notes.get(name, '')} |"
        for name in _TYPES
    ]
    return "\n".join(["| type | encoding and range | what it is |", "|---|---|---|", *rows])


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
        "types": type_table(),
        "codes": code_table(),
        "closes": close_table(),
    }
    for name, text in parts.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        document = pattern.sub(lambda found, text=text: f"{found[1]}{text}{found[2]}", document)  # type: ignore[misc]
    return document


def _message(kind: type[msgspec.Struct]) -> str:
    info = msgspec.structs.fields(kind)
    notes = _field_notes(inspect.getsource(kind))
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
        row = f"* `{field.name}: {_annotation(kind, field.name)}{default}`"
        rows.append(f"{row}: {notes[field.name]}" if field.name in notes else row)
    note = " ".join((kind.__doc__ or "").split())
    return "\n".join([title, "", note, "", *rows])


def _annotation(kind: type, name: str) -> str:
    text = str(kind.__annotations__[name])
    text = re.sub(
        r"Annotated\[((?:[^\[\],]|\[(?:[^\[\]]|\[[^\]]*\])*\])+), Meta\(([^)]*)\)\]",
        r"\1 (\2)",
        text,
    )
    return text.replace("|", "or")


def _encoding(kind: Any) -> str:
    """How a value of a type is encoded, and which values it may have, in words."""
    if get_origin(kind) is Literal:
        return "str: " + ", ".join(f'`"{value}"`' for value in get_args(kind))
    if get_origin(kind) is tuple:
        return "array of two integers, as a `Position` each"
    base, meta = get_args(kind)
    if base is bytes:
        return f"bin of {meta.max_length} bytes"
    if base is str:
        return f"str of at most {meta.max_length} characters"
    if base not in (int, float):
        return f"array of at most {meta.max_length} integers, as a `TokenId` each"
    most = meta.le if meta.lt is None else meta.lt - 1
    return f"{'integer' if base is int else 'float'}, {meta.ge} to {most}"


def _field_notes(source: str) -> dict[str, str]:
    """Docstrings below the fields of a class."""
    found = re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
    return {name: " ".join(note.split()) for name, note in found}


def _member_notes(source: str) -> dict[str, str]:
    """Docstrings below assignments, which Python does not keep."""
    found = re.findall(
        r'^    ([A-Z_]+) = [^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL
    )
    return {name: " ".join(note.split()) for name, note in found}
