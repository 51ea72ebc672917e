"""Sampling settings as they travel: the wire knows none of the numbers' meaning."""

from __future__ import annotations

from moa.sampling import SamplingSettings
from moa.wire.messages import Penalties, Sampling


def wire_sampling(settings: SamplingSettings) -> tuple[Sampling, Penalties | None]:
    """Return sampling settings as they travel: those that every verifier knows, and the penalties
    and biases, which are None where there are none."""
    sampling = Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        seed=settings.seed,
    )
    if not settings.adjusts:
        return sampling, None
    penalties = Penalties(
        settings.frequency_penalty, settings.presence_penalty, list(settings.logit_bias)
    )
    return sampling, penalties
