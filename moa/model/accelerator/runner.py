"""Runs batches of any rows on an accelerator: fills the buffers, replays the tier's graph, reads the choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moa.config import TargetFacts
from moa.model.accelerator.buffers import MOST, Buffers, RowPiece, Tier, cut
from moa.model.accelerator.decoder import GraphDecoder, Kernels
from moa.model.accelerator.sampling import NO_NUMBER
from moa.model.accelerator.weights import Weights
from moa.model.pages import PagePool
from moa.model.rows import RowBatch

Rerun = Callable[[], None]
Capture = Callable[[Rerun], Rerun]
"""Makes of a function one that does the same again, on the same memory: a graph."""


class Accelerator(NamedTuple):
    """What runs the forwards."""

    kernels: Kernels
    capture: Capture

    @classmethod
    def of(cls, device: torch.device, *, library_products: bool) -> Accelerator | None:
        """Triton and CUDA graphs; None where there are none."""
        if device.type != "cuda" or find_spec("triton") is None:
            return None
        from moa.model.accelerator.kernels import TritonKernels

        return cls(TritonKernels(device, library_products=library_products), cuda_graphs())


class GraphRunner:
    """The decoder over tiers. A tier that has no graph yet runs the same kernels one by one, bitwise the same, until
    `prepare` is called between rounds."""

    def __init__(
        self,
        model: Any,
        facts: TargetFacts,
        pool: PagePool,
        accelerator: Accelerator,
        *,
        capacity: int,
        windows: Sequence[int | None],
    ) -> None:
        weights = Weights.of(model, facts, capacity=capacity, windows=windows)
        self._decoder, self._capture = GraphDecoder(weights, pool, accelerator.kernels), accelerator.capture
        self._buffers = Buffers(pool, facts.heads // facts.kv_heads)
        self.logits = self._decoder.logits
        self._graphs: dict[Tier, Rerun] = {}
        self._missing: dict[Tier, None] = {}
        self.tap = self._decoder.tap
        self.tapped: Tensor | None = None
        """The inputs of the tapped layers in the latest forward: `[tokens, taps * hidden]`."""
        self.path = ""
        """How the latest forward ran: `graph` or `eager`, and its tier."""

    @property
    def nbytes(self) -> int:
        """Memory of all static buffers."""
        return self._decoder.nbytes + self._buffers.nbytes

    @property
    def unprepared(self) -> int:
        """Tiers that were needed and have no graph yet."""
        return len(self._missing)

    def usual(self, most_rows: int, draft: int, prompt: int) -> list[Tier]:
        """Tiers of batches of so many sessions at most: single tokens, drafts of `draft` tokens, pieces of a prompt."""
        tiers = [Tier.of(1, prompt, False)]
        rows = 1
        while rows <= min(most_rows, MOST):
            tiers += [Tier.of(rows, rows, True), Tier.of(rows, min(MOST, rows * draft), True)]
            rows *= 2
        return list(dict.fromkeys(tiers))

    @torch.inference_mode()
    def prepare(self, tiers: Sequence[Tier] | None = None) -> None:
        """Capture the graphs of these tiers; without any, of the one that was missed first."""
        for tier in list(self._missing)[:1] if tiers is None else tiers:
            self._missing.pop(tier, None)
            if tier not in self._graphs:
                run = self._run(tier)
                self._buffers.clear(tier)
                run()  # kernels are compiled now: a graph cannot be captured around that
                self._graphs[tier] = self._capture(run)

    @torch.inference_mode()
    def __call__(self, batch: RowBatch) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Final states `[tokens, hidden]`, and the best token after each judged one (-1 elsewhere; `NO_NUMBER`)."""
        judged = batch.judged()
        choices = np.full(judged.shape, -1, dtype=np.int64)
        hidden, tapped = [], []
        for pieces in cut(batch):
            where = np.concatenate([np.arange(start, stop) + batch.starts[row] for row, start, stop in pieces])
            found, best = self._forward(batch, pieces, np.flatnonzero(judged[where]))
            choices[where[judged[where]]] = best
            hidden.append(found)
            tapped.append(self._decoder.tapped[: len(found)].clone())
        self.tapped = torch.cat(tapped) if self._decoder.tapped.shape[1] else None
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden), choices

    def _forward(
        self, batch: RowBatch, pieces: Sequence[RowPiece], judged: npt.NDArray[np.int64]
    ) -> tuple[Tensor, npt.NDArray[np.int64]]:
        tokens = sum(stop - start for _, start, stop in pieces)
        tier = Tier.of(len(pieces), tokens, len(judged) > 0)
        self._buffers.fill(tier, batch, pieces, judged)
        graph = self._graphs.get(tier)
        self.path = f"{'eager' if graph is None else 'graph'} {tier.name}"
        if graph is None:
            self._missing[tier] = None
            graph = self._run(tier)
        graph()
        # Reading waits for the device. A forward without choices is waited for too: the host's buffer is filled again.
        if len(judged):
            best = self._decoder.choices[: len(judged)].cpu().numpy()
            finite = self._decoder.best[: len(judged)].isfinite().cpu().numpy()
            choices = np.where(finite, best, NO_NUMBER)
        else:
            choices = np.zeros(0, dtype=np.int64)
            if self._decoder.hidden.device.type == "cuda":
                torch.cuda.synchronize(self._decoder.hidden.device)
        return self._decoder.hidden[:tokens].clone(), choices

    def _run(self, tier: Tier) -> Rerun:
        forward = self._buffers.views(tier)
        return lambda: self._decoder.run(forward, tier)


def cuda_graphs() -> Capture:
    """CUDA graphs, which share the memory that libraries may want inside of them."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Rerun) -> Rerun:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph.replay

    return capture
