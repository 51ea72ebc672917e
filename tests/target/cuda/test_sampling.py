"""Sampling in torch chooses the tokens that `moa.sampling` chooses, for all nodes at once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moa.sampling import MAX_SEED, SamplingSettings, gumbel, noise_keys
from moa.sampling import choose as on_host
from moa.target.choosing import Judged, accept_rows
from moa.target.contract import NO_NUMBER, Draw
from moa.target.cuda import sampling as device
from moa.target.cuda.sampling import choose
from moa.target.torch_target import Row, Target
from testing.tiny import tiny
from tests.target.trees import random_tree
from tests.torture.sampling import Batch, compare, expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, MAX_SEED])
def test_the_noise_is_the_same_but_for_the_rounding_of_its_logarithms(seed: int) -> None:
    keys = torch.from_numpy(noise_keys([seed] * 3, [0, 77, 2**31]).view(np.int64)).unsqueeze(1)
    ids = torch.arange(50_000)
    found = device.gumbel(keys, ids).numpy()
    for row, position in enumerate([0, 77, 2**31]):
        np.testing.assert_allclose(found[row], gumbel(seed, position, 50_000), rtol=0, atol=3e-14)


NARROW = SamplingSettings(temperature=0.3, top_p=0.9371)
LIFTED = SamplingSettings(temperature=0.001, top_k=5000, repetition_penalty=0.7)
WIDE = SamplingSettings(temperature=1.0, top_k=2999, top_p=0.9371)
FLAT = SamplingSettings(temperature=2.0, top_k=1499, top_p=0.1, min_p=0.0137)
GREEDY = SamplingSettings(repetition_penalty=0.7)


@pytest.mark.parametrize(
    "beside",
    [[NARROW, LIFTED], [LIFTED, NARROW], [NARROW, WIDE], [FLAT, LIFTED, GREEDY, WIDE, NARROW]],
)
def test_a_row_does_not_follow_the_settings_of_one_beside_it(
    beside: list[SamplingSettings],
) -> None:
    """All of them need more than the tokens that are sorted first."""
    rng = np.random.default_rng(5)
    vocab = 3000
    for _ in range(12):
        logits = rng.normal(0, 0.1, (len(beside), vocab)).astype(np.float32)
        text = rng.integers(0, vocab, 30).tolist()
        draws = [Draw(one, int(rng.integers(0, 2**31)), text) for one in beside]
        batch = Batch(logits, draws)
        assert choose(torch.from_numpy(logits), draws) == expected(batch)


@pytest.mark.parametrize("masked", [[True, False], [False, True], [True, True, False]])
def test_a_row_does_not_follow_the_grammar_of_one_beside_it(masked: list[bool]) -> None:
    rng = np.random.default_rng(6)
    vocab = 3000
    logits = rng.normal(0, 0.1, (len(masked), vocab)).astype(np.float32)
    allowed = np.packbits(rng.random(vocab) < 0.9, bitorder="little")
    draws = [Draw(NARROW, 7, allowed=allowed if one else None) for one in masked]
    assert choose(torch.from_numpy(logits), draws) == expected(Batch(logits, draws))


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_choose_as_on_the_host(seed: int) -> None:
    """Fixed ones, of which `python -m tests.torture sampling` draws millions."""
    counts, wrong = compare(1000, seed)
    assert not wrong
    assert counts["mixed batches"] > 3


def test_random_batches_choose_as_on_the_host() -> None:
    seed = random.randrange(2**32)
    assert compare(300, seed)[1] == [], f"seed {seed}"


def test_logits_that_are_no_numbers_are_told_apart_for_each_node() -> None:
    logits = torch.zeros(4, 9)
    logits[1, 3], logits[2, 4] = torch.nan, torch.inf
    for one in (
        SamplingSettings(),
        SamplingSettings(temperature=1.0),
        SamplingSettings(temperature=1.0, top_p=0.5),
    ):
        found = choose(logits, [Draw(one, 3)] * 4)
        assert found[1] == found[2] == NO_NUMBER
        assert found[0] == found[3] >= 0


def test_few_nodes_fit_into_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (9, 40)).astype(np.float32)
    kinds = [
        SamplingSettings(temperature=1.0, seed=3),
        SamplingSettings(temperature=1.0, top_p=0.99),
        SamplingSettings(),
    ]
    draws = [Draw(kinds[at % 3], at) for at in range(9)]
    monkeypatch.setattr(device, "_NUMBERS_AT_ONCE", 80)
    monkeypatch.setattr(device, "_SORTED_FIRST", 3)
    assert choose(torch.from_numpy(logits), draws) == expected(Batch(logits, draws))


def test_rows_are_accepted_as_by_the_walk_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.from_model(tiny("llama"), slots=4, capacity=64)
    rng = np.random.default_rng(11)
    kinds = [
        SamplingSettings(temperature=0.7, seed=4, repetition_penalty=1.4),
        SamplingSettings(),
        SamplingSettings(repetition_penalty=3.0),
        SamplingSettings(temperature=2.0, top_k=3),
    ]
    won = 0
    for _ in range(8):
        slots = [target.cache.acquire() for _ in kinds]
        trees = [random_tree(rng, 9) for _ in kinds]
        step = target.forward([Row(slot, *tree) for slot, tree in zip(slots, trees, strict=True)])
        for tree, kind in zip(
            trees, kinds, strict=True
        ):  # the first child of node 0 is right: else nothing is won
            tree[0][tree[1].index(0)] = on_host(
                step.logits(kinds.index(kind), [0]).numpy()[0], kind, 1, [tree[0][0]]
            )
        judged = [
            Judged(*tree, [tree[0][0]], kind) for tree, kind in zip(trees, kinds, strict=True)
        ]
        theirs = accept_rows(step, judged)
        monkeypatch.setattr(target.decoder, "samples", True)
        assert accept_rows(step, judged) == theirs
        monkeypatch.undo()
        won += sum(len(one.path) - 1 for one in theirs)
        for slot in slots:
            target.cache.release(slot)
    assert won >= 16


def test_what_rounding_decides_is_left_to_the_host() -> None:
    """A likeliest token and others of one score, whose sum of probabilities comes to the edge of
    top-p but for its rounding."""
    rng = np.random.default_rng(9)
    places = [(ties, kept) for ties in range(2, 40) for kept in range(1, ties)]
    for slope in (1.0, 1.0 - 2**-53, 1.0 + 2**-52):
        logits = np.full((len(places), 97), -50.0, np.float32)
        draws = []
        for row, (ties, kept) in enumerate(places):
            some = rng.permutation(97)[:ties]
            logits[row, some] = 0.5
            one = SamplingSettings(
                temperature=0.3,
                top_k=2,
                top_p=kept / ties,
                repetition_penalty=slope,
                seed=int(rng.integers(0, 2**40)),
            )
            draws.append(Draw(one, int(rng.integers(0, 2**31)), some[:1].tolist()))
        assert choose(torch.from_numpy(logits), draws) == expected(Batch(logits, draws))
