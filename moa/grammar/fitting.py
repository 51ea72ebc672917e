"""Whether a JSON value fits a schema, for what no grammar has held to it. Pure, and bounded: schemas
come from strangers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

_MOST_STEPS = 10_000
"""Parts of the schema that are looked at, for each place of the value; with references they may be
exponentially many."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
_REMARKS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
    }
)
"""What says nothing of the value."""
_KEYWORDS = _REMARKS | frozenset(
    {
        "$ref",
        "$defs",
        "definitions",
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "properties",
        "required",
        "additionalProperties",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    }
)
"""What is understood. A `pattern` is not: Python's regular expressions may take for ever."""


def fits(value: Any, schema: Any) -> bool | None:
    """Whether a value fits a JSON schema; None if the schema says what is not understood here."""
    try:
        return _Fitting(schema).fits(value, schema)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        return None  # it is no schema, or too much of one


class _Fitting:
    """One value and one schema, in which references are looked up."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._left = _MOST_STEPS

    def fits(self, value: Any, schema: Any) -> bool | None:
        """Whether a value within ours fits a part of the schema; None: it cannot be told."""
        self._left -= 1
        if self._left < 0:
            return None
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            return None
        is_told = True if schema.keys() <= _KEYWORDS else None
        return _all(
            (
                *self._anything(value, schema),
                *self._combined(value, schema),
                *self._parts(value, schema),
                is_told,
            )
        )

    def _anything(self, value: Any, schema: Mapping[str, Any]) -> Iterable[bool]:
        """What a schema says of a value by itself."""
        if "type" in schema:
            types = schema["type"]
            yield any(_is(value, one) for one in ([types] if isinstance(types, str) else types))
        if "enum" in schema:
            yield any(_same(value, one) for one in schema["enum"])
        if "const" in schema:
            yield _same(value, schema["const"])
        if isinstance(value, str):
            yield from _within(len(value), schema, "minLength", "maxLength")
        elif _is(value, "number"):
            yield from _within(value, schema, "minimum", "maximum")
            if "exclusiveMinimum" in schema:
                yield value > schema["exclusiveMinimum"]
            if "exclusiveMaximum" in schema:
                yield value < schema["exclusiveMaximum"]
            if "multipleOf" in schema:
                yield Fraction(str(value)) % Fraction(str(schema["multipleOf"])) == 0

    def _combined(self, value: Any, schema: Mapping[str, Any]) -> Iterable[bool | None]:
        """What it says by other schemas of the same value."""
        if "$ref" in schema:
            yield self.fits(value, self._referred(schema["$ref"]))
        if "allOf" in schema:
            yield _all(self.fits(value, one) for one in schema["allOf"])
        if "anyOf" in schema:
            yield _any(self.fits(value, one) for one in schema["anyOf"])
        if "oneOf" in schema:
            found = [self.fits(value, one) for one in schema["oneOf"]]
            yield None if None in found else found.count(True) == 1

    def _parts(self, value: Any, schema: Mapping[str, Any]) -> Iterable[bool | None]:
        """What it says of the parts of an object or an array."""
        if isinstance(value, dict):
            yield from _within(len(value), schema, "minProperties", "maxProperties")
            yield all(name in value for name in schema.get("required", ()))
            properties = schema.get("properties", {})
            for name, part in value.items():
                if name in properties:
                    yield self.fits(part, properties[name])
                elif "patternProperties" not in schema:
                    yield self.fits(part, schema.get("additionalProperties", True))
        elif isinstance(value, list):
            yield from _within(len(value), schema, "minItems", "maxItems")
            first = schema.get("prefixItems", [])
            for part, one in zip(value, first, strict=False):
                yield self.fits(part, one)
            for part in value[len(first) :]:
                yield self.fits(part, schema.get("items", True))

    def _referred(self, pointer: str) -> Any:
        """The part of the schema that this points to; raises for one that is elsewhere."""
        begin, *names = pointer.split("/")
        if begin != "#":
            raise ValueError
        found = self._root
        for name in names:
            found = found[name.replace("~1", "/").replace("~0", "~")]
        return found


def _all(found: Iterable[bool | None]) -> bool | None:
    """False if one is; else None if one is."""
    result: bool | None = True
    for one in found:
        if one is False:
            return False
        if one is None:
            result = None
    return result


def _any(found: Iterable[bool | None]) -> bool | None:
    """True if one is; else None if one is."""
    result: bool | None = False
    for one in found:
        if one:
            return True
        if one is None:
            result = None
    return result


def _is(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON Schema, in which 1.0 is an integer and true no number."""
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same; true is not 1."""
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def _within(size: float, schema: Mapping[str, Any], least: str, most: str) -> Iterable[bool]:
    """Whether a number is not below and not above what the schema says by these names."""
    if least in schema:
        yield size >= schema[least]
    if most in schema:
        yield size <= schema[most]
