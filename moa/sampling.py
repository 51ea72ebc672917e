"""Which token the target chooses: a fixed function of its logits, the settings, the seed and the
position. Numpy only.

Sampling is `argmax(filtered logits / temperature + Gumbel noise)`, and the noise of a position
depends on nothing but the seed and that position. So the text is the same with speculation on or
off, in a tree or a chain, over one connection or ten, and the drafter can use the same noise to
guess the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moa.errors import ConfigError, NumericalError

GOLDEN = 0x9E3779B97F4A7C15
"""The step of splitmix64: 2^64 divided by the golden ratio, so that multiples of it spread evenly."""
_GOLDEN = np.uint64(GOLDEN)
MAX_SEED = 2**63 - 1
NO_LOGITS = "target logits contain NaN or Inf"
"""The message of the error where no token can be chosen."""
MIN_TEMPERATURE = 1e-3
"""The smallest temperature but 0. Below it, logits divided by the temperature overflow; the text is
greedy long before that."""
MAX_TEMPERATURE = 2.0
"""In OpenAI's API, and so here: above it text is hardly more than chance."""
MAX_BIASED = 1024
"""Tokens that may have a bias."""
_MOST_BIAS = 100.0
"""In OpenAI's API, and so here: beside usual logits it forbids a token, or leaves no other."""
ADJUSTMENTS = ("frequency_penalty", "presence_penalty", "logit_bias")
"""Settings that add numbers to the logits."""
_SORTED_FIRST = 256
"""Tokens that top-p looks at first; the rest of a large vocabulary is seldom needed."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to turn logits into a token. A temperature of 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    frequency_penalty: float = 0.0
    """Taken from a token's logit for every time that it is in the answer so far."""
    presence_penalty: float = 0.0
    """The same, once."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, each once, and what is added to their logits."""

    def __post_init__(self) -> None:
        """Raise a `ConfigError` that names the first setting that is out of range, and its
        range."""
        rules = {
            "temperature": (
                self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
                f"0 (greedy) or {MIN_TEMPERATURE:g}..{MAX_TEMPERATURE:g}",
            ),
            "top_k": (0 <= self.top_k <= 2**20, "0..1048576 (0 is off)"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0, up to 1"),
            "min_p": (0.0 <= self.min_p < 1.0, "from 0 to below 1"),
            "repetition_penalty": (0.1 <= self.repetition_penalty <= 10.0, "0.1..10 (1 is off)"),
            "seed": (0 <= self.seed <= MAX_SEED, f"0..{MAX_SEED}"),
            "frequency_penalty": (-2.0 <= self.frequency_penalty <= 2.0, "-2..2 (0 is off)"),
            "presence_penalty": (-2.0 <= self.presence_penalty <= 2.0, "-2..2 (0 is off)"),
            "logit_bias": (
                self._biases_are_good(),
                f"of {MAX_BIASED} tokens at most, each once, from -100 to 100",
            ),
        }
        for name, (is_good, allowed) in rules.items():
            if not is_good:
                raise ConfigError(f"{name} must be {allowed}, not {getattr(self, name)}")

    def _biases_are_good(self) -> bool:
        """Whether there are not too many biases, each token has one, and none is out of range."""
        if len(self.logit_bias) > MAX_BIASED:
            return False
        tokens = {token for token, _ in self.logit_bias}
        if len(tokens) < len(self.logit_bias):
            return False
        return all(
            token >= 0 and -_MOST_BIAS <= bias <= _MOST_BIAS for token, bias in self.logit_bias
        )

    @property
    def greedy(self) -> bool:
        """Whether no noise is drawn."""
        return self.temperature == 0.0

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the logits, which an accelerator can compute without
        copying them to the host."""
        return self.greedy and self.repetition_penalty == 1.0 and not self.adjusts

    @property
    def counts(self) -> bool:
        """Whether it matters how often a token is in the answer."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """Whether numbers are added to the logits, by what the answer has so far or by a bias."""
        return self.counts or bool(self.logit_bias)

    @property
    def adjustments(self) -> list[str]:
        """The names of those settings that add numbers to the logits and are set."""
        return [name for name in ADJUSTMENTS if getattr(self, name)]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit moves about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """A key for each pair of a seed and a position, from which the noise of its tokens is made."""
    with np.errstate(over="ignore"):  # overflow is intended
        seed_keys = _mix(np.array(seeds, np.uint64) + _GOLDEN)
        return _mix(seed_keys + np.array(positions, np.uint64) * _GOLDEN)


def gumbel(seed: int, position: int, tokens: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise for `position`: of a whole vocabulary (its size) or of chosen token
    ids.

    Counter-based: each number depends on (seed, position, token) alone, so any of them can be
    computed without the others. One draw of 2^53 rounds to 1.0, whose noise is infinite: that token
    is chosen. To mend it would change all seeded texts.
    """
    ids = np.arange(tokens) if isinstance(tokens, int) else tokens
    with np.errstate(over="ignore"):  # overflow is intended
        counters = (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(noise_keys([seed], [position]) + counters)
    # The top 53 bits, as many as a double holds, as a number between 0 and 1; the half keeps it
    # from being 0, whose logarithm is infinite.
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(uniform)), dtype=np.float64)


