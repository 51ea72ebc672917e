"""The console of the commands: without markup in printed text, and without line wrapping in a pipe."""

from __future__ import annotations

from rich.console import Console

_ENDLESS = 500


def make_console() -> Console:
    """Standard output. In a pipe a line stays a line, however long, so that `grep` finds it."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _ENDLESS
    return console
