"""What an answer must match, as both ends and the wire write it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moa.errors import UsageError

MAX_BYTES = 2**16
"""Longest grammar."""
MAX_DEPTH = 64
"""Brackets in brackets: compilers recurse."""
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
        depth = deepest = 0
        for character in self.text:
            depth += (character in "([{") - (character in ")]}")
            deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            raise GrammarError(
                f"a grammar with {deepest} brackets in one another, at most {MAX_DEPTH}"
            )
