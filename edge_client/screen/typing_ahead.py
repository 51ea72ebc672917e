"""What is typed while an answer is redrawn."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

try:
    import termios
except ImportError:  # not on Windows, where a console shows nothing that nobody reads
    termios = None  # type: ignore[assignment]


@contextlib.contextmanager
def unshown(descriptor: int | None = None) -> Iterator[None]:
    """A context in which the terminal does not show what is typed: that would move the rows that are
    redrawn, and each would stay there twice. It is kept for who reads next. `descriptor` is of
    standard input unless another is named."""
    if descriptor is None:
        descriptor = _standard_input()
    if termios is None or descriptor is None or not os.isatty(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _standard_input() -> int | None:
    """Its descriptor; None where there is none."""
    try:
        return sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None