Context = Sequence[int] | NDArray[np.int64]
"""Tokens of the text so far; it does not matter how often one occurs."""


def penalize(logits: NDArray[np.float64], penalty: float, context: Context) -> NDArray[np.float64]:
    """Return the logits with those of tokens that are in the context made lower by the repetition
    penalty, the way `transformers` does; however often a token occurs, it counts once."""
    if penalty == 1.0 or not len(context):
        return logits
    seen = np.asarray(context, dtype=np.int64)
    before = logits[seen]
    penalized = logits.copy()
    # Both lower the logit, for a penalty above 1: a positive one is divided, a negative multiplied.
    penalized[seen] = np.where(before > 0, before / penalty, before * penalty)
    return penalized


def adjust(
    logits: NDArray[np.float64], settings: SamplingSettings, answer: Context
) -> NDArray[np.float64]:
    """Return the logits less the penalties of tokens that are in the answer, by how often each is,
    and with the biases added. The order of the two is fixed, so that the sums are the same bits
    wherever they are made."""
    if not settings.adjusts:
        return logits
    logits = logits.copy()
    if settings.counts and len(answer):
        ids, times = np.unique(np.asarray(answer, dtype=np.int64), return_counts=True)
        logits[ids] -= settings.frequency_penalty * times + settings.presence_penalty
    for token, bias in settings.logit_bias:
        if token < len(logits):
            logits[token] += bias
    return logits


def candidates(logits: NDArray[np.float64], settings: SamplingSettings) -> NDArray[np.int64]:
    """Ids that survive top-k, then top-p, then min-p, on temperature-scaled logits. Never empty."""
    ids = np.arange(len(logits))
    if 0 < settings.top_k < len(ids):
        ids = _best(logits, settings.top_k)
    if settings.top_p < 1.0 or settings.min_p > 0.0:
        ids = _nucleus(logits[ids], settings, ids)
    return ids


def _best(logits: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The places of the `count` best logits. Ties at the edge stay in, so that the set does not
    depend on the order of a partial sort."""
    edge = np.partition(logits, -count)[-count]
    return np.flatnonzero(logits >= edge)


def _nucleus(
    logits: NDArray[np.float64], settings: SamplingSettings, ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Those of the token `ids`, whose logits these are, that top-p and min-p keep, the likeliest
    first. It sorts no more of a large vocabulary than it needs: the best ones, and more of them
    while all that were sorted are kept."""
    best = logits.max()
    mass = np.exp(logits - best).sum()
    count = _SORTED_FIRST
    while True:
        some = _best(logits, count) if count < len(ids) else np.arange(len(ids))
        some = some[np.lexsort((ids[some], -logits[some]))]  # by logit, then by id
        probability = np.exp(logits[some] - best) / mass
        # A token stays while the mass before it has not reached top_p: the first always stays.
        mass_before = np.cumsum(probability) - probability
        keep = (mass_before < settings.top_p) & (probability >= settings.min_p * probability[0])
        if not keep.all() or len(some) == len(ids):
            kept: NDArray[np.int64] = ids[some[keep]]
            return kept
        count *= 16  # all of these stay, so tokens after them may stay, too


def choose(
    logits: NDArray[np.float32],
    settings: SamplingSettings,
    position: int,
    context: Context = (),
    allowed: NDArray[np.bool_] | None = None,
    answer: Context = (),
) -> int:
    """Choose the token at `position`, its index in the text, from the logits after the token before
    it. It is one of the `allowed`, as if there were no others. The repetition penalty is for the
    tokens of the `context`, the other penalties for those of the `answer`, the tokens since the
    prompt. A `NumericalError` where the logits contain NaN or Inf."""
    if not np.isfinite(logits.max()):
        raise NumericalError(NO_LOGITS)
    if settings.plain_greedy and allowed is None:
        return int(np.argmax(logits))
    scores = penalize(logits.astype(np.float64), settings.repetition_penalty, context)
    scores = adjust(scores, settings, answer)
    tokens = np.arange(len(scores)) if allowed is None else np.flatnonzero(allowed)
    scores = scores[tokens]
    return draw(scores, tokens, settings, position)


def draw(
    scores: NDArray[np.float64],
    tokens: NDArray[np.int64],
    settings: SamplingSettings,
    position: int,
) -> int:
    """Choose one of these tokens for `position`, its index in the text, given their scores: logits,
    or log-probabilities, which differ from them by a constant. The likeliest, or the one that the
    seed draws; of equal ones the first."""
    if settings.greedy:
        return int(tokens[np.argmax(scores)])
    scores = scores / settings.temperature
    kept = candidates(scores, settings)
    tokens = tokens[kept]
    # The best sum of a score and Gumbel noise is a draw by the probabilities (Gumbel-max).
    return int(tokens[np.argmax(scores[kept] + gumbel(settings.seed, position, tokens))])
