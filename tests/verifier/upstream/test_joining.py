"""An answer in pieces joins the text that is there: nothing twice, nothing lost, or it is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_verifier.upstream.joining import Anew, Behind, ContradictedError, Join, Told

ANSWER = (
    "The capital of France is Paris. It lies on the Seine, and has been the seat of kings, "
    "emperors and presidents. Its museums are many:\n\n* the Louvre\n* the Orsay\n"
)
PLACES = range(len(ANSWER) + 1)
WORD_ENDS = [
    at for at in range(8, len(ANSWER)) if ANSWER[at - 1].isalnum() and not ANSWER[at].isalnum()
]


def joined(join: Join, text: str, cuts: Sequence[int] = ()) -> str:
    """What comes out when a text comes in pieces."""
    told = ""
    begun = 0
    for at in [*sorted({cut for cut in cuts if cut < len(text)}), len(text)]:
        if at > begun:
            told += join.add(text[begun:at])
        begun = at
    return told + join.rest()


CUTS = st.lists(st.integers(0, len(ANSWER)), max_size=20)


@settings(max_examples=80, deadline=None)
@given(at=st.sampled_from(PLACES), cuts=CUTS, doubted=st.booleans())
def test_an_answer_that_goes_on_is_taken_as_it_is(at: int, cuts: list[int], doubted: bool) -> None:
    begun = ANSWER[:at]
    sent = begun.rstrip()
    assert begun + joined(Behind(begun, doubted=doubted), ANSWER[len(sent) :], cuts) == ANSWER
    # One that leaves the space out, since the text that it has had none.
    assert (begun + joined(Behind(begun, doubted=doubted), ANSWER[at:], cuts)).split() == (
        ANSWER.split()
    )


@settings(max_examples=80, deadline=None)
@given(at=st.sampled_from(PLACES), cuts=CUTS)
def test_an_answer_that_begins_anew_is_said_once(at: int, cuts: list[int]) -> None:
    begun = ANSWER[:at]
    assert begun + joined(Anew(begun), ANSWER, cuts) == ANSWER
    if at >= 16:
        assert begun + joined(Behind(begun, doubted=True), ANSWER, cuts) == ANSWER


@settings(max_examples=80, deadline=None)
@given(at=st.sampled_from(WORD_ENDS), cuts=CUTS, again=st.integers(8, 60))
def test_one_told_to_go_on_may_say_the_last_words_again(
    at: int, cuts: list[int], again: int
) -> None:
    begun = ANSWER[:at]
    whole = begun + joined(Told(begun), ANSWER[max(0, at - again) :], cuts)
    assert whole.split() == ANSWER.split()


def test_words_are_not_glued() -> None:
    assert joined(Told("The Louvre"), "is large") == " is large"
    assert joined(Told("The Louvre"), ", of course") == ", of course"
    assert joined(Told("The Louvre "), "is large") == "is large"


@pytest.mark.parametrize("at", [20, 70, 120])
def test_another_answer_is_refused_before_anything_comes_out(at: int) -> None:
    begun = ANSWER[:at]
    for other in ("Paris.", ANSWER[: at - 3] + "XYZ", ""):
        with pytest.raises(ContradictedError):
            joined(Anew(begun), other, range(len(other)))
    if at > 70:
        for join in (Behind(begun, doubted=True), Told(begun)):
            other = ANSWER[: at - 3] + "XYZ" * 200
            with pytest.raises(ContradictedError):
                joined(join, other, range(len(other)))


def test_nothing_is_kept_back_once_it_is_clear() -> None:
    for join in (Behind(ANSWER, doubted=True), Behind(ANSWER, doubted=False), Told(ANSWER)):
        assert joined(join, "xx") == "xx"
        assert join.add("\n") == "\n"
