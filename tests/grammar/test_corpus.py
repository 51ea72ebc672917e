"""Schemas that others wrote: whatever a model writes under one of them, its finished answers are valid.

`schemas.json.gz` holds the 1,540 schemas of the JSON-Schema-Test-Suite (MIT), drafts 4 to 2020-12, as jsonschema 4.26
ships it; llguidance can follow 886 of them.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from moa import demo
from moa.grammar.matcher import GrammarCompiler, unpacked
from moa.grammar.spec import Grammar, GrammarError
from moa.model.checkpoint import load_drafter
from moa.model.drafting import MoaDrafting
from moa.model.generate import GenerationSettings, Speculator
from moa.model.target import Target
from moa.sampling import SamplingSettings

Schemas = list[tuple[str, dict[str, Any]]]
FILE = demo.paths().tokenizer / "tokenizer.json"
JUDGES = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
EVERY = [pytest.param(37, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FILE.read_text, size=4096, eos_ids=[0])


@cache
def schemas(every: int) -> Schemas:
    """Those that can be followed, or some of them; without the two whose patterns Python's own `re` cannot read."""
    found: Schemas = []
    for draft, schema in json.loads(gzip.decompress(Path(__file__).with_name("schemas.json.gz").read_bytes()))[::every]:
        try:
            compiler().compile(Grammar.of_schema(schema))
        except GrammarError:
            continue
        if "\\p{" not in json.dumps(schema).replace("\\\\", "\\"):
            found.append((draft, schema))
    return found


def judge(draft: str, schema: dict[str, Any], text: str) -> None:
    JUDGES[draft](schema).validate(json.loads(text))


@pytest.mark.parametrize("every", EVERY)
def test_whatever_is_chosen_is_valid(every: int) -> None:
    """A model that chooses any allowed token."""
    tokenizer, rng, finished = Tokenizer.from_file(str(FILE)), random.Random(1), 0
    for draft, schema in schemas(every):
        matcher, text = compiler().compile(Grammar.of_schema(schema)).matcher(0), list[int]()
        for _ in range(100):
            tokens = np.flatnonzero(unpacked(matcher.after(text).allowed(), 4096)).tolist()
            if tokens[0] == 0 and (len(tokens) == 1 or rng.random() < 0.5):
                judge(draft, schema, tokenizer.decode(text))
                finished += 1
                break
            text.append(rng.choice([token for token in tokens if token]))
    assert finished > (600 if every == 1 else 15)
    assert len(schemas(every)) > (850 if every == 1 else 20)


@pytest.mark.parametrize("every", [pytest.param(181, id="some"), EVERY[1]])
@pytest.mark.parametrize("name", ["embedded", "distorted"])
def test_models_write_valid_text_with_drafts_and_without(name: str, every: int) -> None:
    target = Target.load(str(demo.paths().target), slots=2, capacity=160)
    drafting = MoaDrafting(load_drafter(demo.paths().drafter, target.model, target.facts), slots=2, capacity=160)
    tokenizer, prompt = target.tokenizer, target.tokenizer("Write JSON: ")["input_ids"]
    if name == "distorted":
        target.model.load_state_dict({key: 3 * value for key, value in target.model.state_dict().items()})
    samplings = [SamplingSettings(), SamplingSettings(temperature=1.0, seed=5)]
    ends: Counter[str] = Counter()
    for number, (draft, schema) in enumerate(schemas(every)):
        how: dict[str, Any] = {"max_new_tokens": 48, "sampling": samplings[number % 2], "adapt": False}
        how["grammar"] = Grammar.of_schema(schema)
        plain = Speculator(target).generate([prompt], GenerationSettings(**how | {"shape": None}))[0]
        fast = Speculator(target, drafting).generate([prompt], GenerationSettings(**how))[0]
        assert fast.ids == plain.ids
        ends[plain.finish] += 1
        if plain.finish == "eos":
            judge(draft, schema, tokenizer.decode(plain.ids, skip_special_tokens=True))
    assert ends["eos"] >= len(schemas(every)) / 4
