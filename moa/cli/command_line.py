"""The argument parser of every program: a mistake is one line. And flags from a settings class: a
field's docstring is the help of its flag, and its line in the documentation."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

COMMAND = "COMMAND"
"""What a program with subcommands calls them."""


class CommandParser(argparse.ArgumentParser):
    """`argparse`'s own parser puts its whole usage before a mistake: a screenful where there are
    many options."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if self.description:
            # Python takes the indentation of a docstring away since 3.13.
            self.description = inspect.cleandoc(self.description)

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and end with exit code 2."""
        if message.endswith(f"required: {COMMAND}"):
            for action in self._actions:
                if isinstance(action, argparse._SubParsersAction):
                    message = f"name a command: {', '.join(action.choices)}"
        self.exit(2, f"{self.prog}: error: {message} (--help shows the options)\n")


@functools.cache
def described(cls: type) -> dict[str, str]:
    """The docstring of each field as one line; fields without a docstring are left out.

    Python does not keep docstrings of attributes, so they are read from the source. Without the
    source there are none.
    """
    try:
        (body,) = ast.parse(inspect.getsource(cls)).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    described_fields: dict[str, str] = {}
    for statement, following in itertools.pairwise(body.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = _text_of(following)
        if text is not None:
            described_fields[statement.target.id] = " ".join(text.split())
    return described_fields


def _text_of(statement: ast.stmt) -> str | None:
    """The text of a statement that is nothing but a text, as a docstring is."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return None
    value = statement.value.value
    return value if isinstance(value, str) else None


def add_flags(
    group: Any, cls: type, metavars: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> None:
    """A flag for each of these fields, with the field's name, type and docstring.

    The parser's default is None, so that `given_fields` can tell which flags were used; the class
    holds the real default, but for a command's own `defaults`.
    """
    descriptions = described(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in metavars:
            continue
        flag = "--" + field.name.replace("_", "-")
        text = descriptions.get(field.name, "").removesuffix(".").replace("%", "%%")
        hint = hints[field.name]
        metavar = metavars[field.name]
        if hint is bool:
            group.add_argument(flag, action="store_const", const=True, help=text)
        elif typing.get_origin(hint) is tuple:
            group.add_argument(
                flag.removesuffix("s"),
                dest=field.name,
                action="append",
                metavar=metavar,
                help=f"{text}; may be repeated",
            )
        else:
            value = (defaults or {}).get(field.name, field.default)
            group.add_argument(
                flag, type=_parsed_as(hint), metavar=metavar, help=text + _default_text(value)
            )


def _parsed_as(hint: Any) -> type:
    """The type that the text of a flag is made into, for a field of this type."""
    for kind in (int, float, Path):
        if hint in (kind, kind | None):
            return kind
    return str


def _default_text(value: Any) -> str:
    """What the help says of a flag's default."""
    if value is None or value == "":
        return ""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f" (default: {shown})"


def given_fields(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` that were set by a flag on the command line."""
    names = {field.name for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        if name in names and value is not None:
            given[name] = tuple(value) if isinstance(value, list) else value
    return given
