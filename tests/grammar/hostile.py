"""Grammars that are made to cost much."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from moa.grammar.spec import Grammar, Kind

KINDS: list[Kind] = ["regex", "lark", "json_schema"]
PATTERNS = (
    "(a|a)*b",
    "(a*)*b",
    ".*a.{SIZE}",
    "(.*)(.*)(.*)[^x]{SIZE}x",
    "(a{1,SIZE}){1,SIZE}",
    "\\p{L}{1,SIZE}",
    "((a{0,SIZE}){0,SIZE}){0,SIZE}b",
    "(?i)[a-z]{SIZE}|.*z",
    "(\\w+\\s?){SIZE}",
    "[^\\x00-\\x{10FFFF}]",
)


def doubling(depth: int, how: str) -> dict[str, Any]:
    """Every definition uses the one before twice."""
    parts: dict[str, Any] = {"x0": {"type": "integer"}}
    for number in range(1, depth):
        before = {"$ref": f"#/$defs/x{number - 1}"}
        one = {"type": "object", "properties": {"a": before, "b": before}}
        parts[f"x{number}"] = one if how == "object" else {how: [before, before]}
    return {"$defs": parts, "$ref": f"#/$defs/x{depth - 1}"}


def hostile() -> Iterator[Grammar]:
    for depth in (5, 10, 15, 20, 30, 500):
        for kind in ("object", "anyOf", "allOf"):
            yield Grammar.of_schema(doubling(depth, kind))
    for count in (10**3, 10**6, 10**9):
        for kind, bound in (("string", "Length"), ("array", "Items")):
            for name in (f"min{bound}", f"max{bound}"):
                yield Grammar.of_schema(
                    {"type": kind, name: count, "pattern": "^(a|b)*c$", "items": {"const": 1}}
                )
    for count in (100, 1000, 2000):
        yield Grammar.of_schema(
            {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}
        )
        yield Grammar.of_schema({"enum": [f"value {n}" for n in range(count)]})
    yield Grammar.of_schema({"type": "array", "items": {"$ref": "#"}})
    for size in (1, 10, 50, 250, 1000):
        for pattern in PATTERNS:
            yield Grammar("regex", pattern.replace("SIZE", str(size)))
            yield Grammar.of_schema(
                {"type": "string", "pattern": f"^{pattern.replace('SIZE', str(size))}$"}
            )
        yield Grammar("regex", "(" * size + "a" + ")*" * size)
        yield Grammar("lark", "start: " + " ".join(["a?"] * size) + '\na: "x" "y"?')
        yield Grammar("lark", f'start: a{{{size}}}\na: "x"')
        yield Grammar("lark", "start: " + '("x"?' * size + ")" * size)
    for body in ('a a | "x" |', '"a" a "a" | "a" | a a', "a", '"" a', "b\nb: a"):
        yield Grammar("lark", f"start: a\na: {body}")
    rng = random.Random(2)
    for _ in range(60):
        noise = "".join(rng.choices('{}[]()|*+?"\\a:,1 start', k=200))
        yield Grammar(rng.choice(KINDS), noise)
