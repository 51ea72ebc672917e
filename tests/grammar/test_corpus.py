"""Schemas that others wrote: whatever a model writes under one of them, its finished answers are
valid."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from edge_client.device import Device
from moa.grammar.matcher import unpacked
from tests.edge.serve.pair import served
from tests.grammar.corpus import FILE, compiler, schemas
from tests.torture.schemas import Checked, Pair

EVERY = [pytest.param(31, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("every", EVERY)
def test_whatever_is_chosen_is_valid(every: int) -> None:
    """A model that chooses any allowed token."""
    tokenizer = Tokenizer.from_file(str(FILE))
    rng = random.Random(1)
    finished = 0
    for schema in schemas(every):
        matcher = compiler().compile(schema.grammar).matcher(0)
        text = list[int]()
        for _ in range(100):
            tokens = np.flatnonzero(unpacked(matcher.after(text).allowed(), 4096)).tolist()
            if tokens[0] == 0 and (len(tokens) == 1 or rng.random() < 0.5):
                schema.judge(tokenizer.decode(text))
                finished += 1
                break
            text.append(rng.choice([token for token in tokens if token]))
    assert finished > (600 if every == 1 else 15)


async def test_answers_are_the_same_and_valid_however_they_are_drafted_and_cut() -> None:
    """A few of `python -m tests.torture schemas`."""
    checked = Checked()
    await checked.pair(Pair("embedded", served(), Device.load(threads=1)), schemas(301))
    assert not checked.wrong
    total = sum(checked.counts.values(), Counter())
    assert total["finished"] > total["unfinished"]
    assert total["cuts"]
