from __future__ import annotations

import pytest

from tests.torture.history import Entry, Finished, Opened, Provisional, Resolved, Verified, violations

OPEN = Opened("s", [1, 2])


@pytest.mark.parametrize(
    "story",
    [
        [OPEN, Verified("s", 2, [3, 4]), Finished("s", [1, 2, 3, 4])],
        [OPEN, Verified("s", 2, [3]), Verified("s", 2, [3, 4]), Finished("s", [1, 2, 3, 4])],
        [OPEN, Verified("s", 2, [3]), Opened("s", [1, 2, 3]), Verified("s", 3, [4]), Finished("s", [1, 2, 3, 4])],
        [OPEN, Provisional("s", 2, [3]), Resolved("s", "confirmed", 1), Finished("s", [1, 2, 3])],
        [
            OPEN,
            Provisional("s", 2, [9]),
            Resolved("s", "retracted", 1),
            Verified("s", 2, [3]),
            Finished("s", [1, 2, 3]),
        ],
        [OPEN, Provisional("s", 2, [9, 8]), Resolved("s", "adopted", 2), Finished("s", [1, 2, 9, 8])],
    ],
)
def test_a_possible_story(story: list[Entry]) -> None:
    assert violations(story, {}) == []


@pytest.mark.parametrize(
    ("story", "problem"),
    [
        ([Verified("s", 0, [1])], "not opened"),
        ([OPEN, Verified("s", 3, [4])], "a gap"),
        ([OPEN, Verified("s", 2, [3]), Verified("s", 2, [4])], "changed"),
        ([OPEN, Verified("s", 1, [9])], "changed"),
        ([OPEN, Verified("s", 2, [3]), Finished("s", [1, 2])], "at the end"),
        ([OPEN, Verified("s", 2, [3]), Finished("s", [1, 2, 3, 3])], "at the end"),
        ([OPEN, Verified("s", 2, [3]), Opened("s", [1, 2, 4])], "another log"),
        ([OPEN, Provisional("s", 2, [3]), Finished("s", [1, 2])], "never resolved"),
        ([OPEN, Provisional("s", 3, [3])], "provisional at 3"),
        ([OPEN, Provisional("s", 2, [3]), Resolved("s", "confirmed", 2)], "only 1"),
    ],
)
def test_an_impossible_story(story: list[Entry], problem: str) -> None:
    found = violations(story)
    assert found
    assert problem in found[-1]


def test_the_text_is_held_against_the_target() -> None:
    story = [OPEN, Verified("s", 2, [3, 5]), Finished("s", [1, 2, 3, 5])]
    assert violations(story, {"s": [1, 2, 3, 5, 6]}) == []
    assert violations(story, {"s": [1, 2, 3, 4]}) == ["session s: not the target's text"]
