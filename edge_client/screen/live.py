"""Answers on a terminal: verified text plain, provisional text dim, corrections where they happen;
status below."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.live_render import LiveRender
from rich.segment import Segment
from rich.text import Text

from edge_client.events import (
    OVERDUE,
    AnswerSoFar,
    Done,
    Event,
    Link,
    Notice,
    Progress,
    Retract,
    Status,
    Token,
)
from edge_client.screen.markdown import MarkdownLines
from edge_client.screen.pipe import ENDS, View, trouble_in_words
from edge_client.screen.typing_ahead import unshown
from edge_client.screen.words import tokens, waiting
from edge_client.turn.reachability import RATE_USED_UP
from moa.safe_text import safe_line, safe_text

PROVISIONAL = "dim italic"
"""The style of text that is not verified."""
_LONG_SECONDS = 0.5
"""The wait for a first token is told if it was at least so long."""
_OTHER_ROWS = 3
"""Rows of the window that the redrawn text leaves: for the status, for the line that says that there
is more of it, and for the cursor."""
_FAST = 10.0
"""Tokens a second that are told without a decimal."""
_TROUBLE = ("limited", "offline", "refused")
"""States of the link whose reason the reader should see."""
_DOING = {
    "none": "this device alone",
    "connecting": "connecting to {}",
    "late": "{} is late",
    "limited": RATE_USED_UP,
}
"""What a state of the link means for the reader, where its name does not say it; {} is who
verifies."""
_LINK_STYLES = {
    "online": "green",
    "late": "yellow",
    "limited": "yellow",
    "offline": "red",
    "refused": "red",
}


class LiveView(View):
    """Final lines are printed as normal output; the last line and provisional text are redrawn."""

    def __init__(
        self,
        console: Console,
        context: int = 0,
        *,
        more: str = "",
        markdown: MarkdownLines | None = None,
        who_verifies: str = "the verifier",
        trouble: str = "",
        goes_on: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a view for this terminal. `context` is how many tokens the context holds, if the
        reader is to know how full it is; `more` says how to go on with an answer that was cut.
        `markdown` draws the lines; without it they are shown as they were written. `trouble` is what
        the reader was told of the link before. `goes_on`: there is text of the answer from before."""
        self._console = console
        self._goes_on = goes_on
        self._who_verifies = who_verifies
        self._trouble = trouble
        self._markdown = markdown
        self._context = context
        self._more = more
        self._clock = clock
        self._live = Region(console)
        self._typing = contextlib.ExitStack()
        """What is typed is not shown until this is closed."""
        self._drawn = ("", "")
        """The text and the status that were drawn last."""
        self._changed_at = clock()
        """When one of them last changed."""
        self._answer = AnswerSoFar()
        self._printed = 0
        """Characters of final text that are printed."""
        self._link = Link(state="connecting")
        self._reading: Progress | None = None
        """How far somebody has read, while nothing else happens."""
        self._withdrawn = 0
        """Tokens that were corrected."""
        self._rest = ""
        """Text behind that of the tokens: characters that are known only at the end of the answer,
        because their bytes may have gone on."""

    def take(self, event: Event) -> None:
        """Show an event of the answer: print the lines that are final, and redraw the rest and the
        status."""
        self._answer.take(event)
        self._reading = self._still_reading(event)
        match event:
            case Link():
                told = self._link
                self._link = event
                # Of a rate the status line says it from then on, with each pause.
                is_told = told.detail == event.detail or (told.state == event.state == "limited")
                if event.state in _TROUBLE and event.detail and not is_told:
                    self._live.update(self._render())  # it is drawn below the line
                    # It stays on the screen: the text below it was written by the device.
                    self._live.print_above(
                        Text(trouble_in_words(event, self._trouble), style="yellow")
                    )
            case Retract():
                self._withdrawn += event.stop - event.start
            case Notice():
                self._live.print_above(Text(safe_line(event.message), style="yellow"))
            case Done():
                self._rest = event.text[len(self._answer.text_of()) :]
            case _:
                pass
        self._print_final_lines()
        self._live.update(self._render())

    def _still_reading(self, event: Event) -> Progress | None:
        """Returns how far somebody has read, as far as that is known behind this event; None where
        nobody reads any more."""
        by_verifier = self._reading is not None and self._reading.by == "verifier"
        match event:
            case Progress():
                return event
            case Link(state="offline" | "refused") if by_verifier:
                return None  # nothing is heard of it any more
            case Token(status="provisional") if by_verifier:
                return self._reading  # this device goes on alone meanwhile
            case Link() | Notice():
                return self._reading
            case _:
                return None

    def _print_final_lines(self) -> None:
        """Print the lines that are complete and verified as normal output: they scroll away."""
        final = self._answer.text_of(0, self._answer.final)
        end = final.rfind("\n") + 1
        if end > self._printed:
            lines = Text(safe_text(final[self._printed : end - 1]))
            if self._markdown is not None:
                lines = self._markdown.drawn(lines)
            self._printed = end
            self._live.update(self._render())  # without these lines, which would stand twice
            self._live.print_above(lines)

    def _render(self) -> RenderableType:
        """What is redrawn: the open text and, below it, the status."""
        text = self.open_text()
        status = self.status()
        drawn = (text.plain, status.plain)
        if drawn != self._drawn:
            self._drawn = drawn
            self._changed_at = self._clock()
        return Group(_Tail(text), _Status(status, self._changed_at, self._clock))

    def open_text(self) -> Text:
        """The text that is still redrawn, because its line goes on or it is not verified."""
        answer = self._answer
        final = Text(safe_text(answer.text_of(0, answer.final)[self._printed :]))
        provisional = Text(safe_text(answer.text_of(answer.final)), PROVISIONAL)
        is_unverified = answer.done is not None and not answer.done.verified
        rest = Text(safe_text(self._rest), PROVISIONAL if is_unverified else "")
        text = final + provisional + rest
        return text if self._markdown is None else self._markdown.open_drawn(text)

    def status(self) -> Text:
        """Returns the status line: what happens now, and how much of the text is not verified."""
        answer = self._answer
        status = Text("● ", style=_LINK_STYLES.get(self._link.state, ""))
        status += Text(self._doing(), style="dim")
        if answer.texts:
            status += Text(f" · {tokens(len(answer.texts))}", style="dim")
        if answer.unverified:
            status += Text(f" · {answer.unverified} not verified", style="yellow dim")
        if self._withdrawn:
            status += Text(f" · {self._withdrawn} corrected", style="magenta dim")
        status.no_wrap = True
        status.overflow = "ellipsis"
        return status

    def _doing(self) -> str:
        """What happens now, in a few words."""
        answer = self._answer
        reading = self._reading
        if reading is not None and reading.by == "device" and reading.done < reading.total:
            return f"this device reads: {reading.done:,} of {reading.total:,}"
        # Of nothing read nobody knows whether it is being read: many engines do not tell.
        if reading is not None and 0 < reading.done < reading.total:
            return f"{self._who_verifies} reads: {reading.done:,} of {reading.total:,}"
        if self._link.state == "online" and answer.final < len(answer.texts):
            return f"checking, {answer.final:,} of {len(answer.texts):,}"
        doing = _DOING.get(self._link.state, self._link.state)
        doing = doing.replace("{}", self._who_verifies)
        if self._link.state in OVERDUE and answer.unverified:
            return f"{doing}: this device goes on"
        return doing

    def __enter__(self) -> Self:
        self._typing.enter_context(unshown())
        self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Take the redrawn part away, print the rest of the text for good, and a line about the
        turn below it."""
        with self._typing:
            self._live.update(Text(""))
            self._live.stop()
        self._console.print(self.open_text())
        if self._answer.done is not None:
            link = self._answer.trouble
            line = summary(
                self._answer.done,
                self._answer.statuses,
                more=self._more,
                why=link.detail if link is not None and link.state in OVERDUE else "",
                goes_on=self._goes_on,
            )
            if self._context:
                used = len(self._answer.prompt) + len(self._answer.texts)
                line += f" · context {used} of {self._context}"
            self._console.print(Text(line, style="dim"))


class _Tail:
    """The end of a text, as much as the window has room for. Rows that were scrolled out of it could
    not be erased: each redrawing would leave another copy of them behind."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(1, console.height - _OTHER_ROWS)
        lines = self._text.split("\n", allow_blank=True)
        end = Text("\n").join(lines[-room - 1 :])  # a line takes a row or more
        rows = end.wrap(console, options.max_width)
        if len(lines) <= room and len(rows) <= room:
            yield self._text
            return
        yield Text("… what is above is printed when it is final", style="dim")
        yield from rows[-room:]


