"""How much memory this process has, in bytes, on every system. No torch."""

from __future__ import annotations

import sys


def resident_bytes() -> int:
    """Memory of this process now, if the system says so; else the peak; 0 if neither is known."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return peak_bytes()


def peak_bytes() -> int:
    """Peak memory of this process; 0 if the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
