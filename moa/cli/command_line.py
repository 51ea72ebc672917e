"""The argument parser of every program: a mistake is one line. And flags from a settings class: a
field's docstring is the help of its flag, and its line in the documentation."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from moa.safe_text import safe_line

COMMAND = "COMMAND"
"""What a program with subcommands calls them."""
_MISSING = "the following arguments are required"
"""How `argparse` begins to say that a flag or a word is missing."""
_LONGEST_WORD = 60
"""Characters of an unknown flag, or of a word that no command takes, that are shown."""
_ADDRESS_FLAGS = {
    "ws": "--verifier",
    "wss": "--verifier",
    "http": "--upstream",
    "https": "--upstream",
}
"""The flag that an address belongs to, by its scheme."""
_KEYS_FILE = "--upstream-key-file"
_KEY_FLAGS = ("--upstream-key", "--upstream-api-key", "--api-key", "--key")
"""Flags that others have for a key, and we have not."""
_NO_KEY = (
    "every user of a machine can read arguments. Put the key into the variable MOA_UPSTREAM_KEY, or"
    f" into a file for {_KEYS_FILE}"
)


class CommandParser(argparse.ArgumentParser):
    """`argparse`'s own parser puts its whole usage before a mistake: a screenful where there are
    many options.

    The beginning of a flag is not the flag: `--upstream-key SECRET` would be taken as the name of a
    file, and shown in an error.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **settings)
        self._words: list[str] = []
        """What is being parsed."""
        self.commands_elsewhere: Callable[[], Mapping[str, str]] = dict
        """Commands that other programs have, by name, with what starts each. It is called where a
        command is not known."""
        if self.description:
            # Python takes the indentation of a docstring away since 3.13.
            self.description = inspect.cleandoc(self.description)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words of this command. A flag that it does not know is refused here and not by
        the parser above it, because only this one can tell which was meant."""
        self._words = sys.argv[1:] if args is None else list(args)
        found, not_understood = super().parse_known_args(args, namespace)
        unknown = self._unknown_flag(not_understood) or self._flag_missing(not_understood)
        if unknown:
            self.error(unknown)
        return found, not_understood

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices. Of a command the one that was probably meant
        is named, where argparse would list all."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(self._unknown_command(str(value), action.choices))
        super()._check_value(action, value)

    def _unknown_command(self, name: str, known: Collection[str]) -> str:
        """What to say of a command that this program does not have."""
        for flag in _KEY_FLAGS:
            if flag in self._words[: self._words.index(name)]:
                return f"there is no flag {flag}: {_NO_KEY}"  # and the name may be the key
        line = f"there is no command {safe_line(name, _LONGEST_WORD)}"
        elsewhere = self.commands_elsewhere()
        if name in elsewhere:
            return f"{line} here: {elsewhere[name]}"
        close = difflib.get_close_matches(name, known, n=1)
        if not close:
            close = [elsewhere[one] for one in difflib.get_close_matches(name, elsewhere, n=1)]
        if not close:
            return f"{line}: name one of {', '.join(known)}"
        return f"{line}: did you mean {close[0]}?"

    def _flag_missing(self, words: Iterable[str]) -> str:
        """What to say of the first of these words, which this command does not take, that belongs
        behind a flag; empty if there is none."""
        for word in words:
            if word.startswith("-"):
                return ""  # a flag, and what follows it may be its value
            flag = "--target"  # a server's command: what else would it be of?
            scheme, separator, _ = word.partition("://")
            if separator:
                flag = _ADDRESS_FLAGS.get(scheme.lower(), "")
            elif "--target" not in self._option_string_actions and word == "local":
                flag = "--verifier"
            if flag in self._option_string_actions:
                shown = safe_line(word, _LONGEST_WORD)
                return f"{shown} has no flag: did you mean {flag} {shown}?"
        return ""

    def _unknown_flag(self, words: Iterable[str]) -> str:
        """What to say of the first flag among these words that this command does not know; empty
        if there is none."""
        known = [one for one in self._option_string_actions if one.startswith("--")]
        for word in words:
            flag = word.partition("=")[0]
            if word == "--":
                break  # what follows is no flag
            if not flag.startswith("--") or flag in known:
                continue
            line = f"there is no flag {safe_line(flag, _LONGEST_WORD)}"
            if flag in _KEY_FLAGS and _KEYS_FILE in known:
                return f"{line}: {_NO_KEY}"
            longer = [one for one in known if one.startswith(flag)]
            if len(longer) == 1:
                return f"{line}: did you mean {longer[0]}?"
            # Without the dashes, which all have: they would make any two short flags look alike.
            names = [one.removeprefix("--") for one in known]
            close = difflib.get_close_matches(flag.removeprefix("--"), names, n=1)
            return f"{line}: did you mean --{close[0]}?" if close else line
        return ""

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and end with exit code 2. What is missing may have been mistyped."""
        if message.startswith(_MISSING) and self._subparsers is None:
            message = self._unknown_flag(self._words) or message
        if message.endswith(f"required: {COMMAND}"):
            for action in self._actions:
                if isinstance(action, argparse._SubParsersAction):
                    message = f"name a command: {', '.join(action.choices)}"
        self.exit(2, f"{self.prog}: error: {message} (--help shows the options)\n")


@functools.cache
def described(cls: type) -> dict[str, str]:
    """The docstring of each field of a settings class as one line, by the field's name; fields
    without a docstring are left out.

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


class _Once(argparse.Action):
    """A flag that may be given once; argparse's own takes the last of several."""

    def __init__(self, *arguments: Any, otherwise: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._otherwise = otherwise

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take the value; refuse a second one, and say what to do otherwise."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, f"may be given once here: {self._otherwise}")
        setattr(namespace, self.dest, values)


def add_flags(
    group: Any,
    cls: type,
    metavars: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
    *,
    once: Mapping[str, str] | None = None,
) -> None:
    """Add a flag to a parser's group for each field of a settings class that `metavars` names, with
    the field's name, type and docstring. A metavar is what stands for the value in the help. Where a
    default is computed, the docstring ends with it, behind `Default:`.

    The parser's default is None, so that `given_fields` can tell which flags were used; the class
    holds the real default, but for a command's own `defaults`. A flag in `once` is refused the second
    time, with the words that `once` has for it.
    """
    descriptions = described(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in metavars:
            continue
        flag = "--" + field.name.replace("_", "-")
        description = descriptions.get(field.name, "").removesuffix(".").replace("%", "%%")
        text, _, computed = description.partition(". Default: ")
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
            only_once: dict[str, Any] = {}
            if once and field.name in once:
                only_once = {"action": _Once, "otherwise": once[field.name]}
            group.add_argument(
                flag,
                type=_parsed_as(hint),
                metavar=metavar,
                help=text + _default_text(computed if value is None else value),
                **only_once,
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
