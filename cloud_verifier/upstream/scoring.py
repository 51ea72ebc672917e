"""What follows from an engine's candidates: which token is chosen, how much of a draft holds, and
which log-probabilities are passed on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cloud_verifier.upstream.contract import Candidates, UpstreamError
from moa.logprobs import pack
from moa.sampling import SamplingSettings, draw

_ROOM_FOR_TIES = 8
"""Candidates beyond top-k that are asked for: those as likely as the last one count, too."""


def follows(sampling: SamplingSettings, most: int) -> bool:
    """Whether `chosen` takes the token that a verifier of our own would take, if it knows only the
    `most` likeliest tokens of a place.

    Greedy text needs one. Sampled text needs all that may be drawn: top-k names how many. A
    repetition penalty divides logits, which cannot be done to log-probabilities.
    """
    if sampling.repetition_penalty != 1.0 or sampling.adjusts:
        return False
    return most > 0 if sampling.greedy else 0 < sampling.top_k <= most


def wanted(sampling: SamplingSettings, most: int) -> int:
    """Candidates to ask for, so that `chosen` can choose."""
    return 1 if sampling.greedy else min(most, sampling.top_k + _ROOM_FOR_TIES)


def chosen(place: Candidates, sampling: SamplingSettings, position: int) -> int:
    """The token at `position`, by the rule of `moa.sampling.choose`."""
    # By id, as that rule takes the smaller id of two that are equal.
    by_id = sorted(place.likeliest)
    tokens = np.array([token for token, _ in by_id], dtype=np.int64)
    scores = np.array([logprob for _, logprob in by_id], dtype=np.float64)
    return draw(scores, tokens, sampling, position)


def accepted(
    places: Sequence[Candidates], draft: Sequence[int], sampling: SamplingSettings, position: int
) -> list[int]:
    """Returns the tokens that are decided by what an engine tells of each place: those of the draft
    that the rule would choose itself, and one more. `position` is that of the draft's first
    token."""
    tokens: list[int] = []
    for index, place in enumerate(places):
        tokens.append(chosen(place, sampling, position + index))
        if index == len(draft) or tokens[-1] != draft[index]:
            break
    return tokens


def with_own(places: Sequence[Candidates], tokens: Sequence[int]) -> list[Candidates]:
    """The same, with the log-probabilities of the tokens that were chosen there."""
    return [
        Candidates(place.likeliest, own=dict(place.likeliest)[token])
        for place, token in zip(places, tokens, strict=True)
    ]


def packed(places: Sequence[Candidates], top: int) -> bytes:
    """Returns the log-probabilities of the tokens and of the `top` likeliest in their places, in
    the bytes of the protocol."""
    if any(len(place.likeliest) < top for place in places):
        raise UpstreamError(
            f"the upstream tells fewer than the {top} log-probabilities that were asked for",
            later=False,
        )
    shape = (len(places), top)
    likeliest = [place.likeliest[:top] for place in places]
    ids = np.array([[token for token, _ in row] for row in likeliest], np.int64).reshape(shape)
    numbers = np.array([[number for _, number in row] for row in likeliest], np.float32)
    own = np.array([place.own for place in places], np.float32)
    return pack(own, ids, numbers.reshape(shape))


def place_of(pairs: Any, *, most: int, own: Any = 0.0) -> Candidates:
    """Returns the candidates for one place from pairs of a log-probability and a token, in any
    order."""
    try:
        found = [(int(token), _logprob(number)) for number, token in pairs]
        found.sort(key=lambda one: (-one[1], one[0]))
        if not found or any(not 0 <= token < 2**31 for token, _ in found):
            raise ValueError
        return Candidates(tuple(found[:most]), own=_logprob(own))
    except (TypeError, ValueError, OverflowError):
        raise UpstreamError("the upstream sent candidates that are none") from None


def _logprob(value: Any) -> float:
    """A log-probability. Rounding may have made one a little larger than 0."""
    number = float(value)
    if not number <= 0.01:  # NaN is not, either
        raise ValueError
    return min(0.0, number)
