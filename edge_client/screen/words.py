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


_LONG = 1.0
"""Seconds without news after which a reader wants to know that it still goes on."""


def waiting(seconds: float) -> str:
    """For how long nothing has changed, behind a status that says what is being done."""
    return f" · waiting for {int(seconds)} s" if seconds >= _LONG else ""


_ALONE = "independent:"
"""How a bundle's manifest marks a drafter that is a model of its own."""


def named(source: str) -> str:
    """A model's name: the last part of where it came from."""
    return source.removeprefix(_ALONE).rstrip("/").rpartition("/")[2] or "target"
