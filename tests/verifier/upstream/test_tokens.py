"""Text of an upstream becomes the device's tokens, and decodes to the same text."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


class LikeLargeModels:
    """A tokenizer of the kind that Llama 3 and Qwen have, as far as this is about: a line break
    belongs to the sign before it, and a word of two characters may be one token."""

    _TOKEN = re.compile(r"今天|天气| ?\w| ?[^\s\w]+\n*|\s*\n|\s+(?!\S)|\s")

    def __init__(self) -> None:
        self._texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        found = self._TOKEN.findall(text)
        self._texts += [token for token in found if token not in self._texts]
        return [self._texts.index(token) for token in found]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[token] for token in ids)


LARGE_TEXTS = [
    "if a:\n    return [1]\n\n```\nb();\n",
    "1. A:\n\n2. B.\n\n- c,\n  d!\n",
    "今天天气。\n今天。\n\n天气",
    "a" + "?\n" * 99,
]


@pytest.mark.parametrize("text", LARGE_TEXTS)
@pytest.mark.parametrize("begins", [False, True])
def test_a_text_has_as_many_tokens_in_pieces_as_it_has_in_the_whole(
    text: str, *, begins: bool
) -> None:
    """Else an answer of an engine with the device's own tokenizer ends before its last token."""
    large = LikeLargeModels()
    written = large.encode(text)
    assert large.decode(written) == text
    tokens = TokensOfText(large.encode, large.decode, begins=begins)
    ids: list[int] = []
    for token in written:
        ids += tokens.add(large.decode([token]))
    ids += tokens.rest()
    assert ids == written


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
