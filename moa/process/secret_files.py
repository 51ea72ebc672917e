"""Files that hold a secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def exposed(file: Path) -> str:
    """Returns what is wrong with a secret's file: every user of this machine may read it. Empty if
    that is not so, or cannot be told."""
    if os.name != "posix":
        return ""  # the mode says nothing there
    try:
        mode = file.stat().st_mode
    except OSError:
        return ""  # whoever opens it says why
    if not mode & stat.S_IROTH:
        return ""
    return f"every user of this machine can read {file}: chmod o-r mends that"