class _Status:
    """What happens, and for how long nothing has changed; that is computed whenever it is drawn."""

    def __init__(self, status: Text, changed_at: float, clock: Callable[[], float]) -> None:
        self._status = status
        self._changed_at = changed_at
        self._clock = clock

    def __rich__(self) -> Text:
        status = self._status.copy()
        return status.append(waiting(self._clock() - self._changed_at), style="dim")


_NOTHING = "nothing verified"
_NOT_THE_END = "its end not verified"
"""Of an answer whose tokens are verified, and which is not: nobody has said that it ends there."""


def summary(
    done: Done,
    statuses: Sequence[Status],
    *,
    more: str = "",
    why: str = "",
    goes_on: bool = False,
) -> str:
    """Returns one line about a turn that has ended: its speed, and how much of it is verified.
    `statuses` has the status of each token, `more` says how to go on with an answer that was
    cut, `why` what kept a verifier that is reached from verifying it, `goes_on` that the turn was
    the end of an answer whose beginning was there."""
    stats = done.stats
    first = stats["first_token_seconds"]
    # Speed up to the last token: a wait for the link after it is no part.
    last = stats["last_token_seconds"]
    parts = [
        tokens(stats["tokens"]),
        f"{_speed(stats['tokens'] / max(1e-3, last))}/s",
    ]
    if first >= _LONG_SECONDS:
        parts.append(f"first after {first:.1f} s")
    if stats["tokens_per_forward"]:
        parts.append(f"{stats['tokens_per_forward']:.2f} tokens a forward")
    if stats["calls"] and stats.get("rtt_ms"):  # else the link had no part in it
        kilobytes = (stats["sent_bytes"] + stats["received_bytes"]) / 1000
        parts += [f"RTT {stats['rtt_ms']:.0f} ms", f"{kilobytes:.1f} kB"]
    if stats["retracted"]:
        parts.append(f"{stats['retracted']} corrected")
    verified = _of_part(how_much_is_verified(done, statuses), goes_on=goes_on)
    parts.append(f"{verified}: {safe_line(why)}" if why and not done.verified else verified)
    if done.reason == "length":
        parts.append(f"cut at {tokens(stats['tokens'])}" + (f": {more}" if more else ""))
    elif done.reason not in ("eos", "stop"):
        parts.append(ENDS.get(done.reason, f"ended by {done.reason}"))
    return " · ".join(parts)


