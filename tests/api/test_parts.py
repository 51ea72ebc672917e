"""Thinking and answer, however the text is cut into pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moa.api.parts import Separator, split, within_thinking
from moa.api.present import Show


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("42", False, "", "42"),
        ("<think>\nhm\n</think>\n\n42", False, "hm\n", "42"),
        ("\n<think>hm</think>42", False, "hm", "42"),
        ("<think>hm", False, "hm", ""),
        ("<thin", False, "", "<thin"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("hm\n</think>\n\n42", True, "hm\n", "42"),
        ("hm", True, "hm", ""),
    ],
)
def test_only_thinking_at_the_beginning_is_split_off(
    text: str, opened: bool, reasoning: str, answer: str
) -> None:
    assert split(text, thinking=opened) == (reasoning, answer)


@pytest.mark.parametrize(
    ("prompt", "begun", "within"),
    [
        ("user: hi\nassistant: <think>\n", "", True),
        ("user: hi\nassistant: ", "<think>\nhm", True),
        ("user: hi\nassistant: <think>\n", "hm</think>4", False),
        ("user: hi\nassistant: <think>\n\n</think>\n\n", "", False),
        ("user: what is <think>?\nassistant: ", "It is", False),
    ],
)
def test_a_model_that_begins_by_thinking_is_known_by_its_prompt(
    prompt: str, begun: str, within: bool
) -> None:
    assert within_thinking(prompt, begun) is within


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "\n", "a", "</"]), max_size=9
).map("".join)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine is slow
@given(
    st.lists(st.tuples(TEXTS, st.floats(0, 1), st.booleans()), min_size=1, max_size=6),
    st.booleans(),
)
def test_whatever_is_appended_and_withdrawn_its_client_has_the_split_text(
    changes: list[Any], thinking: bool
) -> None:
    separator = Separator(thinking=thinking)
    text = ""
    has = ["", ""]
    for number, (added, where, cuts) in enumerate(changes):
        cut = int(where * len(text)) if cuts else None
        text = text[:cut] + added
        last = number == len(changes) - 1
        for index, part in enumerate(separator.take(Show(added, len(text), cut), last=last)):
            assert part.cut is None or cuts, "what only grows takes nothing back"
            has[index] = has[index][: part.cut] + part.text
            assert part.verified == len(has[index])
        assert not last or tuple(has) == split(text, thinking=thinking)
