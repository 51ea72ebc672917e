"""Schemas that others wrote, and their judge.

`schemas.json.gz` holds the 1,540 schemas of the JSON-Schema-Test-Suite (MIT), drafts 4 to 2020-12, as jsonschema 4.26
ships it; llguidance can follow 886 of them.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from moa import demo
from moa.grammar.matcher import GrammarCompiler
from moa.grammar.spec import Grammar, GrammarError

FILE = demo.paths().tokenizer / "tokenizer.json"
_JUDGES = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}


class Schema(NamedTuple):
    """A schema, and the draft of the standard that it follows."""

    draft: str
    schema: dict[str, Any]

    @property
    def grammar(self) -> Grammar:
        """What its answers must match."""
        return Grammar.of_schema(self.schema)

    def judge(self, text: str) -> None:
        """Raise unless this text is valid."""
        _JUDGES[self.draft](self.schema).validate(json.loads(text))


@cache
def compiler() -> GrammarCompiler:
    """Over the embedded tokenizer."""
    return GrammarCompiler(FILE.read_text, size=4096, eos_ids=[0])


def _two_readings(draft: str, schema: Any) -> bool:
    """Whether keywords stand beside a `$ref`: up to draft 7 they are ignored, and a schema that does not name its draft
    is read as 2020-12."""
    if isinstance(schema, list):
        return any(_two_readings(draft, one) for one in schema)
    if not isinstance(schema, dict) or draft.startswith("draft20"):
        return False
    beside = "$ref" in schema and bool(schema.keys() - {"$ref", "$comment", "$schema", "definitions"})
    return beside or any(_two_readings(draft, one) for one in schema.values())


@cache
def schemas(every: int = 1) -> list[Schema]:
    """Those that can be followed, or some of them; without those that have two readings, and the two whose patterns
    Python's own `re` cannot read."""
    found = []
    for draft, schema in json.loads(gzip.decompress(Path(__file__).with_name("schemas.json.gz").read_bytes()))[::every]:
        try:
            compiler().compile(Grammar.of_schema(schema))
        except GrammarError:
            continue
        if not _two_readings(draft, schema) and "\\p{" not in json.dumps(schema).replace("\\\\", "\\"):
            found.append(Schema(draft, schema))
    return found
