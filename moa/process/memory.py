"""Memory of this process, on every system: how much it has, in bytes, what of it is free, and what
garbage collections leave out. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
    freed, within the limits of its control groups; 0 if the system does not say."""
    limits = [_free_of_machine(), _free_of_groups()]
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


@dataclass(frozen=True)
class _Hierarchy:
    """One of the two versions of control groups, and what its files are called."""

    root: str
    limit: str
    used: str
    cached: str
    """In its `memory.stat`: cached files that are given up when others need room."""


_FIRST = _Hierarchy(
    root="/sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    cached="total_inactive_file",
)
_SECOND = _Hierarchy(
    root="/sys/fs/cgroup",
    limit="memory.max",
    used="memory.current",
    cached="inactive_file",
)


def _free_of_groups() -> int | None:
    """Bytes that the limits of this process's control groups (a container's, a service's) leave;
    None without one. A group has what the groups around it have, too."""
    found = []
    for hierarchy, group in _groups():
        folders = [hierarchy.root]
        for part in group.strip("/").split("/"):
            if part:
                folders.append(f"{folders[-1]}/{part}")
        found += [_free_of_group(hierarchy, folder) for folder in folders]
    return min((free for free in found if free is not None), default=None)


def _groups() -> Iterator[tuple[_Hierarchy, str]]:
    """Yield the groups of this process that may limit its memory. Within a container the name may be
    the one outside: then only the root is found."""
    named = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="ascii") as file:
        named = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, group in named:
        if not controllers:
            yield _SECOND, group
        elif "memory" in controllers.split(","):
            yield _FIRST, group
    if not named:
        yield _SECOND, "/"


def _free_of_group(hierarchy: _Hierarchy, folder: str) -> int | None:
    """Bytes that one group's limit leaves; None if it has none. Of what it uses, cached files count
    as free."""
    try:
        with open(f"{folder}/{hierarchy.limit}", encoding="ascii") as file:
            limit = int(file.read())  # a group of the second version without a limit says `max`
        with open(f"{folder}/{hierarchy.used}", encoding="ascii") as file:
            used = int(file.read())
        with open(f"{folder}/memory.stat", encoding="ascii") as file:
            numbers = dict(line.split() for line in file)
        return limit - used + int(numbers[hierarchy.cached])
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


def let_go_of_pages(file: Path) -> int:
    """Let this process go of the pages of a mapped file that nobody has written to, and return how
    many bytes these mappings are: what is read again comes back from the system's cache. For a file
    of which all was read once and little is read later."""
    if sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    done = 0
    for start, size in _unwritten_mappings(file):
        if madvise(start, size, mmap.MADV_DONTNEED) == 0:
            done += size
    return done


def _unwritten_mappings(file: Path) -> list[tuple[int, int]]:
    """Start and size of this process's mappings of a file that have no page of their own, which was
    copied because somebody wrote to it; none where the system does not say."""
    found: list[tuple[int, int]] = []
    name = str(file.resolve())
    mapping: tuple[int, int] | None = None
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                key, _, rest = line.partition(" ")
                if not key.endswith(":"):  # of the next mapping: addresses, rights, ..., its file
                    start, stop = (int(number, 16) for number in key.split("-"))
                    is_wanted = rest.rstrip("\n").endswith(f" {name}")
                    mapping = (start, stop - start) if is_wanted else None
                elif key == "Anonymous:" and mapping is not None and int(rest.split()[0]) == 0:
                    found.append(mapping)
    except OSError:
        return []
    return found


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
