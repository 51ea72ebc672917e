"""Where a user says that a model is. No heavy import: a name that was mistyped, and a file that is no
model, are refused at once."""

from __future__ import annotations

import re
from pathlib import Path

from moa.errors import UsageError
from moa.gguf.reader import is_gguf, read_head
from moa.process.similar_names import did_you_mean
from moa.process.user_folders import expanded

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_place(name: str, place: str, besides: str = "") -> None:
    """Refuse a place that can only be a file or a folder of this machine and is not there, and a
    file that is no model. What may be the name of a model at the hub is left to others. `name` is
    the flag or the word that the place was given for; it is not `besides`, another model of the same
    command."""
    if not place:
        return
    is_path = place.endswith(".gguf") or not HUB_ID.fullmatch(place)
    path = expanded(place)
    if path.is_file():
        _check_file(name, path)
    elif is_path and not path.exists():
        hint = did_you_mean(place, besides)
        raise UsageError(f"{name}: no such file or folder: {place}", hint=hint)


def _check_file(name: str, path: Path) -> None:
    """Refuse a file that is no model, or damaged, by its head: else a person is told so once the
    libraries are imported that would read it, which takes a quarter of a minute."""
    if not is_gguf(path):
        raise UsageError(
            f"{name}: {path} is not a GGUF file", hint="a model is such a file, or a folder"
        )
    read_head(path)
