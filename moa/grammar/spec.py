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
"""Bytes of the longest grammar."""
MAX_DEPTH = 64
"""Brackets in brackets: compilers recurse."""
MAX_REMAINDERS = 10_000
"""Remainders of a `multipleOf`, or of several that hold together: each is a state, and 10,000 take
30 ms."""
MAX_INTERSECTED = 12
"""Patterns that must all match one text: the states multiply. 12 take 30 ms, each more 2.3 times
as long."""
Kind = Literal["json_schema", "regex", "lark"]
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most programs write it: free white space would let a weak model write nothing else, and
leaves less that is known in advance."""


_TOGETHER = ("allOf", "anyOf", "oneOf", "if", "$ref", "unevaluatedProperties")
"""Beside these in a schema, `properties` need not be all properties of the object."""


class GrammarError(UsageError):
    """A grammar cannot be compiled, is too large, or needs too much work for a token."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A JSON schema, a regular expression, or a grammar in llguidance's Lark dialect."""

    kind: Kind
    text: Annotated[str, Meta(max_length=MAX_BYTES)]

    @classmethod
    def of_schema(cls, schema: dict[str, Any] | bool) -> Grammar:
        """The JSON texts that a schema allows, where an object that lists its properties has no
        others unless `additionalProperties` says so."""
        try:
            return cls("json_schema", json.dumps(closed(schema), ensure_ascii=False))
        except RecursionError:
            raise GrammarError(f"a schema nests too deep: at most {MAX_DEPTH} brackets") from None

    def check(self) -> None:
        """Raise a `GrammarError` for a grammar that is too large, nests too deep, or is known to
        make the compiler build too much: none of these is given to it."""
        size = len(self.text.encode(errors="replace"))
        if size > MAX_BYTES:
            raise GrammarError(f"a grammar of {size} bytes, at most {MAX_BYTES}")
        deepest = _deepest(_bare(self))
        if deepest > MAX_DEPTH:
            raise GrammarError(
                f"a grammar with {deepest} brackets in one another, at most {MAX_DEPTH}"
            )
        _check_intersections(self)


def closed(schema: Any) -> Any:
    """Return a JSON schema in which every object that lists its properties has no others. By JSON
    Schema's own default it may have more; but no program can use what the model made up, and a weak
    one makes up properties until a limit cuts it. Where parts of a schema hold together (`allOf`),
    they stay as they are."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict):
            found[name] = {key: closed(part) for key, part in value.items()}
        elif name in ("items", "prefixItems", "anyOf", "oneOf"):
            found[name] = closed(value)
        else:
            found[name] = value
    lists_properties = isinstance(schema.get("properties"), dict)
    says_more = schema.keys() & {"additionalProperties", "patternProperties", *_TOGETHER}
    if lists_properties and not says_more:
        found["additionalProperties"] = False
    return found


_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_LARK_TEXT = re.compile(
    r'"(?:[^"\\\n]|\\.)*"?'  # a text
    r"|/(?![/*])(?:[^/\\\n]|\\.)*/?"  # a regular expression, counted by itself
    r"|//[^\n]*|\#[^\n]*",  # comments
    re.DOTALL,
)
_REGEX_TEXT = re.compile(r"\\.", re.DOTALL)


def _bare(grammar: Grammar) -> list[str]:
    """The parts of a grammar in which brackets nest, without brackets that are only text, such as
    those in strings and comments. Regular expressions within a Lark grammar are parts of their
    own."""
    match grammar.kind:
        case "json_schema":
            return [_JSON_TEXT.sub('""', grammar.text)]
        case "regex":
            return [_REGEX_TEXT.sub("", grammar.text)]
        case _:
            parts = [_LARK_TEXT.sub('""', grammar.text)]
            for text in _LARK_TEXT.findall(grammar.text):
                is_regex = text.startswith("/") and not text.startswith("//")
                if is_regex:
                    parts.append(_REGEX_TEXT.sub("", text))
            return parts


def _deepest(parts: list[str]) -> int:
    """How deep brackets nest in any of these parts. A closing bracket counts only if it fits the
    one that was opened last: the class `[)]` of a regular expression closes no group."""
    deepest = 0
    for part in parts:
        awaited: list[str] = []  # the closing brackets of those that are open
        for character in part:
            if character in _CLOSING:
                awaited.append(_CLOSING[character])
                deepest = max(deepest, len(awaited))
            elif awaited and character == awaited[-1]:
                awaited.pop()
    return deepest


_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _check_intersections(grammar: Grammar) -> None:
    """Raise a `GrammarError` for intersections, conditions that must hold together, of which the
    compiler would build too many states: numbers that several `multipleOf` must divide, and texts
    that many patterns must match."""
    match grammar.kind:
        case "json_schema":
            try:
                schema = json.loads(grammar.text)
            except (ValueError, RecursionError):
                return  # the compiler says where it is wrong
            for part in _schemas(schema):
                _check_together(part)
        case "lark":
            for line in _LARK_TEXT.sub('""', grammar.text).splitlines():
                _check_patterns(1 + line.count("&"))
        case _:
            pass  # a regular expression has no intersections


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object within a JSON schema, itself among them, but the members of an `allOf`:
    those are looked at with the schema that they belong to. Some of the objects are no schemas,
    which does no harm."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += _within(value)
        elif isinstance(value, list):
            waiting += value


def _within(schema: dict[str, Any]) -> Iterator[Any]:
    """What is within a schema or a member of its `allOf`; the members themselves are left out."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        for key, value in part.items():
            if key == "allOf" and isinstance(value, list):
                waiting += [member for member in value if isinstance(member, dict)]
            else:
                yield value


def _check_together(schema: dict[str, Any]) -> None:
    """Raise a `GrammarError` if the conditions for one value are too many to follow at once: the
    `multipleOf` and `pattern` of a schema, and of all schemas in its `allOf`."""
    factors: list[Decimal] = []
    patterns = 0
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        factor = _factor(part.get("multipleOf"))
        if factor is not None:
            factors.append(factor)
        if isinstance(part.get("pattern"), str):
            patterns += 1
        members = part.get("allOf")
        if isinstance(members, list):
            waiting += members
    remainders = _remainders(factors)
    if remainders > MAX_REMAINDERS:
        raise GrammarError(
            f"multipleOf: numbers with {remainders} different remainders cannot be followed, "
            f"at most {MAX_REMAINDERS}"
        )
    _check_patterns(patterns)


def _check_patterns(count: int) -> None:
    """Raise if so many patterns are too many to match one text together."""
    if count > MAX_INTERSECTED:
        raise GrammarError(
            f"{count} patterns that must all match one text, at most {MAX_INTERSECTED}"
        )


def _factor(value: Any) -> Decimal | None:
    """The value of a `multipleOf` as an exact decimal, as it is written; None for what is no
    number, or cannot be a factor."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    if not number.is_finite() or number <= 0 or abs(number.adjusted()) > _MOST_DIGITS:
        return None
    return number.normalize()


_MOST_DIGITS = 40
"""Digits before or after the point of a factor that is looked at; the compiler refuses longer
ones."""


def _remainders(factors: list[Decimal]) -> int:
    """How many remainders a number can have by all of these factors together: the least number that
    all of them divide, in units of their last digit. It may stop at one that is too large already;
    1 without factors."""
    places = max((-int(factor.as_tuple().exponent) for factor in factors), default=0)
    places = max(0, places)
    multiple = 1
    for factor in factors:
        multiple = math.lcm(multiple, int(factor.scaleb(places)))
        if multiple > MAX_REMAINDERS:
            break
    return multiple
