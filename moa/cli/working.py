"""Says on standard error what a command works on, for as long as it takes: on a terminal a line that
counts the seconds, elsewhere a line at each change and now and then between them."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

_TERMINAL_SECONDS = 1.0
"""Between two states of the line on a terminal."""
_LOG_SECONDS = 10.0
"""Between two lines elsewhere, while the same work goes on."""
CLEAR = "\r\x1b[K"
"""Takes the line of a terminal away."""

Tell = Callable[[str], None]
"""Is told what the command does from now on."""


def untold(_: str) -> None:
    """Tell nobody."""


def roughly(seconds: float) -> int:
    """A time that is left, as exactly as an estimate should be said."""
    step = 1 if seconds < 20 else 5 if seconds < 120 else 10
    return max(1, step * round(seconds / step))


@contextlib.contextmanager
def lasting(tell: Callable[[float], None], every: float) -> Iterator[None]:
    """Tell again and again, every so many seconds, how long the body has run: in a thread, for it
    may be in a library for minutes."""
    over = threading.Event()
    began = time.monotonic()

    def go_on() -> None:
        while not over.wait(every):
            tell(time.monotonic() - began)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Work:
    """What is being done, and since when."""

    def __init__(self, show: Callable[[str], None], *, at_once: bool) -> None:
        self._show = show
        self._at_once = at_once
        self._lock = threading.Lock()
        self._doing = ""
        self._began = 0.0

    def begin(self, doing: str) -> None:
        """Note what is done from now on, and show it."""
        with self._lock:
            self._doing = doing
            self._began = time.monotonic()
            if self._at_once:
                self._show(doing)

    def repeat(self, after: float) -> None:
        """Show it again, with the seconds that it has taken, if they are so many or more: what has
        just begun was shown."""
        with self._lock:
            taken = time.monotonic() - self._began
            if taken >= after:
                self._show(f"{self._doing} ({taken:.0f} s)")


@contextlib.contextmanager
def working(
    program: str,
    doing: str,
    *,
    every: float | None = None,
    at_once: bool = True,
    elsewhere: bool = True,
) -> Iterator[Tell]:
    """Show what this program does while the body runs, `every` so many seconds again; yields what is
    told of the next thing. Without `at_once` nothing is said of what does not last, and without
    `elsewhere` nothing but on a terminal. Nothing of it goes to standard output."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not is_terminal and not elsewhere:
        yield untold
        return
    show = _change_line if is_terminal else _line_of(program)
    seconds = every or (_TERMINAL_SECONDS if is_terminal else _LOG_SECONDS)
    work = _Work(show, at_once=at_once)
    work.begin(doing)
    try:
        with lasting(lambda _: work.repeat(seconds), seconds):
            yield work.begin
    finally:
        if is_terminal:
            _write(CLEAR)


def _change_line(line: str) -> None:
    """Put this in the place of the terminal's line. A longer one would take two rows, of which only
    the last could be cleared."""
    _write(CLEAR + line[: shutil.get_terminal_size().columns - 1])


def _line_of(program: str) -> Callable[[str], None]:
    """Returns what prints a line of this program."""
    return lambda line: _write(f"{program}: {line}\n")


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
