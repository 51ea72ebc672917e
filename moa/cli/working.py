"""Says on standard error what a command works on, for as long as it takes: on a terminal a line that
counts the seconds, elsewhere a line at each change and now and then between them."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

_TERMINAL_SECONDS = 1.0
"""Between two states of the line on a terminal."""
_LOG_SECONDS = 10.0
"""Between two lines elsewhere, while the same work goes on."""

Tell = Callable[[str], None]
"""Is told what the command does from now on."""


def untold(_: str) -> None:
    """Tell nobody."""


class _Work:
    """What is being done, and since when."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._doing = ""
        self._began = 0.0

    def begin(self, doing: str) -> None:
        """Show what is done from now on."""
        with self._lock:
            self._doing = doing
            self._began = time.monotonic()
            self._show(doing)

    def repeat(self, after: float) -> None:
        """Show it again, with the seconds that it has taken, if they are so many or more: what has
        just begun was shown."""
        with self._lock:
            taken = time.monotonic() - self._began
            if taken >= after:
                self._show(f"{self._doing} ({taken:.0f} s)")


@contextlib.contextmanager
def working(program: str, doing: str, *, every: float | None = None) -> Iterator[Tell]:
    """Show what this program does while the body runs, `every` so many seconds again; yields what is
    told of the next thing. Nothing of it goes to standard output."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        with _repeated(_Work(_line_of(program)), doing, every or _LOG_SECONDS) as tell:
            yield tell
        return
    with console.status(Text(doing)) as status:
        work = _Work(lambda line: status.update(Text(line)))
        with _repeated(work, doing, every or _TERMINAL_SECONDS) as tell:
            yield tell


def _line_of(program: str) -> Callable[[str], None]:
    """Returns what prints a line of this program."""

    def say(line: str) -> None:
        print(f"{program}: {line}", file=sys.stderr, flush=True)

    return say


@contextlib.contextmanager
def _repeated(work: _Work, doing: str, every: float) -> Iterator[Tell]:
    """Show what is done now, and again every so many seconds while the body runs: in a thread, for the
    body may be in a library for minutes."""
    done = threading.Event()

    def go_on() -> None:
        while not done.wait(every):
            work.repeat(every)

    work.begin(doing)
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield work.begin
    finally:
        done.set()
        thread.join()
