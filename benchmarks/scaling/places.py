"""Where devices find their verifiers: one process, or several workers. Each can lose one of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from benchmarks.server_kit import Pair, server


@dataclass(frozen=True)
class Place:
    """An address with verifiers behind it."""

    url: str
    victims: Callable[[], list[int]]
    """Process ids of the verifiers, any of which may be killed."""

    def kill_one(self) -> None:
        """Kill -9 a verifier, the first of them."""
        os.kill(self.victims()[0], signal.SIGKILL)


@contextlib.contextmanager
def plain(pair: Pair, *flags: str) -> Iterator[Place]:
    """One `cloud-verifier serve`."""
    with server(pair, *flags, threads=1) as process:
        yield Place(process.url, lambda: [process.process.pid])


@contextlib.contextmanager
def workers(pair: Pair, count: int, *flags: str) -> Iterator[Place]:
    """`cloud-verifier serve --workers`."""
    with server(pair, "--workers", str(count), *flags, threads=1) as process:
        yield Place(process.url, lambda: spawned(process.process.pid))


def spawned(front: int) -> list[int]:
    """The workers of a front, in their order."""
    children = psutil.Process(front).children()
    return [child.pid for child in children if any("spawn_main" in word for word in child.cmdline())]
