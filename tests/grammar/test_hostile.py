"""Grammars that are made to cost much: 200 of them are refused, or every look at a text stays
cheap."""

from __future__ import annotations

import random
import time

import numpy as np

from moa.grammar.matcher import unpacked
from moa.grammar.spec import GrammarError
from tests.grammar.corpus import compiler
from tests.grammar.hostile import hostile


def test_hostile_grammars_are_refused_or_bounded() -> None:
    all_of_them = list(hostile())
    refused = 0
    rng = random.Random(1)
    for grammar in all_of_them:
        began = time.process_time()
        try:
            matcher = compiler().compile(grammar).matcher(0)
            text = list[int]()
            assert time.process_time() - began < 5, grammar.text[:80]
            for _ in range(40):
                began = time.thread_time()
                mask = matcher.after(text)
                tokens = np.flatnonzero(unpacked(mask.allowed(), 4096))
                mask.guesses()
                assert time.thread_time() - began < 0.5, grammar.text[:80]
                if not any(tokens):
                    break
                text.append(int(rng.choice(tokens[tokens > 0])))
        except GrammarError:
            refused += 1
    assert len(all_of_them) >= 200
    assert 20 < refused < len(all_of_them)
