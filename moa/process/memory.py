"""Memory of this process, on every system: how much it has, in bytes, what of it is free, and what
garbage collections leave out. No torch."""

from __future__ import annotations

import ctypes
import gc
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # others count in kilobytes


def forget_peak() -> bool:
    """Let the peak begin anew at what this process has now; False where the system cannot."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:  # not Linux, or not allowed
        return False
    return True


def peak_since_bytes() -> int:
    """Peak memory of this process since `forget_peak`; 0 if the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return 0


def available_bytes() -> int:
    """Memory that this process could take without making the machine swap: what is free or can be
    freed, within the limit of its control group; 0 if the system does not say."""
    limits = [_free_of_machine(), _free_of_group()]
    known = [size for size in limits if size is not None]
    return max(0, min(known, default=0))


def _free_of_machine() -> int | None:
    """Bytes of the machine's memory that are free or can be freed; None if the system does not
    say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return None


def _free_of_group() -> int | None:
    """Bytes that the limit of this process's control group (a container's) leaves; None without
    one. Of what the group uses, cached files count as free: they are given up when others need
    room."""
    folder = "/sys/fs/cgroup"
    try:
        with open(f"{folder}/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        if limit == "max":
            return None
        with open(f"{folder}/memory.current", encoding="ascii") as file:
            used = int(file.read())
        with open(f"{folder}/memory.stat", encoding="ascii") as file:
            numbers = {}
            for line in file:
                name, number = line.split()
                numbers[name] = int(number)
        return int(limit) - used + numbers["inactive_file"]
    except (OSError, ValueError, KeyError):
        return None


def give_back_free_memory() -> None:
    """Give pages of C's heap that hold nothing back to the system: glibc keeps those in the middle,
    for each thread. It takes 12 ms of processor time for 80 MB, 0.5 ms where there is nothing."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it
        trim(0)


def leave_out_what_is_loaded() -> None:
    """Call this once everything is loaded: modules and models stay for good, so no garbage
    collection need look at them again.

    Among hundreds of thousands of such objects a full collection stops every session for a quarter
    of a second. Python therefore puts it off until a quarter as many others have piled up, which
    takes hours, and looks like a leak. Without them it takes milliseconds, and comes by itself
    every few minutes.
    """
    gc.freeze()
    gc.collect()
