"""One pass or steps: which promises more tokens a second, by what was measured when the bundle was made."""

from __future__ import annotations

from collections.abc import Sequence

from edge_client.turn.controller import DEPTHS, PRIOR_FORWARD
from moa.manifest import Manifest, Variant

_MARGIN = 1.1
"""One pass must promise so much more: the times are the builder's and the texts not the user's, and in use a pass also
runs over the tokens that were just accepted, whose rows were masks."""


def one_pass_pays(manifest: Manifest, variant: Variant, threads: int) -> bool:
    """Whether this variant drafts in one pass unless asked otherwise; by steps wherever something was not measured."""
    if manifest.block is None or manifest.calibration is None or manifest.calibration.one_pass is None:
        return False
    times = variant.step_times
    nearest = min((time.threads for time in times), key=lambda count: abs(count - threads), default=0)
    seconds = {time.tokens: time.ms / 1000 for time in times if time.threads == nearest}
    step, whole = seconds.get(1), seconds.get(manifest.block.positions)
    calibrated = (manifest.calibration.acceptance, manifest.calibration.one_pass)
    steps, one_pass = (level_rates(reached.chain) for reached in calibrated)
    if not (step and whole and steps and one_pass):
        return False
    return one_pass_wins(steps, one_pass, step=step, whole=whole)


def one_pass_wins(steps: Sequence[float], one_pass: Sequence[float], *, step: float, whole: float) -> bool:
    """Compare tokens a second of the best chain by steps with those of the whole block in one pass.

    Rates are by level, given the level before; `step` and `whole`, the pass, are seconds. The rest of a round is a
    verification, as long as the controller's prior. A link's round trip has no prior; it favours what wins more tokens.
    """
    by_steps = max(_tokens(steps, depth) / (PRIOR_FORWARD + depth * step) for depth in range(1, DEPTHS + 1))
    at_once = _tokens(one_pass, min(len(one_pass), DEPTHS)) / (PRIOR_FORWARD + whole)
    return at_once > _MARGIN * by_steps


def level_rates(reached: Sequence[float]) -> list[float]:
    """Chances that a level is accepted, given the level before, from those that a draft gets so far."""
    before = (1.0, *reached)
    return [now / was if was > 0 else 0.0 for was, now in zip(before, reached, strict=False)]


def _tokens(rates: Sequence[float], depth: int) -> float:
    """Of a round, the target's own included; levels deeper than were measured count as the controller counts them."""
    tokens = reach = 1.0
    for level in range(depth):
        reach *= rates[min(level, len(rates) - 1)]
        tokens += reach
    return tokens
