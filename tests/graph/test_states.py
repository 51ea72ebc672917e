"""Kept running states: what is taken back costs about as many tokens again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moa.graph.states import StateHistory


def written(history: StateHistory, start: int, stop: int) -> None:
    """A step whose state says which token it was after."""
    before, after = history.step(start, stop)
    assert before[0][0] == start, "it goes on from the state that is asked for"
    assert after[0] is not before[0]
    after[0][0] = stop


@pytest.mark.parametrize("bytes_of_a_state", [4, 2**24])
def test_what_is_taken_back_is_about_what_is_run_again(bytes_of_a_state: int) -> None:
    history = StateHistory([(bytes_of_a_state // 4,)])
    for token in range(600):
        written(history, token, token + 1)
    for back in range(1, 500):
        known = history.latest(600 - back)
        assert 600 - back - known <= (back if bytes_of_a_state == 4 else 4 * back)


def test_any_history_goes_on_from_what_it_was() -> None:
    rng = random.Random(2)
    for _ in range(200):
        history = StateHistory([(2, 3), (1,)])
        history.step(0, 1)[1][0][0] = 1
        length = 1
        for _ in range(60):
            if rng.random() < 0.3:
                length = history.latest(rng.randrange(length + 1))
            piece = rng.choice((1, 1, 1, 5, 128))
            before, after = history.step(length, length + piece)
            assert np.all(before[0][0] == length)
            after[0][0] = length = length + piece
