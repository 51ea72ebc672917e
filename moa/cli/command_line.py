"""The argument parser of every program: a mistake is one line. And flags from a settings class: a
field's docstring is the help of its flag, and its line in the documentation."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
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
        # Of a docstring, Python takes the indentation away since 3.13.
        self.description = self.description and inspect.cleandoc(self.description)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        if message.endswith(f"required: {COMMAND}"):
            commands = next(
                one for one in self._actions if isinstance(one, argparse._SubParsersAction)
            )
            message = f"name a command: {', '.join(commands.choices)}"
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
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                found[field.target.id] = " ".join(text.split())
    return found


def add_flags(
    group: Any, cls: type, metavars: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> None:
    """A flag for each of these fields, with the field's name, type and docstring.

    The parser's default is None, so that `given_fields` can tell which flags were used; the class
    holds the real default, but for a command's own `defaults`.
    """
    words = described(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in metavars:
            flag = "--" + field.name.replace("_", "-")
            text = words.get(field.name, "").removesuffix(".").replace("%", "%%")
            hint = hints[field.name]
            metavar = metavars[field.name]
            if hint is bool:
                group.add_argument(flag, action="store_const", const=True, help=text)
            elif typing.get_origin(hint) is tuple:
                flag = flag.removesuffix("s")
                text = f"{text}; may be repeated"
                group.add_argument(
                    flag, dest=field.name, action="append", metavar=metavar, help=text
                )
            else:
                kind = next(
                    (kind for kind in (int, float, Path) if hint in (kind, kind | None)), str
                )
                value = (defaults or {}).get(field.name, field.default)
                value = f"{value:g}" if isinstance(value, float) else value
                default = "" if value in ("", None) else f" (default: {value})"
                group.add_argument(flag, type=kind, metavar=metavar, help=text + default)


def given_fields(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` that were set by a flag on the command line."""
    names = {field.name for field in dataclasses.fields(cls)}
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in names and value is not None
    }
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
