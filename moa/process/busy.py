"""How busy this machine is."""

from __future__ import annotations

import os


def slowdown() -> float:
    """How many times as long work takes here as on a machine that does nothing else, about: by the
    load of the last minute. 1 where nobody knows it."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return 1.0
    return 1 + load / (os.cpu_count() or 1)
