"""OpenAI's specification, cut to the routes that are served here: `python -m
tests.clients.specification openapi.json`.

The cut is kept packed beside this file. It holds shapes only: OpenAI's descriptions and examples
are left out (MIT).
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("openai.json.gz")
ROUTES = {
    "/chat/completions": ("post",),
    "/completions": ("post",),
    "/models": ("get",),
    "/models/{model}": ("get",),
    "/responses": ("post",),
}
_ERROR = {
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
}
_WORDS = {
    "description",
    "example",
    "examples",
    "title",
    "summary",
    "externalDocs",
    "deprecated",
    "tags",
}


def read() -> dict[str, Any]:
    """The cut."""
    specification: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return specification


def cut(whole: dict[str, Any]) -> dict[str, Any]:
    """Our routes, and the schemas that they need."""
    routes = {
        path: {method: _route(whole["paths"][path][method]) for method in ROUTES[path]}
        for path in ROUTES
    }
    schemas: dict[str, Any] = {}
    wanted = _references(routes)
    while wanted:
        name = wanted.pop()
        schemas[name] = _shape(whole["components"]["schemas"][name])
        wanted |= _references(schemas[name]) - schemas.keys()
    info = {
        "title": "OpenAI API, cut",
        "version": whole["info"]["version"],
        "license": whole["info"]["license"],
    }
    return {
        "openapi": whole["openapi"],
        "info": info,
        "paths": routes,
        "components": {"schemas": schemas},
    }


def _route(told: dict[str, Any]) -> dict[str, Any]:
    """A route with what succeeds; all else is an error in OpenAI's shape."""
    return _shape({**told, "responses": {"200": told["responses"]["200"], "default": _ERROR}})  # type: ignore[no-any-return]


def _shape(part: Any, *, names: bool = False) -> Any:
    """Without words for people. In `names` the keys are names of fields, and stay."""
    if isinstance(part, dict):
        kept = (
            part
            if names
            else {key: one for key, one in part.items() if key not in _WORDS and key[:2] != "x-"}
        )
        return {
            key: _shape(one, names=key == "properties" and not names) for key, one in kept.items()
        }
    return [_shape(one) for one in part] if isinstance(part, list) else part


def _references(part: Any) -> set[str]:
    if isinstance(part, list):
        return set().union(*map(_references, part))
    if not isinstance(part, dict):
        return set()
    found = set().union(*map(_references, part.values()))
    name = part.get("$ref")
    return found | {name.rpartition("/")[2]} if isinstance(name, str) else found


if __name__ == "__main__":
    text = json.dumps(
        cut(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), sort_keys=True
    )
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
