"""Schemas that others wrote, and their judge.

`schemas.json.gz` holds those schemas of the JSON-Schema-Test-Suite (MIT), drafts 4 to 2020-12, as
jsonschema 4.26 ships it, that llguidance can follow: 861 of 1,540. Left out are those with two
readings (keywords beside a `$ref` are ignored up to draft 7, and a schema that does not name its
draft is read as 2020-12), and the two whose patterns Python's own `re` cannot read.
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
from moa.grammar.spec import Grammar

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


@cache
def schemas(every: int = 1) -> list[Schema]:
    """All of them, or some."""
    packed = Path(__file__).with_name("schemas.json.gz").read_bytes()
    return [Schema(draft, schema) for draft, schema in json.loads(gzip.decompress(packed))[::every]]
