"""Cells of `tests.speculation.sweep`: how fast the policy is on a simulated server, with other
numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from statistics import fmean, harmonic_mean

import pytest

from moa.speculation import cost, ledger, policy
from moa.speculation.policy import Policy
from moa.tree import TreeShape
from tests.speculation.worlds import MANY, Bursts, Dense, Mixture, World, beside_plain

MODULES = (policy, cost, ledger)
"""Where numbers are used; each has its own names of those of `moa.speculation.tuning`."""
LONGEST_READING = "LONGEST_READING"
"""A number that the policy no longer has: how long the drafter may read in one round for several
texts, in plain rounds."""


@contextmanager
def changed(numbers: Mapping[str, float]) -> Iterator[None]:
    """The policy's modules with other numbers. What follows from a number stays: `_KEEP` is what it
    was with another `WEIGHT_IF_SLOWER`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in numbers.items():
            if name == LONGEST_READING:
                _change_longest_reading(patch, value)
                continue
            places = places_of(name)
            if not places:
                raise KeyError(name)
            for module, known in places:
                patch.setattr(module, known, value)
        yield


def places_of(name: str) -> list[tuple[object, str]]:
    """The modules that have this number, and its name there."""
    return [
        (module, known)
        for module in MODULES
        for known in (name, f"_{name}")
        if isinstance(getattr(module, known, None), int | float)
    ]


def _change_longest_reading(patch: pytest.MonkeyPatch, plain_rounds: float) -> None:
    without = Policy._without_long_reading

    def planned(
        self: Policy,
        places: Sequence[int],
        missed: dict[int, int],
        reading: dict[int, float],
        plain_seconds: float,
    ) -> Iterator[int]:
        return without(self, places, missed, reading, plain_rounds * plain_seconds)

    patch.setattr(Policy, "_without_long_reading", planned)


def _steady(
    right: float,
    tokens: int,
    of_text: int,
    seed: int,
    *,
    level: float,
    token: float = 0.0,
    reading: float = 0.0,
    noise: float = 0.06,
    sleeps: float = 0.0,
    texts: int = 1,
    cold: str = "",
    first: int = 0,
) -> float:
    """A server whose prices stay. The `first` forwards, drafts or readings, as `cold` says, take
    ten times as long."""
    world = World(
        level=level,
        token=token,
        reading=reading,
        noise=noise,
        sleeps=sleeps,
        texts=texts,
        policy=Policy(TreeShape.chain(8)),
        rng=Random(seed),
        cold={cold: (first, 10.0)},
    )
    return world.speed(right, tokens, of_text=of_text)


def _changing(seed: int) -> float:
    """Drafting becomes dear, then tokens do, then guesses are wrong, then all is well."""
    world = World(rng=Random(seed))
    speeds = []
    for level, right, token in (
        (0.1, 0.8, 0.0),
        (1.0, 0.8, 0.0),
        (0.1, 0.8, 0.1),
        (0.1, 0.0, 0.0),
        (0.1, 0.9, 0.0),
    ):
        world.level = level
        world.token = token
        speeds.append(world.speed(right, 700))
    return harmonic_mean(speeds)


def _limited_memory(kind: type[Mixture | Bursts | Dense], right: float, seed: int) -> float:
    return beside_plain(kind, varies=True, right=right, seeds=[seed])


def _cells() -> Iterator[tuple[str, Callable[[int], float]]]:
    """Names of cells, and their speed in units of plain decoding by the seed of random numbers."""
    for level, token in ((0.02, 0.0), (0.1, 0.1), (0.3, 0.0), (1.0, 0.1), (0.05, 0.25)):
        for right in (0.0, 0.5, 0.85, 0.95):
            name = f"one text, a level {level}, a token {token}, {right:.0%} right"
            yield name, partial(_steady, right, 1500, MANY, level=level, token=token)
    for right in (0.0, 0.5, 0.9):
        ending = f"{right:.0%} right"
        yield (
            f"short texts, long prompts, {ending}",
            partial(_steady, right, 800, 40, level=0.05, reading=0.03),
        )
        yield (
            f"short texts, {ending}",
            partial(_steady, right, 800, 60, level=0.2, token=0.02, noise=0.3),
        )
        yield f"noise, {ending}", partial(_steady, right, 1500, MANY, level=0.3, noise=0.7)
        for texts, token, level in (
            (4, 0.05, 0.02),
            (16, 0.01, 0.01),
            (16, 0.2, 0.02),
            (48, 0.1, 0.02),
            (48, 0.0005, 0.0005),
        ):
            batch = partial(_steady, level=level, token=token, texts=texts, reading=0.001)
            yield (
                f"{texts} texts, a token {token}, {ending}",
                partial(batch, right, 160 * texts, 80),
            )
    for cold, first in (("draft", 6), ("reading", 1), ("forward", 6)):
        for right in (0.5, 0.9):
            slow = partial(_steady, level=0.1, token=0.02, cold=cold, first=first)
            yield f"a cold {cold}, {right:.0%} right", partial(slow, right, 500, 50)
    for texts, reading, level in ((8, 0.001, 0.01), (16, 0.0005, 0.01), (24, 0.0004, 0.005)):
        crowd = partial(_steady, level=level, reading=reading, texts=texts)
        yield f"{texts} ask at once, 90% right", partial(crowd, 0.9, 200 * texts, 40)
    for right in (0.5, 0.9):
        asleep = partial(_steady, level=0.1, token=0.05, sleeps=0.01)
        yield f"a machine that sleeps, {right:.0%} right", partial(asleep, right, 1500, MANY)
    yield "changing prices", _changing
    for kind in (Mixture, Bursts, Dense):
        for right in (0.0, 0.6, 0.9):
            name = f"memory holds a part: {kind.__name__}, {right:.0%} right"
            yield name, partial(_limited_memory, kind, right)


CELLS = dict(_cells())


def value(name: str, numbers: Mapping[str, float], seeds: Sequence[int]) -> float:
    """The mean speed of a cell over these seeds of random numbers, with other numbers."""
    with changed(numbers):
        return fmean(CELLS[name](seed) for seed in seeds)
