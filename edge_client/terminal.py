"""Answers on a screen: verified text plain, provisional text dim, corrections where they happen, a status line below.

In a pipe nothing can be taken back, so there only verified text goes out, and the provisional rest at the end.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from edge_client.events import Adopt, Confirm, Done, Event, Link, Notice, Prompt, Retract, Token
from moa.errors import MoaError

_LINK_STYLES = {"online": "green", "late": "yellow", "offline": "red", "refused": "red"}


class View(Protocol):
    """Shows the events of a turn; a context manager around it."""

    def take(self, event: Event) -> None:
        """Show an event."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: Any) -> None: ...


def make_view(*, quiet: bool = False, console: Console | None = None) -> View:
    """The view that suits where the output goes."""
    if quiet:
        return QuietView()
    console = console or Console(highlight=False)
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PipeView()


class QuietView:
    """Shows nothing."""

    def take(self, event: Event) -> None:
        """Show nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Pieces:
    """The turn's text by token, and how much of it is settled."""

    def __init__(self) -> None:
        self.start = 0
        self.texts: list[str] = []
        self.settled = 0
        """Tokens from the beginning that cannot be taken back any more."""
        self._sure: list[bool] = []

    def take(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Prompt():
                self.start = len(event.ids)
            case Token():
                self.texts.append(event.text)
                self._sure.append(event.status == "verified")
            case Confirm() | Adopt():
                for index in range(event.start - self.start, event.stop - self.start):
                    self._sure[index] = True
            case Retract():
                del self.texts[event.start - self.start :], self._sure[event.start - self.start :]
            case _:
                pass
        while self.settled < len(self._sure) and self._sure[self.settled]:
            self.settled += 1

    def text(self, start: int, stop: int | None = None) -> str:
        """Text of tokens start..stop."""
        return "".join(self.texts[start:stop])


class PipeView:
    """For files and pipes: text that stays, once."""

    def __init__(self) -> None:
        self._pieces = Pieces()
        self._written = 0
        self._broken: OSError | None = None

    def take(self, event: Event) -> None:
        """Write what has become certain."""
        self._pieces.take(event)
        match event:
            case Notice():
                _tell(event.message)
            case Link(state=state, detail=detail) if state in ("offline", "refused"):
                _tell(f"{state}: {detail}" if detail else state)
            case Done():
                self._write(len(self._pieces.texts), event.text[len(self._pieces.text(0)) :] + "\n")
                if not event.verified and self._pieces.texts:
                    _tell("not all of this was verified by the target")
                if self._broken is not None:
                    self._rescue(event.text)
            case _:
                self._write(self._pieces.settled)

    def _write(self, stop: int, more: str = "") -> None:
        if self._broken is not None:
            return
        try:
            sys.stdout.write(self._pieces.text(self._written, stop) + more)
            sys.stdout.flush()
        except BrokenPipeError:
            raise  # nobody reads: there is no reason to go on
        except OSError as error:
            self._broken = error  # a full disk: the answer goes on, and is told in another place
        self._written = max(self._written, stop)

    def _rescue(self, text: str) -> None:
        """Standard output could not take the answer: leave it on standard error, so that it is not lost."""
        assert self._broken is not None
        sys.stderr.write(f"{text}\n")
        # Closing standard output would only report the same trouble again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise MoaError(
            f"the answer could not be written: {self._broken.strerror}", hint="it is above, on standard error"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _tell(message: str) -> None:
    print(f"edge-client: {message}", file=sys.stderr)


class LiveView:
    """For a terminal. Settled lines scroll away as normal output; the last line and what is provisional stay live."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=12, transient=True, vertical_overflow="visible")
        self._pieces = Pieces()
        self._printed = 0
        """Characters of settled text that have been printed for good."""
        self._link = Link(state="connecting")
        self._withdrawn = 0
        self._done: Done | None = None

    def take(self, event: Event) -> None:
        """Show an event."""
        self._pieces.take(event)
        match event:
            case Link():
                self._link = event
            case Retract():
                self._withdrawn += event.stop - event.start
            case Notice():
                self._live.console.print(Text(event.message, style="yellow"))
            case Done():
                self._done = event
            case _:
                pass
        self._print_settled_lines()
        self._live.update(self._render())

    def _print_settled_lines(self) -> None:
        settled = self._pieces.text(0, self._pieces.settled)
        if (end := settled.rfind("\n") + 1) > self._printed:
            self._live.console.print(Text(settled[self._printed : end - 1]))
            self._printed = end

    def _render(self) -> RenderableType:
        settled = self._pieces.text(0, self._pieces.settled)[self._printed :]
        line = Text(settled) + Text(self._pieces.text(self._pieces.settled), style="dim italic")
        return Group(line, self._status())

    def _status(self) -> Text:
        style = _LINK_STYLES.get(self._link.state, "")
        status = Text("● ", style=style) + Text(self._link.state, style="dim")
        if self._link.state in ("offline", "refused") and self._link.detail:
            status += Text(f" ({self._link.detail})", style="dim")
        status += Text(f" · {len(self._pieces.texts)} tokens", style="dim")
        if waiting := len(self._pieces.texts) - self._pieces.settled:
            status += Text(f" · {waiting} not verified", style="yellow dim")
        if self._withdrawn:
            status += Text(f" · {self._withdrawn} corrected", style="magenta dim")
        status.no_wrap = True
        status.overflow = "ellipsis"
        return status

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._live.update(Text(""))
        self._live.stop()
        settled = self._pieces.text(0, self._pieces.settled)[self._printed :]
        self._console.print(Text(settled) + Text(self._pieces.text(self._pieces.settled), style="dim italic"))
        if self._done is not None:
            self._console.print(Text(summary(self._done), style="dim"))


def summary(done: Done) -> str:
    """One line about a turn."""
    stats = done.stats
    parts = [f"{stats['tokens']} tokens", f"{stats['tokens_per_second']:.0f}/s", f"{stats['calls']} calls"]
    if stats["tokens_per_round"]:
        parts.append(f"{stats['tokens_per_round']:.2f} tokens a round")
    if "rtt_ms" in stats:
        kilobytes = (stats["sent_bytes"] + stats["received_bytes"]) / 1000
        parts += [f"RTT {stats['rtt_ms']:.0f} ms", f"{kilobytes:.1f} kB"]
    if stats["retracted"]:
        parts.append(f"{stats['retracted']} corrected")
    parts.append("verified" if done.verified else "not all verified")
    if done.reason not in ("eos", "stop"):
        parts.append(f"ended by {done.reason}")
    return " · ".join(parts)
