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
import math
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

_SECONDS = 4.0
"""Seconds of the processor for loading and the first steps; the embedded bundle needs 0.3 in all."""
_SECONDS_PER_GB = 40.0
"""And for each GB of the bundle; an int4 drafter of 0.4 GB needs 1.8 in all on a fast core, and 5
on a slow one that others use, too."""
_CHILD_SECONDS = 120.0
"""Seconds by the clock after which the child is killed. Of the graph that says something only where
a system limits no processor time: elsewhere the machine is busy with other things."""
_PROMPT_TOKENS = 64
"""Tokens of the longest step that is tried."""
_DONE = "it can be loaded and run"
"""What the child prints if all went well."""
_UNKNOWN_ADDRESS_SPACE = 2**30
"""Bytes that a program is taken to have where the system does not say."""


def try_out(bundle: Bundle, variant: str, *, threads: int = 0) -> None:
    """Load and run a variant of a bundle in a process of its own with limits of time and memory,
    and raise a `BundleError` if it exceeds them. Files that have passed are not tried again."""
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
    """Try a variant of a bundle in a child process. Returns `_DONE` if its graph could be loaded
    and run, else a line that says what is wrong with it. Raises a `MoaError` if the child failed
    for another reason than its limits."""
    command = [sys.executable, "-P", "-m", "moa.graph.trial"]
    command += [str(bundle.folder.absolute()), variant, str(threads)]
    with (
        watched(),  # asyncio hears of a Ctrl-C only afterwards
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
        ) as child,
    ):
        try:
            output, errors = child.communicate(timeout=_CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise MoaError(
                f"the graph of {bundle.folder} could not be tried within {_CHILD_SECONDS:.0f} s",
                hint="try again when the machine is less busy",
            ) from None
        finally:
            child.kill()  # whatever has happened here, nothing of the graph goes on
    said = output.decode(errors="replace").strip()
    if child.returncode == 0 and said:
        return said.splitlines()[-1]
    # A negative code is a signal: a limit of the processor's time. A MemoryError is a limit, too.
    is_other_error = b"Error" in errors and b"MemoryError" not in errors
    if child.returncode > 0 and is_other_error:
        last_line = errors.decode(errors="replace").strip().splitlines()[-1]
        raise MoaError(f"the graph of {bundle.folder} could not be tried: {last_line}")
    return (
        f"the graph of {bundle.folder} takes more than {_memory(bundle, variant) >> 20} MiB"
        f" or {_seconds(bundle):.0f} s of the processor to be loaded and run once"
    )


def _environment() -> dict[str, str]:
    """The environment variables of a process that runs a stranger's graph. The user's settings, a
    token among them, are no business of it."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MOA_EDGE_")
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    # Each arena takes 64 MB of address space, which is what is limited.
    environment["MALLOC_ARENA_MAX"] = "2"
    return environment


def _memory(bundle: Bundle, variant: str) -> int:
    """Bytes of memory that the child may take beside what the program has."""
    return memory_limit(bundle.path(bundle.variant(variant).model))


def _seconds(bundle: Bundle) -> float:
    """Seconds of the processor that the child may take."""
    size = sum(entry.size for entry in bundle.manifest.files.values())
    return _SECONDS + _SECONDS_PER_GB * size / 1e9


def _tried_mark(bundle: Bundle, variant: str) -> Path | None:
    """The path of a mark, an empty file in the user's cache whose presence says that exactly these
    files have passed with this version; None where the user has no such folder."""
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
    """Limit the processor time and the memory of this process, the child, to what a trial may take
    beyond what it has used already."""
    try:
        import resource
    except ImportError:  # Windows: there only the clock limits it
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + _seconds(bundle))
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
    """Load a variant of the bundle in a folder within limits, draft after a short and a longer
    text, and print how it went: `_DONE`, or what is wrong with it."""
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
