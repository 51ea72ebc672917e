"""Schemas that are made to cost much, by a search that keeps what cost most: how much processor time
and memory the compiler takes in this process, behind the checks and the process that compiles
first. A crash is found, too, but is not what is looked for.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from moa.grammar.children import Children
from moa.grammar.matcher import GrammarCompiler
from moa.grammar.spec import Grammar, GrammarError
from moa.process.memory import resident_bytes
from tests.grammar.corpus import FILE, schemas
from tests.torture.tally import Found, Tally

_SECONDS = 3.0
"""On the clock, of one grammar, on a machine that has nothing else to do."""
_OWN_SECONDS = 1.0
"""Processor time of this process for one grammar."""
_MEGABYTES = 50
_BEST = 40
"""Schemas that are kept to be changed further."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _leaf(rng: random.Random) -> dict[str, Any]:
    """A keyword that costs something by itself."""
    letter = rng.choice(_LETTERS)
    size = rng.choice([1, 3, 10, 50, 300, 10_000, 10**9])
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "multipleOf": rng.choice([2, 7, 97, 997, 9973, size])},
        {"type": "number", "multipleOf": rng.choice([0.1, 0.25, 0.007])},
        {"type": "string", "pattern": f".*{letter}.*"},
        {"type": "string", "pattern": f"^({letter}|[{letter}-z]{{1,{min(size, 999)}}})*$"},
        {"type": "string", "pattern": f".*{letter}.{{{min(size, 999)}}}"},
        {"type": "string", "minLength": size, "maxLength": 2 * size},
        {"type": "string", "format": rng.choice(["date-time", "uri", "email", "ipv6", "uuid"])},
        {"type": "integer", "minimum": -size, "maximum": size * 31 + 7},
        {"type": "number", "exclusiveMinimum": 1 / size, "maximum": size + 0.37},
        {"enum": [f"{letter}{n}" for n in range(min(size, 300))]},
        {"type": "array", "minItems": min(size, 300), "maxItems": size, "items": {}},
        {"type": "array", "uniqueItems": True, "prefixItems": [{}, {"type": "null"}]},
    ]
    return rng.choice(leaves)


def _grown(rng: random.Random, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A schema of some others."""
    some = [rng.choice(parts) for _ in range(rng.choice([2, 2, 3, 5, 9]))]
    names = [f"{rng.choice(_LETTERS)}{n}" for n in range(len(some))]
    match rng.randrange(9):
        case 0:
            return {rng.choice(["allOf", "anyOf", "oneOf"]): some}
        case 1:
            return {"type": "object", "properties": dict(zip(names, some, strict=True))}
        case 2:
            patterns = {f"^{name}.*{name[0]}": one for name, one in zip(names, some, strict=True)}
            return {"type": "object", "patternProperties": patterns, "properties": {"a": some[0]}}
        case 3:
            chain = {
                name: {**one, "$ref": f"#/$defs/{after}"}
                for name, one, after in zip(names, some, names[1:], strict=False)
            }
            return {"$defs": {**chain, names[-1]: some[-1]}, "$ref": f"#/$defs/{names[0]}"}
        case 4:
            return {"type": "array", "items": some[0], "minItems": rng.choice([1, 9, 99])}
        case 5:
            return {**some[0], **some[1]}
        case 6:
            return {"allOf": some, "anyOf": some[:2], **some[0]}
        case 7:
            return {"type": "object", "additionalProperties": some[0], "required": names}
        case _:
            return {"if": some[0], "then": some[1], "not": some[-1]}


def _regex(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", "b", "[a-m]", "[^x]", ".", "\\w", "\\p{L}", "(?i:ab)"])
    inner = [_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    how = rng.choice(["*", "+", "?", "{3}", "{1,40}", "{200}", ""])
    return f"({rng.choice(['|', '', '']).join(inner)}){how}"


def _lark(rng: random.Random) -> str:
    words = [f"/{_regex(rng, rng.randint(0, 2))}/" for _ in range(rng.randint(2, 12))]
    joined = rng.choice([" & ", " | ", " "]).join(words)
    return f"start: W{rng.choice(['', '*', '{1,50}'])}\nW: {joined}"


class _Search:
    """Draws grammars, more of those that cost more."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._best: list[tuple[float, dict[str, Any]]] = []
        self._known = [one.schema for one in schemas(every=9)]

    def draw(self) -> tuple[Grammar, dict[str, Any] | None]:
        """A grammar, and its schema if it is one."""
        rng = self._rng
        match rng.randrange(8):
            case 0:
                return Grammar("regex", _regex(rng, rng.randint(1, 5))), None
            case 1:
                return Grammar("lark", _lark(rng)), None
            case _:
                parts = [_leaf(rng) for _ in range(4)]
                parts += [schema for _, schema in rng.sample(self._best, min(3, len(self._best)))]
                parts.append(rng.choice(self._known))
                schema = _grown(rng, parts)
                return Grammar.of_schema(schema), schema

    def learn(self, cost: float, schema: dict[str, Any] | None) -> None:
        """Keep it if it cost much."""
        if schema is not None and len(json.dumps(schema)) < 20_000:
            self._best.append((cost, schema))
            self._best.sort(key=lambda one: -one[0])
            del self._best[_BEST:]


async def costs(options: argparse.Namespace) -> Found:
    """As many grammars as the options say."""
    tally = Tally(options, "costs", grammars=500)
    compiler = GrammarCompiler(FILE.read_text, size=4096, eos_ids=[0])
    compiler.compile(Grammar("regex", "it has started"))
    Children().check(Grammar("regex", "and so have others"))
    before = resident_bytes()
    for seed, batch in tally.batches():
        search = _Search(seed)
        for _ in range(batch["grammars"]):
            grammar, schema = search.draw()
            began = time.perf_counter()
            own = time.process_time()
            try:
                matcher = compiler.compile(grammar).matcher(0)
                matcher.after([]).allowed()
                outcome = "compiled"
            except GrammarError as error:
                too_much = "too much" in str(error) or "more than" in str(error)
                outcome = "ended" if too_much else "refused"
            took = time.perf_counter() - began
            own = time.process_time() - own
            search.learn(took, schema)
            wrong = []
            if took > _SECONDS or own > _OWN_SECONDS:
                wrong.append(f"{took:.1f} s, {own:.2f} here: {grammar.text[:300]}")
            more = (resident_bytes() - before) / 2**20
            if more > _MEGABYTES:
                wrong.append(f"{more:.0f} MB more: {grammar.text[:300]}")
            counts = {"grammars": 1, outcome: 1}
            tally.add(seed, counts, wrong, seconds=took, own_seconds=own, megabytes=more)
    return tally.found
