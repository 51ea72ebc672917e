"""The rule of `moa.sampling.choose`, applied to the likeliest tokens alone."""

from __future__ import annotations

import numpy as np
import pytest

from cloud_verifier.upstream.contract import Candidates, UpstreamError
from cloud_verifier.upstream.scoring import accepted, chosen, follows, packed, wanted, with_own
from moa.logprobs import unpack
from moa.sampling import SamplingSettings, choose

MOST = 20


def place(logits: np.ndarray, count: int) -> Candidates:
    """What an engine tells of these logits."""
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs, kind="stable")[:count]
    return Candidates(tuple((int(token), float(logprobs[token])) for token in best))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(),
        SamplingSettings(temperature=0.7, top_k=5, seed=3),
        SamplingSettings(temperature=1.3, top_k=20, top_p=0.8, seed=4),
        SamplingSettings(temperature=0.9, top_k=12, min_p=0.05, seed=5),
    ],
)
def test_the_choice_is_that_of_a_whole_vocabulary(sampling: SamplingSettings) -> None:
    rng = np.random.default_rng(1)
    assert follows(sampling, MOST)
    for position in range(500):
        logits = (3 * rng.standard_normal(400)).round(2).astype(np.float32)  # with equal ones
        told = place(logits.astype(np.float64), wanted(sampling, 2 * MOST))
        assert chosen(told, sampling, position) == choose(logits, sampling, position)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(temperature=0.7),
        SamplingSettings(temperature=0.7, top_p=0.9),
        SamplingSettings(temperature=0.7, top_k=MOST + 1),
        SamplingSettings(repetition_penalty=1.1),
        SamplingSettings(frequency_penalty=0.5),
    ],
)
def test_what_the_likeliest_tokens_cannot_tell(sampling: SamplingSettings) -> None:
    assert not follows(sampling, MOST)
    assert not follows(SamplingSettings(), 0)


def test_a_draft_holds_up_to_the_first_other_token() -> None:
    greedy = SamplingSettings()
    told = [Candidates(((token, -0.1), (9, -2.0))) for token in (1, 2, 3)]
    assert accepted(told, [1, 2], greedy, 10) == [1, 2, 3]
    assert accepted(told, [1, 9], greedy, 10) == [1, 2]
    assert accepted(told, [9, 2], greedy, 10) == [1]


def test_log_probabilities_are_packed_as_ours_are() -> None:
    told = with_own([Candidates(((1, -0.5), (9, -2.0)))], [9])
    (row,) = unpack(packed(told, 2), 2, 10)
    assert row.logprob == -2.0
    assert row.top == ((1, -0.5), (9, -2.0))
    (row,) = unpack(packed(told, 0), 0, 10)
    assert row.logprob == -2.0
    assert row.top == ()
    with pytest.raises(UpstreamError, match="fewer than the 3"):
        packed(told, 3)
