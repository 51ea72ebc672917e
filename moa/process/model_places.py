"""Where a user says that a model is. No heavy import: a name that was mistyped is refused at once."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from moa.errors import UsageError
from moa.process.user_folders import expanded

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_place(name: str, place: str) -> None:
    """Refuse a place that can only be a file or a folder of this machine and is not there. What may
    be the name of a model at the hub is left to others. `name` is the flag or the word that the
    place was given for."""
    if not place:
        return
    is_path = place.endswith(".gguf") or not HUB_ID.fullmatch(place)
    if is_path and not expanded(place).exists():
        raise UsageError(f"{name}: no such file or folder: {place}", hint=did_you_mean(place))


def did_you_mean(place: str) -> str:
    """A question about what is in the same folder under a similar name; empty if there is nothing."""
    path = expanded(place)
    try:
        there = os.listdir(path.parent)
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, there, n=1)
    if not close:
        return ""
    return f"did you mean {Path(place).parent / close[0]}?"
