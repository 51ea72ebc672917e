"""The target's token is a fixed function of logits, settings, seed and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moa.errors import ConfigError, NumericalError
from moa.sampling import (
    MAX_SEED,
    SamplingSettings,
    adjust,
    candidates,
    choose,
    gumbel,
    penalize,
)


def test_greedy_is_the_argmax_after_the_penalty() -> None:
    logits = np.array([0.1, 2.0, 2.0, -1.0], dtype=np.float32)
    assert choose(logits, SamplingSettings(), 7) == 1
    penalised = SamplingSettings(repetition_penalty=2.0)
    assert choose(np.float32([1.0, 1.1]), penalised, 0, [1]) == 0
    assert penalised.greedy
    assert not penalised.plain_greedy


def test_noise_is_gumbels_and_depends_on_seed_position_and_token_alone() -> None:
    a = gumbel(1, 1, 50_000)
    b = gumbel(1, 2, 50_000)
    c = gumbel(2, 1, 50_000)
    for noise in (a, b, c):
        assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.03)
        assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.06)
    assert abs(np.corrcoef(np.stack([a, b, c]))[np.triu_indices(3, 1)]).max() < 0.02
    some = np.array([5, 999, 0])
    assert np.array_equal(gumbel(1, 1, some), a[some])
    over = np.array([gumbel(5, position, np.array([7]))[0] for position in range(4000)])
    assert over.mean() == pytest.approx(np.euler_gamma, abs=0.1)
    assert abs(np.corrcoef(over[1:], over[:-1])[0, 1]) < 0.06
    assert np.isfinite(gumbel(MAX_SEED, 2**31, 1000)).all()


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(temperature=1.0),
        SamplingSettings(temperature=0.6, top_p=0.9),
        SamplingSettings(temperature=1.4, top_k=8),
        SamplingSettings(temperature=1.0, min_p=0.1),
    ],
)
def test_sampled_frequencies_match_the_distribution(settings: SamplingSettings) -> None:
    logits = np.random.default_rng(1).normal(size=24).astype(np.float32) * 1.5
    draws = 8_000
    counts = np.bincount([choose(logits, settings, p) for p in range(draws)], minlength=len(logits))
    scaled = logits.astype(np.float64) / settings.temperature
    kept = candidates(scaled, settings)
    probability = np.exp(scaled[kept] - scaled[kept].max())
    probability /= probability.sum()
    assert counts.sum() == counts[kept].sum()
    likely = probability * draws >= 5
    found = counts[kept][likely]
    expected = probability[likely] * draws
    cells = int(likely.sum())
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert abs(chi_square - (cells - 1)) < 4 * np.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        (SamplingSettings(temperature=1.0, top_k=5), TopKLogitsWarper(5)),
        (SamplingSettings(temperature=1.0, top_p=0.7), TopPLogitsWarper(0.7)),
        (SamplingSettings(temperature=1.0, min_p=0.15), MinPLogitsWarper(0.15)),
    ],
)
def test_filters_keep_what_transformers_keeps(
    settings: SamplingSettings, reference: object, seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=40) * 2
    kept = reference(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits)[None])[0]  # type: ignore[operator]
    assert sorted(candidates(logits, settings)) == torch.isfinite(kept).nonzero().flatten().tolist()


def test_the_penalty_is_that_of_transformers() -> None:
    logits = np.random.default_rng(0).normal(size=20)
    context = [3, 4, 4, 9]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([context]), torch.from_numpy(logits)[None].clone()
    )
    assert np.allclose(penalize(logits, 1.3, context), theirs[0].numpy())


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**63},
        {"frequency_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logit_bias": tuple((token, 1.0) for token in range(1025))},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SamplingSettings(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.3}]
)
def test_no_token_is_told_from_logits_that_are_no_numbers(
    bad: float, settings: dict[str, float]
) -> None:
    logits = np.array([1.0, bad, -1.0], dtype=np.float32)
    with pytest.raises(NumericalError):
        choose(logits, SamplingSettings(**settings), 0)  # type: ignore[arg-type]
    with pytest.raises(NumericalError):
        choose(np.full(3, -np.inf, dtype=np.float32), SamplingSettings(**settings), 0)  # type: ignore[arg-type]
    assert choose(np.array([1.0, -np.inf], dtype=np.float32), SamplingSettings(**settings), 0) == 0  # type: ignore[arg-type]


def test_penalties_count_the_answer_and_biases_are_added() -> None:
    """logit[j] - count[j] * frequency - (count[j] > 0) * presence, as OpenAI has it."""
    logits = np.array([1.0, 2.0, 3.0, 4.0])
    settings = SamplingSettings(
        frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((0, 3.0), (9, 1.0))
    )
    assert adjust(logits, settings, [3, 3, 2]).tolist() == [4.0, 2.0, 2.25, 2.75]
    assert logits.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert not settings.plain_greedy
    context = [1, 1, 1]
    single = logits.astype(np.float32)
    assert choose(single, settings, 7, context, answer=[3, 3, 3, 3]) == 0
    assert choose(single, SamplingSettings(frequency_penalty=2.0), 7, [3] * 9) == 3, (
        "the prompt is not counted"
    )
    forbidden = SamplingSettings(logit_bias=((3, -100.0),))
    assert choose(single, forbidden, 7) == 2
