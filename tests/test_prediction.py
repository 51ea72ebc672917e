"""A predicted text as a draft."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moa.speculation.prediction import Prediction

WORDS = st.lists(st.integers(0, 5), max_size=30)


def test_it_is_followed_from_its_beginning_and_found_again_behind_a_change() -> None:
    prediction = Prediction([1, 2, 3, 10, 11, 12, 13, 14])
    assert prediction.after([], 3) == [1, 2, 3]
    assert prediction.after([1, 2], 9) == [3, 10, 11, 12, 13, 14]
    assert prediction.after([1, 2, 7], 9) == []  # the answer says something else
    assert prediction.after([1, 2, 7, 10, 11, 12, 13], 9) == [14]
    assert prediction.after([1, 2, 3, 10, 11, 12, 13, 14], 9) == []


def test_after_drafts_in_vain_it_asks_for_more_agreement() -> None:
    ids = list(range(1, 30))
    prediction = Prediction(ids)
    for _ in range(3):
        prediction.judged(0)
    assert prediction.after([99, *ids[4:8]], 9) == []
    assert prediction.after([99, *ids[4:12]], 2) == ids[12:14]


@given(WORDS, WORDS)
def test_it_only_ever_says_what_was_predicted(ids: list[int], answer: list[int]) -> None:
    prediction = Prediction(ids)
    for end in range(len(answer) + 1):
        draft = prediction.after(answer[:end], 4)
        assert len(draft) <= 4
        assert any(ids[at : at + len(draft)] == draft for at in range(len(ids) + 1))
