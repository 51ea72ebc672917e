"""Captured graphs by name. Work that has none yet runs the same kernels one by one, bitwise the
same, until `prepare` is called between rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Rerun = Callable[[], None]
Capture = Callable[[Rerun], Rerun]
"""Makes of a function one that does the same again, on the same memory: a graph."""


class Work(NamedTuple):
    """Kernels over static memory."""

    run: Rerun
    clear: Rerun
    """Makes the inputs harmless, for a run that nobody asked for."""


class Graphs:
    """What has been captured, and what was needed without."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._ready: dict[str, Rerun] = {}
        self._missing: dict[str, Work] = {}

    @property
    def unprepared(self) -> int:
        """How many were needed and have not been captured yet."""
        return len(self._missing)

    def get(self, name: str, work: Callable[[], Work]) -> tuple[Rerun, str]:
        """Return a function that does the work of this name, and a word for how it does it:
        `graph`, a captured graph that replays all kernels at once, or `eager`, kernel by kernel.
        Work without a graph is noted, to be captured when there is time; `work` makes it the first
        time."""
        if name in self._ready:
            return self._ready[name], "graph"
        if name not in self._missing:
            self._missing[name] = work()
        return self._missing[name].run, "eager"

    def add(self, name: str, work: Work) -> None:
        """Capture work as the graph of this name, unless there is one: from then on it is
        replayed."""
        self._missing.pop(name, None)
        if name not in self._ready:
            work.clear()  # the run below is of no request, and must harm none
            work.run()  # kernels are compiled now: a graph cannot be captured around that
            self._ready[name] = self._capture(work.run)
            work.clear()  # what the run has written

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture one graph, the one that was missed first; nothing if none was."""
        if self._missing:
            name, work = next(iter(self._missing.items()))
            self.add(name, work)


def cuda_graphs() -> Capture:
    """Return a function that captures the kernels which another function launches as a CUDA graph,
    and returns its replay. All graphs share one pool for the memory that libraries may want inside
    of them: only one runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Rerun) -> Rerun:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph.replay

    return capture
