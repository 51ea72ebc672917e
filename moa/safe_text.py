"""Untrusted text, made safe for a terminal or a log: control characters become visible escapes.

A terminal obeys control characters: they move the cursor, rewrite what was printed, set the
clipboard or the title. A log is read line by line, so a line break forges an entry. Text from the
other end, a model, a file or a user is escaped here before it is shown.
"""

from __future__ import annotations

import re

# Control characters (C0, DEL, C1), line and paragraph separators, lone surrogates, and the marks
# that reorder text.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
_UNSAFE_BUT_LAYOUT = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
_LONGEST_LINE = 300


def safe_text(text: str) -> str:
    """The text with line breaks and tabs as they are, and everything else that a terminal would
    obey made visible."""
    return _UNSAFE_BUT_LAYOUT.sub(_visible, text.replace("\r\n", "\n"))


def safe_line(text: str, longest: int = _LONGEST_LINE) -> str:
    """The text as one line of at most about `longest` characters, for messages, tables and logs."""
    short = text if len(text) <= longest else text[:longest] + "…"
    return _UNSAFE.sub(_visible, short)


def _visible(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode("ascii")
