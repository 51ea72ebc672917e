"""Wrap the prose of Markdown pages.

    python -m tools.prose docs      # pages, or folders: every page below them

A paragraph or list item with a line of more than 100 characters is filled anew. Tables, headings,
code, HTML and what fits stay as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WIDTH = 100

_ITEM = re.compile(r"\s*(?:[*+-]|\d+[.)])\s+")
_NO_PROSE = re.compile(r"\s*(?:$|[|#<>]|\[\^|!\[|```)")
"""How a line begins that belongs to no paragraph: empty, tables, headings, HTML, pictures."""
_MEANT_BREAK = re.compile(r"(?:  |\\)$")
_WORD = re.compile(r"(?:`+[^`]*`+|[^\s`])+")
"""What no line is broken in: a word, and a code span with what touches it."""
_MARKER = re.compile(r"(?:[*+-]|#+|\d+[.)]|=+|-+|(?:[>|<]|```).*)$")
"""Words that could mean something else at the beginning of a line."""


def main() -> None:
    """Rewrite the pages that are named."""
    for name in sys.argv[1:]:
        path = Path(name)
        for page in sorted(path.rglob("*.md")) if path.is_dir() else [path]:
            text = page.read_text(encoding="utf-8")
            if (new := wrapped(text)) != text:
                page.write_text(new, encoding="utf-8")


def wrapped(text: str) -> str:
    """The page with no line of prose beyond the width, where a line can be broken."""
    done: list[str] = []
    paragraph: list[str] = []
    fenced = False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        if fenced or fence or _NO_PROSE.match(line):
            done += [*_filled(paragraph), line]
            paragraph = []
        elif _ITEM.match(line):
            done += _filled(paragraph)
            paragraph = [line]
        else:
            paragraph.append(line)
        fenced ^= fence
    return "\n".join([*done, *_filled(paragraph)])


def _filled(paragraph: list[str]) -> list[str]:
    fits = all(len(line) <= WIDTH for line in paragraph)
    if fits or any(_MEANT_BREAK.search(line) for line in paragraph):
        return paragraph
    marker = _ITEM.match(paragraph[0])
    first = marker[0] if marker else re.match(r"\s*", paragraph[0])[0]  # type: ignore[index]
    indent = " " * len(first)
    words = _words(" ".join(line.strip() for line in [paragraph[0][len(first) :], *paragraph[1:]]))
    lines: list[str] = []
    line = first + words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) <= WIDTH:
            line += f" {word}"
        else:
            lines.append(line)
            line = indent + word
    return [*lines, line]


def _words(text: str) -> list[str]:
    """What a line may begin with."""
    words: list[str] = []
    for word in _WORD.findall(text):
        if words and _MARKER.match(word):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


if __name__ == "__main__":
    main()
