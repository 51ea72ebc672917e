"""How close a choice of the target was, found by asking it again: no logits travel, but a known noise weighs them.

A sampled token is the best of `logits / temperature + noise`, and the noise of a seed and position is known to both
ends. So at which temperature the target's choice goes from one token to another tells how far their logits are apart;
halving an interval of temperatures finds it, with one short question each time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import count

import numpy as np

from edge_client.client import EdgeClient
from edge_client.tools.compare import ask
from moa.sampling import MIN_TEMPERATURE, SamplingSettings, gumbel

_COLD, _WARM = MIN_TEMPERATURE, 1.0
"""Temperatures between which the choice is looked for when decoding is greedy."""
_NARROW = 1.25
"""When it is sampled: how far from the temperature in use a near tie would be decided otherwise."""
_HALVINGS = 18
_ENOUGH_NOISE = (0.5, 0.9)
"""How much more noise the other token gets: the closest margin that can be told is the coldest temperature times it."""


async def margin(
    client: EdgeClient, context: Sequence[int], chosen: int, other: int, sampling: SamplingSettings
) -> float | None:
    """By how much the score of `chosen` leads that of `other` after `context`; None when it is no close call.

    The scores are logits, or with sampling logits / temperature + noise. `client` should ask without drafts.
    """
    if sampling.greedy:
        return await _greedy(client, context, chosen, other, sampling)
    return await _sampled(client, context, chosen, other, sampling)


async def _greedy(
    client: EdgeClient, context: Sequence[int], chosen: int, other: int, sampling: SamplingSettings
) -> float | None:
    # A seed whose noise favours `other`: warm enough, that is what is said, if only these two are in the running.
    seed = next(
        seed for seed in count() if _ENOUGH_NOISE[0] < _favours(other, chosen, seed, len(context)) < _ENOUGH_NOISE[1]
    )
    probe = dataclasses.replace(sampling, top_k=2, top_p=1.0, min_p=0.0, seed=seed)
    cold, warm = _COLD, _WARM
    if await _says(client, context, probe, warm) != other:
        return None
    for _ in range(_HALVINGS):
        middle = math.sqrt(cold * warm)
        if await _says(client, context, probe, middle) == other:
            warm = middle
        else:
            cold = middle
    return warm * _favours(other, chosen, seed, len(context))


async def _sampled(
    client: EdgeClient, context: Sequence[int], chosen: int, other: int, sampling: SamplingSettings
) -> float | None:
    # The noise lifts one of them, the logits the other; which way the temperature must move is known from the noise.
    favour = _favours(other, chosen, sampling.seed, len(context))
    same, moved = sampling.temperature, sampling.temperature * (_NARROW if favour > 0 else 1 / _NARROW)
    if (instead := await _says(client, context, sampling, moved)) == chosen:
        return None
    for _ in range(_HALVINGS):
        middle = (same + moved) / 2
        if (said := await _says(client, context, sampling, middle)) == chosen:
            same = middle
        else:
            moved, instead = middle, said
    return favour * (moved / sampling.temperature - 1) if instead == other else None


def _favours(one: int, other: int, seed: int, position: int) -> float:
    """How much more noise `one` gets than `other`."""
    first, second = gumbel(seed, position, np.array([one, other]))
    return float(first - second)


async def _says(client: EdgeClient, context: Sequence[int], sampling: SamplingSettings, temperature: float) -> int:
    """The target's token after `context`."""
    how = dataclasses.asdict(sampling) | {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True}
    client.settings = dataclasses.replace(client.settings, **how)
    return (await ask(client, context)).ids[0]
