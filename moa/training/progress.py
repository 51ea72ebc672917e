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


class Progress:
    """A bar on a terminal's stderr, plain lines elsewhere, nothing when quiet."""

    def __init__(self, steps: int, done: int, *, quiet: bool, of: str = "step") -> None:
        """`of` is what is counted."""
        self._of = of
        self._steps = steps
        self._done = done
        self._first = done
        self._quiet = quiet
        self._smooth: dict[str, float] = {}
        self._began = self._last_line = time.monotonic()
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
        """Advance by `count` steps; `entry` has `tokens_per_s` and other figures to show."""
        self._done += count
        for name, value in entry.items():
            if name not in ("step", "grad_norm"):
                self._smooth[name] = 0.95 * self._smooth.get(name, value) + 0.05 * value
        shown = " ".join(
            f"{name} {value:.3f}" for name, value in self._smooth.items() if name != "tokens_per_s"
        )
        shown += f" {self._smooth['tokens_per_s']:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=self._done, shown=shown)
        elif not self._quiet and (
            self._done == self._steps or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES
        ):
            self._last_line = time.monotonic()
            left = (
                (self._last_line - self._began)
                / (self._done - self._first)
                * (self._steps - self._done)
            )
            print(
                f"{self._of} {self._done}/{self._steps} {shown}, {left / 60:.0f} min to go",
                file=sys.stderr,
                flush=True,
            )
