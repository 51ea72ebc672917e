"""Thinking and answer, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa.api.reasoning import ReasoningSplitter, split


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("42", "", "42"),
        ("<think>\nhm\n</think>\n\n42", "hm\n", "42"),
        ("\n<think>hm</think>42", "hm", "42"),
        ("<think>hm", "hm", ""),
        ("<thin", "", "<thin"),
        ("a <think>b</think>", "", "a <think>b</think>"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ],
)
def test_only_thinking_at_the_beginning_is_split_off(text: str, reasoning: str, answer: str) -> None:
    assert split(text) == (reasoning, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "\n", "a", "</"]), max_size=9), st.data())
def test_pieces_bring_what_the_whole_does(parts: list[str], data: st.DataObject) -> None:
    text, splitter, told = "".join(parts), ReasoningSplitter(), ["", ""]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for added in (*map(splitter.feed, pieces), splitter.feed("", last=True)):
        told = [told[0] + added[0], told[1] + added[1]]
    assert tuple(told) == split(text)
