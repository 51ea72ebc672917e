"""Text of an upstream becomes the device's tokens, and decodes to the same text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_verifier.upstream.app import DeviceTokens
from cloud_verifier.upstream.tokens import TokensOfText
from moa import demo
from moa.bundle import Bundle

TOKENS = DeviceTokens(Bundle.open(demo.paths().bundle))
WRITTEN = st.text(
    alphabet=st.sampled_from("abc XY.,\n\t<|im_end>é字語🙂'0123"), min_size=0, max_size=200
)


@settings(max_examples=200, deadline=None)
@given(text=WRITTEN, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_any_pieces_of_a_text_give_tokens_of_that_text(text: str, cuts: list[int]) -> None:
    tokens = TokensOfText(TOKENS.encode, TOKENS.decode)
    ids: list[int] = []
    begun = 0
    for at in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        ids += tokens.add(text[begun:at])
        begun = at
    ids += tokens.rest()
    assert TOKENS.decode(ids) == text


def test_words_are_encoded_as_the_device_would_have_written_them() -> None:
    text = "Ada lived near a quiet garden. There Ada met a strange fox."
    tokens = TokensOfText(TOKENS.encode, TOKENS.decode)
    ids: list[int] = []
    for character in text:
        ids += tokens.add(character)
    ids += tokens.rest()
    assert ids == TOKENS.encode(text)


def test_the_first_text_of_an_answer_is_not_kept_back() -> None:
    tokens = TokensOfText(TOKENS.encode, TOKENS.decode, begins=True)
    assert tokens.add(" ") == []  # nobody sees it
    assert TOKENS.decode(tokens.add("Ada")) == " Ada"
    assert tokens.add(" liv") == []
    assert TOKENS.decode(tokens.add("ed near")) == " lived"


def test_text_that_looks_like_a_special_token_ends_nothing() -> None:
    special = TOKENS._with_special.id_to_token(TOKENS.eos_ids[0])
    tokens = TokensOfText(TOKENS.encode, TOKENS.decode)
    ids = [*tokens.add(f"a {special} b"), *tokens.rest()]
    assert not set(ids) & set(TOKENS.eos_ids)
    assert TOKENS.decode(ids) == f"a {special} b"


@pytest.mark.parametrize("text", ["x" * 1000, "字" * 300, " " * 300])
def test_text_without_a_boundary_is_not_kept_back_for_ever(text: str) -> None:
    tokens = TokensOfText(TOKENS.encode, TOKENS.decode)
    given_out = 0
    for character in text:
        given_out += len(TOKENS.decode(tokens.add(character)))
    assert len(text) - given_out <= 65
