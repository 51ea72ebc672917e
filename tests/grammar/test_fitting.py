"""Whether a value fits a schema, held against another implementation."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from moa.grammar.fitting import fits


def _schema(draw: random.Random, depth: int = 0) -> Any:
    kinds = ["number", "string", "enum", "const", "null", "boolean", "any"]
    if depth < 3:
        kinds += ["object", "array", "tuple", "anyOf", "oneOf", "allOf", "ref"] * 2
    match draw.choice(kinds):
        case "number":
            bounds: dict[str, Any] = {"type": draw.choice(["integer", "number"])}
            for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                if draw.random() < 0.2:
                    bounds[name] = draw.randrange(4)
            if draw.random() < 0.2:
                bounds["multipleOf"] = draw.choice([1, 2, 0.5])
            return bounds
        case "string":
            return {"type": "string", "minLength": draw.randrange(2), "maxLength": 2}
        case "enum":
            return {"enum": draw.sample([1, "a", None, True, [0], {"a": 1}], 3)}
        case "const":
            return {"const": draw.choice([1, "a", True])}
        case "null":
            return {"type": ["null", "string"], "description": "x"}
        case "boolean":
            return draw.choice([{"type": "boolean"}, True, False])
        case "any":
            return {}
        case "object":
            return {
                "type": "object",
                "properties": {name: _schema(draw, depth + 1) for name in "ab"},
                "required": draw.sample("abc", draw.randrange(2)),
                **draw.choice(
                    [
                        {},
                        {"additionalProperties": False},
                        {"additionalProperties": {"type": "string"}},
                    ]
                ),
                **draw.choice([{}, {"minProperties": 1, "maxProperties": 2}]),
            }
        case "array":
            return {"type": "array", "items": _schema(draw, depth + 1), "maxItems": 2}
        case "tuple":
            return {"prefixItems": [_schema(draw, depth + 1)], "items": False, "minItems": 1}
        case "ref":
            return {"$ref": "#/$defs/x~1y"}
        case kind:
            return {kind: [_schema(draw, depth + 1) for _ in range(2)]}


def _value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(10 if depth < 3 else 6)
    if kind < 6:
        return draw.choice([0, 1, 2.0, 2.5, "", "a", "abc", None, True, False])
    if kind < 8:
        return {name: _value(draw, depth + 1) for name in draw.sample("abc", draw.randrange(3))}
    return [_value(draw, depth + 1) for _ in range(draw.randrange(3))]


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_another_implementation(seed: int) -> None:
    draw = random.Random(seed)
    fitted = 0
    for _ in range(300):
        schema = _schema(draw)
        if isinstance(schema, dict):
            schema = {**schema, "$defs": {"x/y": _schema(draw, 3)}}
        else:
            continue
        judge = jsonschema.Draft202012Validator(schema)
        for _ in range(5):
            value = _value(draw)
            assert fits(value, schema) == judge.is_valid(value), (value, schema)
            fitted += judge.is_valid(value)
    assert fitted


@pytest.mark.parametrize(
    ("value", "schema", "wanted"),
    [
        ("a", {"type": "string", "pattern": "a"}, None),
        (1, {"type": "string", "pattern": "a"}, False),
        ({"a": 1}, {"patternProperties": {"a": {}}, "additionalProperties": False}, None),
        (1, {"anyOf": [{"format": "date"}, {"type": "integer"}]}, True),
        (1, {"anyOf": [{"format": "date"}, {"type": "string"}]}, None),
        (1, {"oneOf": [{"format": "date"}, {"type": "integer"}]}, None),
        (1, {"$ref": "https://elsewhere.example/schema"}, None),
        (1, {"$ref": "#/$defs/none"}, None),
        (1, {"$ref": "#"}, None),
        (1, {"type": "number", "minimum": "x"}, None),
        (1, {"type": "whatever"}, None),
        (1, {"multipleOf": 0}, None),
        (1, [], None),
    ],
)
def test_what_cannot_be_told_is_not_told(value: Any, schema: Any, wanted: bool | None) -> None:
    assert fits(value, schema) is wanted


def test_references_in_references_take_no_exponential_time() -> None:
    both = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)}
    assert fits(1, {"$ref": "#/$defs/a0", "$defs": {**both, "a60": {"type": "string"}}}) is None
