"""Markdown on a terminal, line by line, so that it fits text that is withdrawn and corrected while
it comes: how a line is drawn never depends on a later one.

Headings, **bold**, `code`, lists, quotes and fenced code are drawn; tables, links and emphasis with
one star stay as they were written. In this program italic text is text that is not verified.
"""

from __future__ import annotations

import re

from rich.text import Text

CODE = "cyan"
"""The style of code, in a block or in a line."""
MARK = "dim"
"""The style of what only marks where something begins and ends."""
_LONGEST_LINE = 2000
"""Characters of a line in which marks are looked for: in longer ones that could take long."""
_FENCE = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}\s+(?=\S)")
_RULE = re.compile(r" {0,3}([-*_])(?:\s*\1){2,}\s*$")
_BULLET = re.compile(r"(\s*)[-*+](?=\s+\S)")
_QUOTE = re.compile(r"(\s*)>\s?")
_INLINE = re.compile(
    r"(?P<marks>`+)(?P<code>(?:(?!(?P=marks)).)+?)(?P=marks)(?!`)"
    r"|\*\*(?=\S)(?P<bold>.+?)(?<=\S)\*\*"
)
"""A piece of code, or bold text. In code nothing else is a mark."""


class MarkdownLines:
    """Draws the lines of one text, in their order."""

    def __init__(self, before: str = "") -> None:
        """Begin to draw behind the text `before`, which somebody else has shown."""
        self._fence = ""
        """What opened the block of code in which the next line stands; empty outside of one."""
        self._begun = ""
        """The beginning of the next line, if that was shown already."""
        *whole, begun = before.split("\n")
        for line in whole:
            self._pass(line)
        self._begun = begun

    def drawn(self, text: Text) -> Text:
        """Returns these lines as they are drawn. They are complete: the next ones follow them."""
        return self._joined(text)

    def open_drawn(self, text: Text) -> Text:
        """Returns lines as they are drawn now, that may change: the next ones do not follow
        them."""
        state = (self._fence, self._begun)
        drawn = self._joined(text)
        self._fence, self._begun = state
        return drawn

    def _joined(self, text: Text) -> Text:
        lines = text.split("\n", allow_blank=True)
        return Text("\n").join([self._line(line) for line in lines])

    def _line(self, line: Text) -> Text:
        """Returns a line as it is drawn, and notes what it means for the next one."""
        plain = line.plain
        was_code = bool(self._fence)
        is_within = bool(self._begun)
        is_fence = self._pass(plain)
        drawn = line.copy()
        if is_fence:
            drawn.stylize(MARK)
            return drawn
        if was_code:
            drawn.stylize(CODE)
            return drawn
        if is_within or len(plain) > _LONGEST_LINE:
            return _inline(line)
        if _RULE.match(plain):
            drawn.stylize(MARK)
            return drawn
        if heading := _HEADING.match(plain):
            drawn = _inline(line[heading.end() :])
            drawn.stylize("bold")
            return drawn
        if bullet := _BULLET.match(plain):
            begun = line[: bullet.end(1)] + _sign("•", line, bullet.end(1))
            return begun + _inline(line[bullet.end() :])
        if quote := _QUOTE.match(plain):
            begun = line[: quote.end(1)] + _sign("│", line, quote.end(1))
            return begun + " " + _inline(line[quote.end() :])
        return _inline(line)

    def _pass(self, plain: str) -> bool:
        """Note whether the line after this one is code; returns whether this one begins or ends a
        block."""
        line = self._begun + plain
        self._begun = ""
        fence = _FENCE.match(line)
        if fence is None:
            return False
        if not self._fence:
            self._fence = fence[1]
            return True
        # The end of a block is at least as long as its beginning, and has nothing behind it.
        is_end = fence[1].startswith(self._fence) and not line[fence.end() :].strip()
        if is_end:
            self._fence = ""
        return is_end


def _sign(sign: str, line: Text, place: int) -> Text:
    """Returns a sign in the style of the character that it stands for."""
    found = line[place : place + 1]
    found.plain = sign
    return found


def _inline(line: Text) -> Text:
    """Returns a line with its bold words and its code drawn, without their marks."""
    if len(line) > _LONGEST_LINE:
        return line
    drawn = Text()
    end = 0
    for found in _INLINE.finditer(line.plain):
        name = "bold" if found["bold"] is not None else "code"
        part = line[found.start(name) : found.end(name)]
        if name == "bold":
            part = _inline(part)
            part.stylize("bold")
        else:
            part.stylize(CODE)
        drawn += line[end : found.start()]
        drawn += part
        end = found.end()
    return drawn + line[end:]
