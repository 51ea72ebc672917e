"""Where this user's files lie: what was made once and can be made again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_NAME = "moa-edge"


def cache_folder(kind: str) -> Path:
    """The folder of one kind of files that are kept for speed, and may be removed at any time."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / _NAME / kind
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
        return Path(local) / _NAME / "cache" / kind
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / _NAME / kind
    return Path.home() / ".cache" / _NAME / kind
