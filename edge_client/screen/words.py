"""Words that several views share."""

from __future__ import annotations


def tokens(count: int) -> str:
    """So many tokens."""
    return "1 token" if count == 1 else f"{count:,} tokens"


def named(source: str) -> str:
    """A model's name: the last part of where it came from."""
    return source.rstrip("/").rpartition("/")[2] or "target"
