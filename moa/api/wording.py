"""What is wrong with a request's field, in words that its sender understands: the validator's own
words name its types."""

from __future__ import annotations

import re
from collections.abc import Sequence

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_LENGTH = re.compile(r"Expected `(\w+)` of length (>=|<=|==) (\d+)")
_BOUND = re.compile(r"Expected `(\w+)` (>=|<=|>|<) (\S+)")
_KIND = re.compile(r"Expected `([\w| ]+)`, got `(\w+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_VALUE = re.compile(r"Invalid (?:enum )?value (.+)")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")
_PATTERN = re.compile(r"Expected `str` matching regex (.+)")


def in_our_words(message: str, field: str, choices: Sequence[str] = ()) -> str:
    """Put what the validator of requests says of a field into words that its sender understands. A
    message that is not known here stays as it is. `choices` are the only values of the field, where
    it has no others."""
    if found := _MISSING.fullmatch(message):
        if field == "the body":
            return f"{found[1]} is missing"
        return f"{found[1]} is missing in {field}"
    if found := _LENGTH.fullmatch(message):
        return f"{field} {_length(found[1], found[2], int(found[3]))}"
    if found := _BOUND.fullmatch(message):
        return f"{field} must be {_BOUNDS[found[2]]} {found[3]}"
    if found := _KIND.fullmatch(message):
        kinds = [_kind(name) for name in found[1].split(" | ") if name != "null"]
        return f"{field} must be {' or '.join(kinds)}, not {_kind(found[2])}"
    if found := _VALUE.fullmatch(message):
        allowed = f": choose {', '.join(choices[:-1])} or {choices[-1]}" if choices else ""
        return f"{field} cannot be {found[1]}{allowed}"
    if found := _UNKNOWN.fullmatch(message):
        return f"{field} has no field {found[1]}"
    if found := _PATTERN.fullmatch(message):
        return f"{field} must match {found[1]}"
    return f"{field}: {message}"


def _kind(name: str) -> str:
    """A type of the validator's in plain words."""
    return _KINDS.get(name.strip(), name)


def _length(kind: str, comparison: str, bound: int) -> str:
    """What the length of a value of this kind must be."""
    if (comparison, bound) == (">=", 1):
        return "must not be empty"
    parts = {"str": "characters", "array": "items"}.get(kind, "fields")
    words = {">=": "at least", "<=": "at most", "==": "exactly"}[comparison]
    return f"must have {words} {bound:,} {parts}"
