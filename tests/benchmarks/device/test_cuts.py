"""What the comparison of cuts says of an answer, beside the uninterrupted one."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.device.cuts import Seen, judge

TRUTH = "The fox lives near a quiet garden, and Ada meets it there."


def seen(text: str, **more: Any) -> Seen:
    """An answer of a client that marks nothing."""
    return Seen(**{"text": text, "unmarked": text, "ended": True, "cut_at": 10.0, **more})


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (seen(TRUTH), {"ended", "same"}),
        (seen(TRUTH[:30], ended=False, error="no"), {"lost"}),
        (seen(f"{TRUTH[:30]}{TRUTH}"), {"ended", "twice", "wrong"}),
        (seen(f"{TRUTH[:30]} by a river."), {"ended", "wrong"}),
        (seen(f"{TRUTH[:30]} by a river.", unmarked=TRUTH[:30], marked=True), {"ended", "marked"}),
        (seen(TRUTH, marked=True), {"ended", "same", "corrected"}),
        (seen(TRUTH, unmarked=TRUTH[:9], marked=True), {"ended", "marked"}),
    ],
    ids=["whole", "lost", "twice", "wrong", "left marked", "corrected", "right but unverified"],
)
def test_an_answer_is_judged_by_what_its_reader_takes_for_the_models(
    one: Seen, said: set[str]
) -> None:
    judged = judge(one, TRUTH)
    assert {name for name, value in judged.items() if value and name != "next"} == said


def test_who_ends_with_an_error_has_not_gone_on() -> None:
    pieces = [9.0, 10.5, 12.0]
    assert judge(seen(TRUTH[:9], ended=False, pieces=pieces), TRUTH)["next"] is None
    assert judge(seen(TRUTH, pieces=pieces), TRUTH)["next"] == 0.5
    assert judge(seen(TRUTH, pieces=pieces, marked=True, alone_at=12.0), TRUTH)["next"] == 2.0
