"""The flags of an experiment: each field of its `Options` is one, and the docstring below the field
is the help."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from moa.cli.command_line import described
from moa.errors import UsageError

T = TypeVar("T")


def one_of(default: T, choices: Collection[str]) -> T:
    """A field whose words, or whose one word, must be among `choices`."""
    found: T = dataclasses.field(default=default, metadata={"choices": list(choices)})
    return found


def add_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """A flag for each field: `a_word` is `--a-word`, a tuple takes several values, a bool has a
    `--no-` form."""
    kinds = get_type_hints(options)
    says = {
        name: text for cls in reversed(options.__mro__) for name, text in described(cls).items()
    }
    for field in dataclasses.fields(options):
        kind = kinds[field.name]
        default = cast(Any, field.default)
        how: dict[str, Any] = {
            "default": default,
            "help": says.get(field.name, "").replace("%", "%%"),
        }
        flag = "--" + field.name.replace("_", "-")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **how)
            continue
        many = get_origin(kind) is tuple
        shown = " ".join(map(str, default)) if many else str(default)
        how["help"] += f" (default: {shown})".replace("%", "%%") if shown else ""
        if "choices" in field.metadata:
            how["choices"] = field.metadata["choices"]
            how["metavar"] = "{" + ",".join(how["choices"]) + "}"
        else:
            how["metavar"] = (get_args(kind)[0] if many else kind).__name__.upper()
        parser.add_argument(
            flag,
            type=get_args(kind)[0] if many else kind,
            **(how | ({"nargs": "*"} if many else {})),
        )


def options_from(options: type[T], arguments: argparse.Namespace) -> T:
    """The options that were given. A number is at least 1, or 0 where 0 is the default; a fraction
    at least 0."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value = getattr(arguments, field.name)
        values[field.name] = value = tuple(value) if isinstance(value, list) else value
        for one in value if isinstance(value, tuple) else (value,):
            least = 0 if isinstance(one, float) or field.default == 0 else 1
            if isinstance(one, int | float) and one < least and not isinstance(one, bool):
                raise UsageError(
                    f"--{field.name.replace('_', '-')} must be at least {least}, not {one}"
                )
    return options(**values)
