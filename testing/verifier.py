"""A verifier in its own process: as users start it, or with forwards as slow as those of a larger
target."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from moa.cli.working import working
from moa.errors import MoaError, UsageError

_ROOT = Path(__file__).parents[1]
"""Where `benchmarks` is imported from: it is not installed."""
_SERVE = ("-c", "from cloud_verifier.cli import main; main()", "serve", "--log-level", "error")
_EMULATE = ("-m", "benchmarks.kit.emulation")


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, as `cloud-verifier serve` takes them; empty ones stand for the
    embedded pair."""

    target: str = ""
    drafter: str = ""
    bundle: str = ""
    """The drafter as exported, by which a verifier on a CPU drafts."""

    @property
    def has_records(self) -> bool:
        """Whether its verifier makes activation records."""
        return bool(self.drafter) or not self.target

    @property
    def flags(self) -> list[str]:
        """Flags of `cloud-verifier`."""
        return [f"--{name}={folder}" for name, folder in vars(self).items() if folder]


@dataclass(frozen=True)
class Emulated:
    """What an emulated verifier is like."""

    step_ms: float = 0.0
    """Milliseconds of every forward; 0 does not change it."""
    lanes: int = 1
    """Verifiers, each with a port and an engine of its own over the same weights."""
    baseline: str = ""
    """Folder of the drafter that drafts for the server in place of the MoA drafter."""
    graph: str = ""
    """Folder of a bundle of that: by its graph, as the MoA drafter does."""
    texts: str = ""
    """Folder of recorded texts: the target reads instead of computing, and so does the baseline."""
    known: int = 0
    """So many of them are known; 0: none."""
    level_ms: float = 0.0
    """Milliseconds of a level of the baseline's drafts where it reads."""


@dataclass
class Running:
    """A verifier's process. Where it is emulated, how its forwards went is known when it has ended."""

    urls: list[str]
    process: subprocess.Popen[str]
    forwards: int = 0
    late: int = 0
    """Forwards that took longer than stated: the processor was too busy, or the time too short."""

    @property
    def url(self) -> str:
        """The first address."""
        return self.urls[0]

    @property
    def stats(self) -> psutil.Process:
        """Memory, descriptors and processor time, of the process alone."""
        return psutil.Process(self.process.pid)


@contextlib.contextmanager
def verifier(
    *flags: str,
    pair: Pair | None = None,
    emulated: Emulated | None = None,
    threads: int = 0,
    log: IO[str] | None = None,
) -> Iterator[Running]:
    """Run one for as long as the context lasts. `flags` are more of `cloud-verifier serve`;
    `threads` 0 leaves them to it, as a user would."""
    command = [*_SERVE] if emulated is None else [*_EMULATE]
    if emulated is not None:
        command += [f"--{name.replace('_', '-')}={value}" for name, value in vars(emulated).items()]
    process = subprocess.Popen(
        [sys.executable, *command, "--port=0", *(pair or Pair()).flags, *flags],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=_ROOT,
        env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    )
    try:
        # A real model takes minutes.
        with working("verifier", "loading the target", at_once=False):
            line = process.stdout.readline() if process.stdout is not None else ""
        urls = [word for word in line.split() if word.startswith("ws://")]
        if not urls:
            sys.stderr.write(Path(log.name).read_text()[-2000:] if log is not None else "")
            raise MoaError("the verifier did not start", hint="what it said is above")
        running = Running(urls, process)
        yield running
        if emulated is not None and process.poll() is None:  # not where the body killed it
            process.terminate()
            said, _ = process.communicate(timeout=60)
            running.forwards, running.late = map(int, said.split()[-2:])
    finally:
        process.kill()  # no drain is needed; SIGKILL after its end does no harm
        process.communicate()


def many_short(slots: int, context: int = 512) -> list[str]:
    """Flags for so many short conversations of one principal, all at once."""
    many = slots + 8
    names = ["slots", "max-batch-rows", "max-queue", "max-queue-per-principal"]
    names += ["max-connections-per-principal", "max-sessions-per-principal"]
    sizes = {
        "kv-tokens": many * (context + 64),
        "max-context-tokens": context,
        "max-prompt-tokens": context // 2,
    }
    sizes |= {"max-tree-nodes": 32, "max-batch-tokens": 8192}
    return [f"--{name}={size}" for name, size in (dict.fromkeys(names, many) | sizes).items()]


@contextlib.contextmanager
def random_pair(size: str, vocabulary: int = 4096) -> Iterator[Pair]:
    """A random Llama-shaped pair of this size (`HIDDENxLAYERS`), with a tokenizer of characters;
    gone afterwards."""
    try:
        hidden, layers = map(int, size.split("x"))
    except ValueError:
        raise UsageError(f"a random target is HIDDENxLAYERS, not {size!r}") from None
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: its memory should not be ours while we measure.
        command: Sequence[str] = (
            "-m",
            "benchmarks.kit.random_pair",
            folder,
            *map(str, (hidden, layers, vocabulary)),
        )
        subprocess.run([sys.executable, *command], check=True, cwd=_ROOT)
        yield Pair(f"{folder}/target", f"{folder}/drafter")