def _speed(a_second: float) -> str:
    """Returns tokens a second; slow ones with a decimal, for else some would be none."""
    return f"{a_second:.0f}" if a_second >= _FAST else f"{a_second:.1f}"


def how_much_is_verified(done: Done, statuses: Sequence[Status]) -> str:
    """Returns how much of an answer that has ended is verified, in words; `statuses` has the status
    of each token."""
    return "verified" if done.verified else _not_verified(statuses)


def summary_of_stopped(statuses: Sequence[Status], *, goes_on: bool = False) -> str:
    """Returns one line about an answer that the user has stopped: its length, and how much of it is
    verified. The arguments are those of `summary`."""
    if not statuses:
        return "stopped: nothing was added"
    is_verified = all(status == "verified" for status in statuses)
    verified = "verified" if is_verified else _not_verified(statuses)
    return f"stopped · {tokens(len(statuses))} · {_of_part(verified, goes_on=goes_on)}"


def _of_part(verified: str, *, goes_on: bool) -> str:
    """Returns these words, of an answer that went on (`goes_on`) only of what was added: what stood
    before may be verified."""
    return "nothing of this part verified" if goes_on and verified == _NOTHING else verified


def _not_verified(statuses: Sequence[Status]) -> str:
    """Returns how many of these tokens are not verified, in words."""
    unverified = sum(status != "verified" for status in statuses)
    if unverified == len(statuses):
        return _NOTHING
    if not unverified:
        return _NOT_THE_END
    ending = statuses[len(statuses) - unverified :]
    all_at_the_end = all(status != "verified" for status in ending)
    which = "the last " if all_at_the_end else ""
    return f"{which}{tokens(unverified)} not verified"


class Region(Live):
    """A live display of rich that stays right when the window is made narrower.

    The terminal then wraps lines that were drawn earlier, so they take more rows than rich
    remembers, and it would erase too few. Here rows are counted with the current width.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(
            console=console, refresh_per_second=12, transient=True, vertical_overflow="visible"
        )
        self._live_render = _Drawn(console)

    def print_above(self, text: Text) -> None:
        """Print text for good, above what is redrawn. The thread that redraws must not come between:
        rich would erase the rows of the one drawing in the place of the other. Below the text
        stands what is to be redrawn now, and not what was drawn last."""
        with self._lock:
            self._live_render.set_renderable(self.renderable)
            self.console.print(text)


class _Drawn(LiveRender):
    """What `Region` draws. It remembers the length of each line, to count rows later."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []
        """Cells of each line as it was last drawn."""
        super().__init__("", vertical_overflow="visible")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = [
            part for part in super().__rich_console__(console, options) if isinstance(part, Segment)
        ]
        lines = Segment.split_lines(segments)
        widths = [Segment.get_line_length(line) for line in lines]
        self._widths = widths or [0]  # nothing is drawn as one empty line
        yield from segments

    @property
    def _shape(self) -> tuple[int, int] | None:
        """The width and the number of rows of what was drawn; rich sets and reads this field."""
        if not self._widths:
            return None
        width = max(1, self._console.width)
        rows = 0
        for cells in self._widths:
            rows += max(1, math.ceil(cells / width))
        return width, rows

    @_shape.setter
    def _shape(self, shape: tuple[int, int] | None) -> None:
        pass
