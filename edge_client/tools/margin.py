"""How close a choice of the target was, measured without logits by asking again with known noise.

A sampled token is the best of `logits / temperature + noise`, and the noise of a seed and position is known to both
ends. So the temperature at which the target's choice changes from one token to another gives the difference of their
logits. Bisection finds it, with one short request for each step.
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
"""Range of temperatures for the search if decoding is greedy."""
_NARROW = 1.25
"""If it is sampled: range around the temperature in use in which a near tie changes."""
_HALVINGS = 18
_ENOUGH_NOISE = (0.5, 0.9)
"""Extra noise for the other token: the smallest measurable margin is the lowest temperature times it."""


async def margin(
    client: EdgeClient, context: Sequence[int], chosen: int, other: int, sampling: SamplingSettings
) -> float | None:
    """The lead of the score of `chosen` over that of `other` after `context`; None if it is large.

    The scores are logits, or with sampling logits / temperature + noise. `client` should ask without drafts.
    """
    if sampling.greedy:
        return await _greedy(client, context, chosen, other, sampling)
    return await _sampled(client, context, chosen, other, sampling)


async def _greedy(
    client: EdgeClient, context: Sequence[int], chosen: int, other: int, sampling: SamplingSettings
) -> float | None:
    # A seed whose noise favours `other`: at a high temperature it is chosen, if only these two are likely.
    seed = next(
        seed
        for seed in count()
        if _ENOUGH_NOISE[0] < _noise_difference(other, chosen, seed, len(context)) < _ENOUGH_NOISE[1]
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
    return warm * _noise_difference(other, chosen, seed, len(context))


async def _sampled(
    client: EdgeClient, context: Sequence[int], chosen: int, other: int, sampling: SamplingSettings
) -> float | None:
    # The noise favours one token, the logits the other; the noise shows in which direction to change the temperature.
    favour = _noise_difference(other, chosen, sampling.seed, len(context))
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


def _noise_difference(one: int, other: int, seed: int, position: int) -> float:
    """The difference between the noise of `one` and of `other`."""
    first, second = gumbel(seed, position, np.array([one, other]))
    return float(first - second)


async def _says(client: EdgeClient, context: Sequence[int], sampling: SamplingSettings, temperature: float) -> int:
    """The target's token after `context`."""
    how = dataclasses.asdict(sampling) | {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True}
    client.settings = dataclasses.replace(client.settings, **how)
    return (await ask(client, context)).ids[0]
