"""Natural text is the same everywhere, and no package is both trained on and held out."""

from itertools import islice

import pytest

from demo import natural
from moa.errors import UsageError


def test_no_package_is_in_both_splits() -> None:
    assert not set(natural.TRAINED) & set(natural.HELD_OUT)


def test_english_reads_as_prose() -> None:
    for text in islice(natural.english("heldout"), 30):
        assert len(text) >= 240
        assert ">>>" not in text
        assert not text.lstrip().startswith(("def ", "import "))


def test_text_is_the_same_again() -> None:
    for kind in (natural.code, natural.english):
        assert list(islice(kind("heldout"), 12)) == list(islice(kind("heldout"), 12))


def test_packages_take_turns() -> None:
    first = list(islice(natural.code("heldout"), len(natural.HELD_OUT)))
    assert all(next(natural.files(package)) in first for package in natural.HELD_OUT)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(UsageError, match="no_such_package is not installed"):
        next(natural.files("no_such_package"))


def test_prompts_and_their_ends_are_the_text() -> None:
    texts = ["word " * 100, "short"]
    assert list(natural.passages(texts)) == [("word " * 32 + "word", " word" * 67 + " ")]
    code = "def f():\n" + "    x = 1\n" * 20
    assert ["".join(parts) for parts in natural.functions([code, "not python ("])] == [code]
