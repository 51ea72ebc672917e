"""Chooses the view for an output: a terminal, a pipe, or none. Imports rich only where it is used:
it takes as long to load as the drafter."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from edge_client.screen.pipe import PipeView, View
from moa.safe_text import safe_text

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 500
"""Columns of a line in a pipe; longer than any that is printed in columns."""


def make_console() -> Console:
    """Standard output, without markup in printed text. In a pipe a line stays a line, however long,
    so that `grep` finds it."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def make_view(
    *,
    quiet: bool = False,
    console: Console | None = None,
    context: int = 0,
    more: str = "",
    markdown_after: str | None = None,
    says_unverified: bool = True,
    who_verifies: str = "the verifier",
    trouble: str = "",
) -> View:
    """Returns the view for this output: of a terminal, of a pipe, or with `quiet` one that shows
    nothing. A terminal also says how much of the `context` is used, and with `more` how to go on
    with an answer that was cut; it draws Markdown if the text `markdown_after`, behind which the
    answer goes on, is given, and NO_COLOR is not set. `says_unverified` is for a pipe, `who_verifies`
    the words for a verifier or an upstream, `trouble` what the reader was told of the
    link before."""
    if quiet:
        return View()
    if console is None and not _can_redraw():
        return PipeView(says_unverified=says_unverified, who_verifies=who_verifies, trouble=trouble)
    from rich.console import Console

    from edge_client.screen.live import LiveView
    from edge_client.screen.markdown import MarkdownLines

    console = console or Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return PipeView(says_unverified=says_unverified, who_verifies=who_verifies, trouble=trouble)
    markdown = None
    if markdown_after is not None and draws_markdown(console):
        markdown = MarkdownLines(safe_text(markdown_after))
    return LiveView(
        console,
        context,
        more=more,
        markdown=markdown,
        who_verifies=who_verifies,
        trouble=trouble,
        goes_on=bool(markdown_after),
    )


def draws_markdown(console: Console) -> bool:
    """Whether Markdown is drawn there: where it could not be seen that a word was bold, its marks
    stay."""
    return console.is_terminal and not console.is_dumb_terminal and not console.no_color


def _can_redraw() -> bool:
    """Whether standard output is a terminal that can redraw lines; known without loading rich."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
