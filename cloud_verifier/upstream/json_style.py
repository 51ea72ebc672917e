"""JSON of any style as ours. Pure.

A service writes JSON compact, indented, or in a fence of Markdown; our grammars know one style, in
which most is known in advance. Only white space outside of texts changes.
"""

from __future__ import annotations

_FENCE = "```"


class JsonStyle:
    """Rewrites a JSON text that comes in pieces."""

    def __init__(self, begun: str = "") -> None:
        """`begun`: what comes before, in our style already."""
        self._in_text = False
        self._escaped = False
        self._first = ""
        """The beginning, while it may be a fence; nothing but a fence begins with its mark."""
        self._may_be_fence = not begun
        if begun:
            self._styled(begun)

    def add(self, text: str) -> str:
        """Returns a piece of the text in our style. The beginning is kept back while it may be a
        fence of Markdown around the JSON, which is left out."""
        if not self._may_be_fence:
            return self._styled(text)
        self._first = (self._first + text).lstrip()
        if _FENCE.startswith(self._first[: len(_FENCE)]) and "\n" not in self._first:
            return ""  # a part of the mark, or a line that is not complete
        self._may_be_fence = False
        first = self._first
        if first.startswith(_FENCE):
            _, _, first = first.partition("\n")
        return self._styled(first)

    def rest(self) -> str:
        """Return what was kept back, as a fence may begin so: the answer has ended."""
        if not self._may_be_fence:
            return ""
        self._may_be_fence = False
        return self._styled(self._first)

    def _styled(self, text: str) -> str:
        """Returns a piece of JSON with white space only where our style has it: a space behind each
        comma and colon. Strings stay as they are."""
        styled: list[str] = []
        for character in text:
            if self._in_text:
                styled.append(character)
                # A quote ends the string, unless a backslash escapes it.
                self._in_text = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character in ",:":
                styled.append(f"{character} ")
            elif not character.isspace():
                styled.append(character)
                self._in_text = character == '"'
        return "".join(styled)
