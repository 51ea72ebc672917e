"""What an answer must match, as both ends and the wire write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moa.errors import UsageError

MAX_BYTES = 2**16
"""Longest grammar."""
MAX_DEPTH = 64
"""Brackets in brackets: compilers recurse."""
MAX_REMAINDERS = 10_000
"""Of a `multipleOf`, or of several that hold together: each is a state, and 10,000 take 30 ms."""
MAX_INTERSECTED = 12
"""Patterns that must all match one text: the states multiply. 12 take 30 ms, each more 2.3 times
as long."""
Kind = Literal["json_schema", "regex", "lark"]
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most programs write it: free white space would let a weak model write nothing else, and
leaves less that is known in advance."""


class GrammarError(UsageError):
    """A grammar cannot be compiled, is too large, or needs too much work for a token."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A JSON schema, a regular expression, or a grammar in llguidance's Lark dialect."""

    kind: Kind
    text: Annotated[str, Meta(max_length=MAX_BYTES)]

    @classmethod
    def of_schema(cls, schema: dict[str, Any] | bool) -> Grammar:
        """The JSON texts that a schema allows."""
        return cls("json_schema", json.dumps(schema, ensure_ascii=False))

    def check(self) -> None:
        """Bound what the compiler gets to see; else a `GrammarError`."""
        size = len(self.text.encode(errors="replace"))
        if size > MAX_BYTES:
            raise GrammarError(f"a grammar of {size} bytes, at most {MAX_BYTES}")
        deepest = _deepest(_bare(self))
        if deepest > MAX_DEPTH:
            raise GrammarError(
                f"a grammar with {deepest} brackets in one another, at most {MAX_DEPTH}"
            )
        _check_intersections(self)


_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_LARK_TEXT = re.compile(
    r'"(?:[^"\\\n]|\\.)*"?'  # a text
    r"|/(?![/*])(?:[^/\\\n]|\\.)*/?"  # a regular expression, counted by itself
    r"|//[^\n]*|\#[^\n]*",  # comments
    re.DOTALL,
)
_REGEX_TEXT = re.compile(r"\\.", re.DOTALL)


def _bare(grammar: Grammar) -> list[str]:
    """The parts of a grammar whose brackets nest, without those that are only texts."""
    match grammar.kind:
        case "json_schema":
            return [_JSON_TEXT.sub('""', grammar.text)]
        case "regex":
            return [_REGEX_TEXT.sub("", grammar.text)]
        case _:
            texts = _LARK_TEXT.findall(grammar.text)
            within = [one for one in texts if one.startswith("/") and not one.startswith("//")]
            inner = [_REGEX_TEXT.sub("", one) for one in within]
            return [_LARK_TEXT.sub('""', grammar.text), *inner]


def _deepest(parts: list[str]) -> int:
    """The most brackets in one another. A closing one counts for one that was opened: a class
    such as `[)]` of a regular expression closes no group."""
    deepest = 0
    for part in parts:
        open_ones: list[str] = []
        for character in part:
            if character in "([{":
                open_ones.append(_CLOSES[character])
                deepest = max(deepest, len(open_ones))
            elif open_ones and character == open_ones[-1]:
                open_ones.pop()
    return deepest


_CLOSES = {"(": ")", "[": "]", "{": "}"}


def _check_intersections(grammar: Grammar) -> None:
    """Refuse by name what is known to make a compiler build too much, before it begins."""
    match grammar.kind:
        case "json_schema":
            try:
                schema = json.loads(grammar.text)
            except (ValueError, RecursionError):
                return  # the compiler says where it is wrong
            for one in _schemas(schema):
                _check_together(one)
        case "lark":
            for line in _LARK_TEXT.sub('""', grammar.text).splitlines():
                _check_count(1 + line.count("&"))
        case _:
            pass


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object within a schema but the members of an `allOf`, which are looked at with the
    schema that they belong to: that some are no schemas does no harm."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += _beside_all_of(one)
        elif isinstance(one, list):
            waiting += one


def _beside_all_of(schema: dict[str, Any]) -> Iterator[Any]:
    """What is within a schema and the members of its `allOf`."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        for key, inner in one.items():
            if key == "allOf" and isinstance(inner, list):
                waiting += [member for member in inner if isinstance(member, dict)]
            else:
                yield inner


def _check_together(schema: dict[str, Any]) -> None:
    """What holds for the same value: the keywords of a schema and of all in its `allOf`."""
    factors: list[Decimal] = []
    patterns = 0
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        if (number := _decimal(one.get("multipleOf"))) is not None:
            factors.append(number)
        patterns += isinstance(one.get("pattern"), str)
        within = one.get("allOf")
        waiting += within if isinstance(within, list) else ()
    if factors and (remainders := _remainders(factors)) > MAX_REMAINDERS:
        raise GrammarError(
            f"multipleOf: numbers with {remainders} different remainders cannot be followed, "
            f"at most {MAX_REMAINDERS}"
        )
    _check_count(patterns)


def _check_count(patterns: int) -> None:
    if patterns > MAX_INTERSECTED:
        raise GrammarError(
            f"{patterns} patterns that must all match one text, at most {MAX_INTERSECTED}"
        )


def _decimal(value: Any) -> Decimal | None:
    """A number as it is written; None for what is none, or is no factor."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    sensible = number.is_finite() and number > 0 and abs(number.adjusted()) <= _MOST_DIGITS
    return number.normalize() if sensible else None


_MOST_DIGITS = 40
"""Of numbers that are looked at; the compiler refuses longer ones."""


def _remainders(factors: list[Decimal]) -> int:
    """The least number that all of them divide, in units of their last digit; or one that is too
    large already."""
    places = max(0, *(-int(one.as_tuple().exponent) for one in factors))
    found = 1
    for one in factors:
        found = math.lcm(found, int(one.scaleb(places)))
        if found > MAX_REMAINDERS:
            break
    return found
