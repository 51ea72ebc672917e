from __future__ import annotations

from collections.abc import Sequence

import pytest

from moa.wire.finish import TurnRules, cut_path, first_finish

RULES = TurnRules(start=3, max_new_tokens=10, max_context=100, eos_ids=frozenset({2}))


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(i) for i in ids)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ([5, 6], (2, "")),
        ([5, 2, 6], (2, "eos")),
        ([5] * 12, (10, "length")),
        ([5] * 9 + [2], (10, "eos")),
        ([], (0, "")),
    ],
)
def test_the_first_reason_counts(new: list[int], expected: tuple[int, str]) -> None:
    assert first_finish(RULES, [1, 1, 1], new, None) == expected


def test_the_context_ends_a_turn() -> None:
    rules = TurnRules(start=0, max_new_tokens=100, max_context=5)
    assert first_finish(rules, [1, 1, 1], [7, 7, 7], None) == (2, "context")


@pytest.mark.parametrize(
    ("prompt", "said", "new", "expected"),
    [
        ("xx", "abE", "NDcd", (2, "stop")),
        ("xx", "abE", "Nxcd", (4, "")),
        ("END", "", "x", (1, "")),
        ("xEN", "", "D", (1, "")),
    ],
)
def test_a_stop_string_behind_the_prompt_ends_the_turn_with_the_token_that_completes_it(
    prompt: str, said: str, new: str, expected: tuple[int, str]
) -> None:
    rules = TurnRules(start=len(prompt), max_new_tokens=100, max_context=100, stop=("END",))
    assert first_finish(rules, [*map(ord, prompt + said)], [*map(ord, new)], letters) == expected


def test_long_outputs_are_not_decoded_again_and_again() -> None:
    rules = TurnRules(start=0, max_new_tokens=10**6, max_context=10**6, stop=("END",))
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return letters(ids)

    first_finish(rules, [ord("x")] * 10_000, [ord("y")] * 3, decode)
    assert max(seen) < 30


def test_a_path_is_cut_where_the_turn_ends() -> None:
    tokens = [9, 5, 2, 7]
    path = [0, 1, 2, 3]
    assert cut_path(RULES, [1, 1, 1, 9], tokens, path, 8, None) == ([0, 1], 2, "eos")
    assert cut_path(RULES, [1, 1, 1, 9], tokens[:2], [0, 1], 8, None) == ([0, 1], 8, "")
