"""A stranger's graph is tried in a process of its own before this one loads it.

While ONNX Runtime loads a graph it computes what is constant in it, with any memory and for any
time: a few hundred bytes can ask for gigabytes and hours, and loading cannot be interrupted. So
the graph is loaded, and run once, by a child with limits; loading is the same each time, so what
the child could do this process can do, too. A later step's cost may depend on the text: those are
bounded by the arena of `step.py` and ended by `moa/process/watch.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime

from moa import __version__
from moa.bundle import Bundle
from moa.errors import BundleError, MoaError
from moa.graph.step import memory_limit
from moa.process.watch import watched

_SECONDS = 6
"""Seconds of the processor for loading and the first steps, and as many for each GB of the bundle."""
_WALL_SECONDS = 120.0
"""Seconds by the clock, for a machine that is busy with other things."""
_PROMPT_TOKENS = 64
"""Tokens of the longest step that is tried."""
_DONE = "it can be loaded and run"
"""What the child prints if all went well."""
_UNKNOWN_ADDRESS_SPACE = 2**30
"""Bytes that a program is taken to have where the system does not say."""


def try_out(bundle: Bundle, variant: str, *, threads: int = 0) -> None:
    """Raise if this variant cannot be loaded and run within limits; once for these files."""
    tried_mark = _tried_mark(bundle, variant)
    if tried_mark is not None and tried_mark.exists():
        return
    said = _child(bundle, variant, threads)
    if said != _DONE:
        raise BundleError(said, hint="do not use this bundle")
    if tried_mark is not None:
        with contextlib.suppress(OSError):  # it will be tried again
            tried_mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            tried_mark.touch()


def _child(bundle: Bundle, variant: str, threads: int) -> str:
    """Try the graph in a child; returns what is to be said of the graph, `_DONE` if it is good.
    Raises a `MoaError` if the child failed for another reason than its limits."""
    # The user's settings, a token among them, are no business of a process that runs a
    # stranger's graph.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MOA_EDGE_")
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # Each arena takes 64 MB of address space, which is what is limited.
    environment["MALLOC_ARENA_MAX"] = "2"
    command = [sys.executable, "-P", "-m", "moa.graph.trial"]
    command += [str(bundle.folder.absolute()), variant, str(threads)]
    try:
        with watched():  # asyncio hears of a Ctrl-C only afterwards
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=environment,
                timeout=_WALL_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"the graph of {bundle.folder} is not ready after {_WALL_SECONDS:.0f} s"
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode == 0 and said:
        return said.splitlines()[-1]
    # A negative code is a signal: a limit of the processor's time. A MemoryError is a limit, too.
    is_other_error = b"Error" in done.stderr and b"MemoryError" not in done.stderr
    if done.returncode > 0 and is_other_error:
        last_line = done.stderr.decode(errors="replace").strip().splitlines()[-1]
        raise MoaError(f"the graph of {bundle.folder} could not be tried: {last_line}")
    return (
        f"the graph of {bundle.folder} takes more than {_memory(bundle, variant) >> 20} MiB"
        f" or {_seconds(bundle)} s to be loaded and run once"
    )


def _memory(bundle: Bundle, variant: str) -> int:
    """Bytes of memory that the child may take beside what the program has."""
    return memory_limit(bundle.path(bundle.variant(variant).model))


def _seconds(bundle: Bundle) -> int:
    """Seconds of the processor that the child may take."""
    size = sum(entry.size for entry in bundle.manifest.files.values())
    return _SECONDS + _SECONDS * (size >> 30)


def _tried_mark(bundle: Bundle, variant: str) -> Path | None:
    """A file whose presence says that exactly these files have been tried, by this version; None
    where there is no place for it."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        return None
    digest = hashlib.sha256(repr((__version__, onnxruntime.__version__, variant)).encode())
    for name in sorted(bundle.manifest.files):
        path = bundle.path(name)
        stat = path.stat()
        identity = (str(path.absolute()), stat.st_ino, stat.st_size, stat.st_mtime_ns)
        digest.update(repr(identity).encode())
    return Path(home) / "moa-edge" / "tried" / digest.hexdigest()


# ---- in the child


def _limit(bundle: Bundle, variant: str) -> None:
    """Limit this process's time and memory, beyond what it has used already."""
    try:
        import resource
    except ImportError:  # Windows: there only the clock limits it
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + _seconds(bundle)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with contextlib.suppress(ValueError, OSError):  # the system has no such limit
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _address_space() + _memory(bundle, variant)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _address_space() -> int:
    """Bytes of address space that this program has already."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return _UNKNOWN_ADDRESS_SPACE
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(folder: str, variant: str, threads: str) -> None:
    """Load, run, and say how it went."""
    from moa.graph.drafter import run
    from moa.graph.load import LoadedGraph
    from moa.sampling import SamplingSettings
    from moa.tree import TreeShape

    bundle = Bundle.open(folder)
    _limit(bundle, variant)
    try:
        loaded = LoadedGraph.load(bundle, variant, threads=int(threads))
        for ids in ([0], list(range(_PROMPT_TOKENS))):
            run(loaded.drafter().draft(ids, TreeShape(4, 3, 12), SamplingSettings()))
    except BundleError as error:
        print(" ".join(str(error).split()))
        return
    print(_DONE)


if __name__ == "__main__":
    main(*sys.argv[1:])
