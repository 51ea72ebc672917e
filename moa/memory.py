"""How much memory this process has, in bytes, on every system. No torch."""

from __future__ import annotations

import sys


def resident_bytes() -> int:
    """Memory of this process: now where the system tells, else at most so far; 0 where it tells neither."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return peak_bytes()


def peak_bytes() -> int:
    """The most memory this process has had; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
