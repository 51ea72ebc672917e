"""The console that commands print on: no markup in what they are told, and no window's width where there is none."""

from __future__ import annotations

from rich.console import Console

_ENDLESS = 500


def make_console() -> Console:
    """Standard output. In a pipe a line stays a line, however long, so that `grep` finds it."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _ENDLESS
    return console
