from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa.safe_text import safe_line, safe_text

ATTACKS = {
    "clear": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;ZWNobw==\x07",
    "title": "\x1b]0;title\x07",
    "C1 CSI": "\x9b31m",
    "overwrite": "a\rb",
    "backspace": "\x08\x08\x08",
    "bidi": "\u202egnp.exe",
    "surrogate": "\ud800",
    "nul": "\x00",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_nothing_that_a_terminal_obeys_comes_through(attack: str) -> None:
    for safe in (safe_text(attack), safe_line(attack)):
        assert safe.encode()  # no lone surrogate
        assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in safe)
        assert "\u202e" not in safe


def test_ordinary_text_stays_as_it_is() -> None:
    text = "Größe: 3 µm\n\tनमस्ते 👩‍💻 שלום\n"
    assert safe_text(text) == text
    assert safe_text("a\r\nb") == "a\nb"


def test_a_line_is_one_line_and_bounded() -> None:
    assert safe_line("a\nb\u2028c") == "a\\nb\\u2028c"
    assert safe_line("x" * 10**6) == "x" * 300 + "…"


@given(st.text())
def test_whatever_comes_a_line_has_no_control_characters(text: str) -> None:
    safe = safe_line(text)
    assert len(safe.splitlines()) <= 1
    assert not any(unicodedata.category(character) == "Cc" for character in safe)
