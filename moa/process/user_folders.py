"""Where this user's files lie: settings, what was fetched, what is remembered, and what was made once
and can be made again.

A user need not have a home folder: containers and sandboxes run as numbers that no list knows.
Whoever only looks for a file finds none there, and goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from moa.errors import UsageError

_NAME = "moa-edge"


class NoHomeError(UsageError):
    """This user has no home folder."""

    def __init__(self, instead: str) -> None:
        """`instead` is an environment variable that can name the folder."""
        super().__init__(
            "there is no home folder: HOME is not set, and the system does not know this user",
            hint=f"set HOME or {instead}",
        )


def _below(variable: str, usual: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Our folder in the one that an environment `variable` names, or else in the `usual` one below
    the home folder; a `NoHomeError` where there is neither."""
    given = environment.get(variable)
    if given:
        return Path(given) / _NAME
    try:
        return Path.home() / usual / _NAME
    except RuntimeError:
        raise NoHomeError(variable) from None


def config_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of settings."""
    return _below("XDG_CONFIG_HOME", ".config", environment)


def data_folder() -> Path:
    """The folder of what was fetched."""
    return _below("XDG_DATA_HOME", ".local/share")


def state_folder() -> Path:
    """The folder of what is remembered from one run to the next."""
    return _below("XDG_STATE_HOME", ".local/state")


def cache_folder(kind: str) -> Path:
    """The folder of one kind of files that are kept for speed, and may be removed at any time."""
    if os.environ.get("XDG_CACHE_HOME"):
        return _below("XDG_CACHE_HOME", "") / kind
    if sys.platform == "win32":
        return _below("LOCALAPPDATA", "AppData/Local") / "cache" / kind
    if sys.platform == "darwin":
        return _below("XDG_CACHE_HOME", "Library/Caches") / kind
    return _below("XDG_CACHE_HOME", ".cache") / kind


def expanded(path: str | Path) -> Path:
    """A path that a user has typed, whose `~` is the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: {error}", hint="write the path in full") from None
