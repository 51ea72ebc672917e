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
        prediction.told = [99]
        assert prediction.decided([98]) == 0
    assert prediction.after([99, *ids[4:8]], 9) == []
    assert prediction.after([99, *ids[4:12]], 2) == ids[12:14]


def test_the_verifier_is_told_more_when_much_is_missing_and_all_again_where_it_was_wrong() -> None:
    prediction = Prediction(range(100))
    assert prediction.tell([], 20) == list(range(20))
    assert prediction.tell([], 20) == []
    assert prediction.decided(range(5)) == 5
    assert prediction.tell(range(5), 20) == [], "it knows fifteen of these"
    assert prediction.decided(range(5, 18)) == 13
    assert prediction.tell(range(18), 20) == list(range(18, 38))
    assert prediction.decided([18, 77]) == 1
    assert prediction.told == []


@given(WORDS, WORDS)
def test_it_only_ever_says_what_was_predicted(ids: list[int], answer: list[int]) -> None:
    prediction = Prediction(ids)
    for end in range(len(answer) + 1):
        draft = prediction.after(answer[:end], 4)
        assert len(draft) <= 4
        assert any(ids[at : at + len(draft)] == draft for at in range(len(ids) + 1))
