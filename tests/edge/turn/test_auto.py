"""Whoever drafts best, `auto` comes near: over links, times of a forward and servers, in virtual
time, with texts that are guessed about as well as those of a real pair."""

from __future__ import annotations

import pytest

from tests.edge.turn.priced import Prices, cell, share_of_best, texts

LINKS = (0.0, 0.01, 0.02, 0.06, 0.15)
"""Round trips."""
FORWARDS = (0.01, 0.03, 0.06, 0.12, 0.23)
SERVERS = {"a sibling": 0.3, "a small drafter": 0.05, "a dear drafter": 1.0, "no drafter": None}
"""By the server's drafter: a level of its drafts, of a forward."""
TOKENS = 48
TEXTS = texts(2, TOKENS)


@pytest.mark.parametrize("level_share", SERVERS.values(), ids=list(SERVERS))
@pytest.mark.parametrize("forward", FORWARDS)
def test_auto_is_nearly_as_fast_as_the_best_way(forward: float, level_share: float | None) -> None:
    for round_trip in LINKS:
        prices = Prices(forward=forward, round_trip=round_trip, level_share=level_share)
        speeds = cell(TEXTS, prices, TOKENS)
        assert share_of_best(speeds) >= 0.95, f"{round_trip} s: {speeds}"
