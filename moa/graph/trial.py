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
"""Of the processor, for loading and the first steps, and as many for each GB of the bundle."""
_WALL_SECONDS = 120.0
"""By the clock, on a machine that is busy with other things."""
_PROMPT = 64
"""Tokens of the longest step."""
_DONE = "it can be loaded and run"


def try_out(bundle: Bundle, variant: str, *, threads: int = 0) -> None:
    """Raise if this variant cannot be loaded and run within limits; once for these files."""
    mark = _mark(bundle, variant)
    if mark is not None and mark.exists():
        return
    said = _child(bundle, variant, threads)
    if said != _DONE:
        raise BundleError(said, hint="do not use this bundle")
    if mark is not None:
        with contextlib.suppress(OSError):  # it will be tried again
            mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            mark.touch()


def _child(bundle: Bundle, variant: str, threads: int) -> str:
    """What the child says of the graph."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MOA_EDGE_")
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MALLOC_ARENA_MAX": "2",  # each takes 64 MB of address space, which is what is limited
    }
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
    if done.returncode > 0 and b"Error" in done.stderr and b"MemoryError" not in done.stderr:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1]
        raise MoaError(f"the graph of {bundle.folder} could not be tried: {last}")
    return (
        f"the graph of {bundle.folder} takes more than {_memory(bundle, variant) >> 20} MiB"
        f" or {_seconds(bundle)} s to be loaded and run once"
    )


def _memory(bundle: Bundle, variant: str) -> int:
    return memory_limit(bundle.path(bundle.variant(variant).model))


def _seconds(bundle: Bundle) -> int:
    size = sum(entry.size for entry in bundle.manifest.files.values())
    return _SECONDS + _SECONDS * (size >> 30)


def _mark(bundle: Bundle, variant: str) -> Path | None:
    """A file whose presence says that exactly these files have been tried, by this version; None
    where there is no place for it."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        return None
    hashes = hashlib.sha256(repr((__version__, onnxruntime.__version__, variant)).encode())
    for name in sorted(bundle.manifest.files):
        about = bundle.path(name).stat()
        known = (str(bundle.path(name).absolute()), about.st_ino, about.st_size, about.st_mtime_ns)
        hashes.update(repr(known).encode())
    return Path(home) / "moa-edge" / "tried" / hashes.hexdigest()


# ---- in the child


def _limit(bundle: Bundle, variant: str) -> None:
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
    """Bytes of it that this program has already."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 2**30
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(folder: str, variant: str, threads: str) -> None:
    """Load, run, and say how it went."""
    from moa.graph.load import LoadedGraph
    from moa.sampling import SamplingSettings
    from moa.tree import TreeShape

    bundle = Bundle.open(folder)
    _limit(bundle, variant)
    try:
        loaded = LoadedGraph.load(bundle, variant, threads=int(threads))
        for ids in ([0], list(range(_PROMPT))):
            for _ in loaded.drafter().draft(ids, TreeShape(4, 3, 12), SamplingSettings()):
                pass
    except BundleError as error:
        print(" ".join(str(error).split()))
        return
    print(_DONE)


if __name__ == "__main__":
    main(*sys.argv[1:])
