"""The progress display of a run: loss, tokens per second, remaining time; occasional lines where
there is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 15.0
_MEMORY = 0.95
"""Weight that older steps keep in the figures that are shown."""


class Progress:
    """A bar on a terminal's stderr, plain lines elsewhere, nothing when quiet."""

    def __init__(self, steps: int, done: int, *, quiet: bool, of: str = "step") -> None:
        """Show the progress of a run of `steps` steps, `done` of which were there before. `of`
        names what is counted."""
        self._of = of
        self._steps = steps
        self._done = done
        self._done_before = done
        self._quiet = quiet
        self._smooth: dict[str, float] = {}
        """Running means of the figures."""
        self._started = time.monotonic()
        self._last_line = self._started
        self._bar: Bar | None = None
        if not quiet and sys.stderr.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"))
            self._bar = Bar(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
            )
            self._task = self._bar.add_task("", total=steps, completed=done, shown="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, entry: dict[str, float], count: int = 1) -> None:
        """Advance by `count` steps, and show it. `entry` has the figures of the latest step, the
        tokens a second (`tokens_per_s`) among them; their running means are shown."""
        self._done += count
        for name, value in entry.items():
            if name not in ("step", "grad_norm"):
                before = self._smooth.get(name, value)
                self._smooth[name] = _MEMORY * before + (1 - _MEMORY) * value
        if self._bar:
            self._bar.update(self._task, completed=self._done, shown=self._figures())
        elif not self._quiet and self._line_is_due():
            self._print_line()

    def _figures(self) -> str:
        """The figures in one line, the speed last."""
        figures = [
            f"{name} {value:.3f}" for name, value in self._smooth.items() if name != "tokens_per_s"
        ]
        return f"{' '.join(figures)} {self._smooth['tokens_per_s']:,.0f} tokens/s"

    def _line_is_due(self) -> bool:
        """Whether to print a line: the last one, or one after a while."""
        if self._done == self._steps:
            return True
        return time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES

    def _print_line(self) -> None:
        """Print how far the run is, its figures, and about how long it still takes."""
        now = time.monotonic()
        self._last_line = now
        # Steps that were there before took no time now.
        seconds_each = (now - self._started) / (self._done - self._done_before)
        minutes_left = seconds_each * (self._steps - self._done) / 60
        print(
            f"{self._of} {self._done}/{self._steps} {self._figures()}, {minutes_left:.0f} min to go",
            file=sys.stderr,
            flush=True,
        )
