"""Answers on a terminal: verified text plain, provisional text dim, corrections where they happen;
status below."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.live_render import LiveRender
from rich.segment import Segment
from rich.text import Text

from edge_client.events import AnswerSoFar, Done, Event, Link, Notice, Retract
from edge_client.screen.pipe import ENDS, View
from moa.safe_text import safe_line, safe_text

_PROVISIONAL = "dim italic"
_LONG_SECONDS = 0.5
_TROUBLE = ("offline", "refused")
_LINK_STYLES = {"online": "green", "late": "yellow", "offline": "red", "refused": "red"}


class LiveView(View):
    """Final lines are printed as normal output; the last line and provisional text are redrawn."""

    def __init__(self, console: Console, context: int = 0) -> None:
        """`context`: how many tokens it holds, if the reader is to know how full it is."""
        self._console = console
        self._context = context
        self._live = Region(console)
        self._answer = AnswerSoFar()
        self._printed = 0
        """Characters of final text that are printed."""
        self._link = Link(state="connecting")
        self._withdrawn = 0
        self._rest = ""
        """Text beyond that of the tokens: it was held back until the end of the answer."""

    def take(self, event: Event) -> None:
        """Show an event."""
        self._answer.take(event)
        match event:
            case Link():
                if event.state in _TROUBLE and event.detail and event.detail != self._link.detail:
                    # It stays on the screen: the text below it was written by the device.
                    self._live.console.print(
                        Text(safe_line(f"{event.state}: {event.detail}"), style="yellow")
                    )
                self._link = event
            case Retract():
                self._withdrawn += event.stop - event.start
            case Notice():
                self._live.console.print(Text(safe_line(event.message), style="yellow"))
            case Done():
                self._rest = event.text[len(self._answer.text_of()) :]
            case _:
                pass
        self._print_final_lines()
        self._live.update(self._render())

    def _print_final_lines(self) -> None:
        final = self._answer.text_of(0, self._answer.final)
        if (end := final.rfind("\n") + 1) > self._printed:
            self._live.console.print(Text(safe_text(final[self._printed : end - 1])))
            self._printed = end

    def _render(self) -> RenderableType:
        return Group(self._open_lines(), self._status())

    def _open_lines(self) -> Text:
        """The part that is still redrawn."""
        final = self._answer.text_of(0, self._answer.final)[self._printed :]
        provisional = self._answer.text_of(self._answer.final)
        style = "" if self._answer.done is None or self._answer.done.verified else _PROVISIONAL
        return (
            Text(safe_text(final))
            + Text(safe_text(provisional), _PROVISIONAL)
            + Text(safe_text(self._rest), style)
        )

    def _status(self) -> Text:
        style = _LINK_STYLES.get(self._link.state, "")
        status = Text("● ", style=style) + Text(self._link.state, style="dim")
        if self._link.state in _TROUBLE and self._link.detail:
            status += Text(f" ({safe_line(self._link.detail)})", style="dim")
        status += Text(f" · {len(self._answer.texts)} tokens", style="dim")
        if waiting := len(self._answer.texts) - self._answer.final:
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
        self._console.print(self._open_lines())
        if self._answer.done is not None:
            line = summary(self._answer.done, self._answer.final)
            if self._context:
                line += f" · context {len(self._answer.prompt) + len(self._answer.texts)} of {self._context}"
            self._console.print(Text(line, style="dim"))


def summary(done: Done, final: int) -> str:
    """One line about a turn, of which so many tokens were verified or kept."""
    stats = done.stats
    calls = "1 call" if stats["calls"] == 1 else f"{stats['calls']} calls"
    # a wait for the link at the end is no part
    first = stats["first_token_seconds"]
    last = stats["last_token_seconds"]
    parts = [f"{stats['tokens']} tokens", f"{stats['tokens'] / max(1e-3, last):.0f}/s", calls]
    if first >= _LONG_SECONDS:
        parts.insert(2, f"first after {first:.1f} s")
    if stats["tokens_per_round"]:
        parts.append(f"{stats['tokens_per_round']:.2f} tokens a round")
    if stats.get("rtt_ms"):
        kilobytes = (stats["sent_bytes"] + stats["received_bytes"]) / 1000
        parts += [f"RTT {stats['rtt_ms']:.0f} ms", f"{kilobytes:.1f} kB"]
    if stats["retracted"]:
        parts.append(f"{stats['retracted']} corrected")
    parts.append(
        "verified" if done.verified else "not all verified" if final else "nothing verified"
    )
    if done.reason not in ("eos", "stop"):
        parts.append(ENDS.get(done.reason, f"ended by {done.reason}"))
    return " · ".join(parts)


class Region(Live):
    """rich's own, but the rows to erase are counted with the current window width: a terminal that
    is made narrower wraps its lines, which then take more rows than when they were drawn."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console=console, refresh_per_second=12, transient=True, vertical_overflow="visible"
        )
        self._live_render = _Drawn(console)


class _Drawn(LiveRender):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []
        """Cells of each line as it was last drawn."""
        super().__init__("", vertical_overflow="visible")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = [
            part for part in super().__rich_console__(console, options) if isinstance(part, Segment)
        ]
        self._widths = [
            Segment.get_line_length(line) for line in Segment.split_lines(segments)
        ] or [0]
        yield from segments

    @property
    def _shape(self) -> tuple[int, int] | None:
        width = max(1, self._console.width)
        return (
            (width, sum(max(1, -(-cells // width)) for cells in self._widths))
            if self._widths
            else None
        )

    @_shape.setter
    def _shape(self, shape: tuple[int, int] | None) -> None:
        pass
