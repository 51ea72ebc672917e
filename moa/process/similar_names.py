"""What a user may have meant with a name that is not there."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from moa.process.user_folders import expanded


def did_you_mean(place: str, besides: str = "") -> str:
    """A question about a file or folder of a similar name, but for what is named `besides`; empty if
    there is none. The first part of the path that is not there is the one that may be mistyped."""
    path = Path(place)
    beyond: list[str] = []
    """Parts of the path behind the one that is looked at."""
    while not expanded(path.parent).is_dir() and path.parent != path:
        beyond.insert(0, path.name)
        path = path.parent
    try:
        there = os.listdir(expanded(path.parent))
    except OSError:
        return ""
    if besides and expanded(besides).parent == expanded(path.parent):
        there = [name for name in there if name != expanded(besides).name]
    for close in difflib.get_close_matches(path.name, there):
        meant = path.parent.joinpath(close, *beyond)
        if expanded(meant).exists():
            return f"did you mean {meant}?"
    return ""
