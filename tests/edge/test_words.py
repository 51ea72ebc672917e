"""Words that several views share."""

from __future__ import annotations

import pytest

from edge_client.screen.words import first_words, last_words


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("short", "short", "short"),
        ("two\n words", "two words", "words"),
        ("A list has a tail", "A list has a…", "…list has a tail"),
        ("> **Bold**, `code`\n---\n", "> **Bold**,…", "Bold, code"),
        ("# Of heads", "# Of heads", "Of heads"),
        ("Donaudampfschifffahrt", "Donaudampfschif…", "…ampfschifffahrt"),
        ("\n*", "*", ""),
    ],
)
def test_a_text_is_quoted_in_whole_words(text: str, first: str, last: str) -> None:
    most = 16
    assert first_words(text, most) == first
    assert last_words(text, most) == last
    assert max(len(first), len(last)) <= most + 1
