"""The accelerator's rule of sampling against the host's: batches of rows that have nothing to do
with each other, with settings at their edges.

Each row is judged by `moa.sampling.choose` alone, so a row that is changed by another one beside it
is found, and so is a set of surviving tokens that is cut elsewhere.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moa.sampling import MAX_SEED, MAX_TEMPERATURE, MIN_TEMPERATURE, SamplingSettings
from moa.sampling import choose as on_host
from moa.target.contract import Draw
from moa.target.cuda.sampling import choose
from tests.torture.tally import Found, Tally

_TEMPERATURES = (0.0, MIN_TEMPERATURE, 0.3, 0.7, 1.0, 1.3, MAX_TEMPERATURE)
_TOP_PS = (1.0, 1.0, 1e-9, 0.1, 0.5, 0.9371, 0.9999, float(np.nextafter(1.0, 0.0)))
_MIN_PS = (0.0, 0.0, 0.0, 1e-9, 0.0137, 0.5, 0.93, float(np.nextafter(1.0, 0.0)))
_PENALTIES = (1.0, 1.0, 0.1, 0.7, 1.0 - 2**-53, 1.0 + 2**-52, 1.3, 10.0)
_SIZES = (*range(1, 9), 31, 64, 97, 255, 256, 257)
_LARGE_SIZES = (1000, 1023, 1024, 1025, 1500, 3000, 5000)
_LARGE_SHARE = 0.1
_SPREADS = (0.0, 0.1, 0.1, 2.0, 2.0, 20.0, 1e4)
_STEPS = (0.0, 0.0, 0.5, 2**-7)
"""Logits are rounded to these, or not: ties at the edges of what survives."""
_MOST_ROWS = (96, 96, 1000)
"""Most of these rows, half of them on average, share a forward: a large batch costs the accelerator
as many steps as a small one, so that more draws are compared in a second."""
_MOST_NUMBERS = 256 * 1024
"""Logits of a batch: rows of a large vocabulary are fewer."""
_DRAWS_A_BATCH = 20_000


class Batch(NamedTuple):
    """Rows that share a forward."""

    logits: NDArray[np.float32]
    draws: list[Draw]


def draw_settings(rng: random.Random, vocab: int) -> SamplingSettings:
    """Settings of one row, each at an edge or between two."""
    top_ks = (0, 0, 1, 2, 40, 1023, 1024, 1025, vocab - 1, vocab, vocab + 1, 5000, 2**20)
    drawn = rng.random()
    return SamplingSettings(
        temperature=rng.choice([*_TEMPERATURES, max(MIN_TEMPERATURE, 2 * drawn)]),
        top_k=rng.choice([*top_ks, rng.randint(0, vocab + 1)]),
        top_p=rng.choice([*_TOP_PS, max(drawn, 1e-12)]),
        min_p=rng.choice([*_MIN_PS, drawn]),
        repetition_penalty=rng.choice([*_PENALTIES, 0.1 + 2 * drawn]),
        seed=rng.choice([0, MAX_SEED, rng.randint(0, MAX_SEED)]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, 2.0, -2.0, 2 * drawn]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.5, -drawn]),
        logit_bias=rng.choice([(), (), _draw_bias(rng, vocab)]),
    )


def _draw_bias(rng: random.Random, vocab: int) -> tuple[tuple[int, float], ...]:
    """Of tokens of the vocabulary, and of one behind it."""
    tokens = rng.sample(range(vocab + 1), k=rng.randint(1, min(8, vocab)))
    return tuple((token, rng.choice([-100.0, 100.0, rng.uniform(-2, 2)])) for token in tokens)


def draw_batch(rng: random.Random) -> Batch:
    """Logits with and without ties, texts, drafts and masks, and settings of each row's own."""
    vocab = rng.choice(_LARGE_SIZES if rng.random() < _LARGE_SHARE else _SIZES)
    rows = rng.randint(1, min(rng.choice(_MOST_ROWS), _MOST_NUMBERS // vocab))
    numbers = np.random.default_rng(rng.getrandbits(64))
    logits = numbers.normal(0.0, rng.choice(_SPREADS), (rows, vocab)).astype(np.float32)
    if step := rng.choice(_STEPS):
        logits = (np.round(logits / step) * step).astype(np.float32)
    shared = rng.choices(range(vocab), k=30)
    draws = []
    for _ in range(rows):
        draws.append(
            Draw(
                settings=draw_settings(rng, vocab),
                position=rng.randrange(2**31),
                text=shared if rng.random() < 0.5 else rng.choices(range(vocab), k=20),
                drafted=rng.choices(range(vocab), k=rng.randint(0, 5)),
                allowed=_draw_mask(numbers, vocab) if rng.random() < 0.2 else None,
                start=rng.choice([0, 7, 20, 30]),
            )
        )
    return Batch(logits, draws)


def _draw_mask(rng: np.random.Generator, vocab: int) -> NDArray[np.uint8]:
    flags = rng.random(-(-vocab // 8) * 8) < rng.choice([0.002, 0.5, 0.98])
    flags[vocab:] = False
    flags[int(rng.integers(0, vocab))] = True
    return np.packbits(flags, bitorder="little")


def differing(batch: Batch) -> list[str]:
    """What each row says that is chosen otherwise than alone on the host."""
    found = choose(torch.from_numpy(batch.logits), batch.draws)
    return [
        f"{token}, not {truth}: row {place} of {len(found)}, {batch.draws[place].settings}"
        for place, (token, truth) in enumerate(zip(found, expected(batch), strict=True))
        if token != truth
    ]


def expected(batch: Batch) -> list[int]:
    """The host's tokens, each row by itself."""
    return [_alone(row, draw) for row, draw in zip(batch.logits, batch.draws, strict=True)]


def _alone(logits: NDArray[np.float32], draw: Draw) -> int:
    allowed = None
    if draw.allowed is not None:
        flags = np.unpackbits(draw.allowed, bitorder="little")[: len(logits)]
        allowed = flags.astype(np.bool_)
    context = [*draw.text, *draw.drafted]
    answer = [*draw.text[draw.start :], *draw.drafted]
    return on_host(logits, draw.settings, draw.position, context, allowed, answer)


def compare(draws: int, seed: int) -> tuple[Counter[str], list[str]]:
    """At least so many rows in drawn batches: counts, and what differs."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    while counts["draws"] < draws:
        batch = draw_batch(rng)
        different = differing(batch)
        counts["draws"] += len(batch.draws)
        counts["batches"] += 1
        counts["mixed batches"] += _mixed(batch.draws)
        counts["different"] += len(different)
        wrong += different
    return counts, wrong


def _mixed(draws: Sequence[Draw]) -> bool:
    return len({draw.settings for draw in draws}) > 1


async def sampling(options: argparse.Namespace) -> Found:
    """As many draws as the options say."""
    torch.set_num_threads(1)
    tally = Tally(options, "sampling", draws=_DRAWS_A_BATCH)
    for seed, batch in tally.batches():
        counts, wrong = compare(batch["draws"], seed)
        tally.add(seed, counts, wrong)
    return tally.found
