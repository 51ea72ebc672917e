"""Words that several views share."""

from __future__ import annotations


def tokens(count: int) -> str:
    """So many tokens."""
    return "1 token" if count == 1 else f"{count:,} tokens"


def calls(count: int) -> str:
    """So many requests to the verifier."""
    return "1 call" if count == 1 else f"{count:,} calls"


def forwards(count: int) -> str:
    """So many of the target."""
    return "1 forward" if count == 1 else f"{count:,} forwards"


_FIRST_SECONDS = 0.7
"""Seconds without a change after which a reader is told that it still goes on."""
_STEP_SECONDS = 0.5
"""Steps in which these are counted: with the pause until a view is drawn again, both are less than
a second, so that nothing stands still for longer."""


def waiting(seconds: float) -> str:
    """For how long nothing has changed, behind a status that says what is being done."""
    if seconds < _FIRST_SECONDS:
        return ""
    return f" · waiting for {int(seconds / _STEP_SECONDS) * _STEP_SECONDS:g} s"


_ALONE = "independent:"
"""How a bundle's manifest marks a drafter that is a model of its own."""


def named(source: str) -> str:
    """A model's name: the last part of where it came from."""
    return source.removeprefix(_ALONE).rstrip("/").rpartition("/")[2] or "target"
