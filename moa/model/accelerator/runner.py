"""Runs batches of any rows on an accelerator: fills the buffers, replays the tier's graph, reads the choices."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moa.config import TargetFacts
from moa.model.accelerator.buffers import MOST, Buffers, RowPiece, Tier, cut
from moa.model.accelerator.decoder import GraphDecoder
from moa.model.accelerator.graphs import Capture, Graphs, Work, cuda_graphs
from moa.model.accelerator.sampling import NO_NUMBER
from moa.model.accelerator.weights import Weights
from moa.model.pages import PagePool
from moa.model.rows import RowBatch

if TYPE_CHECKING:
    from moa.model.accelerator.kernels import TritonKernels


class Accelerator(NamedTuple):
    """What runs the forwards."""

    kernels: TritonKernels
    capture: Capture

    @classmethod
    def of(cls, device: torch.device, *, library_products: bool) -> Accelerator | None:
        """Triton and CUDA graphs; None where there are none."""
        if device.type != "cuda" or find_spec("triton") is None:
            return None
        from moa.model.accelerator.kernels import TritonKernels

        return cls(TritonKernels(device, library_products=library_products), cuda_graphs())


class GraphRunner:
    """The decoder over tiers."""

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
        self._decoder = GraphDecoder(weights, pool, accelerator.kernels)
        self.graphs = Graphs(accelerator.capture)
        """Of forwards, and of the drafter's steps beside them."""
        self._buffers = Buffers(pool, facts.heads // facts.kv_heads)
        self.logits = self._decoder.logits
        self.tap = self._decoder.tap
        self.tapped: Tensor | None = None
        """The inputs of the tapped layers in the latest forward: `[tokens, taps * hidden]`."""
        self.path = ""
        """How the latest forward ran: `graph` or `eager`, and its tier."""

    @property
    def nbytes(self) -> int:
        """Memory of all static buffers."""
        return self._decoder.nbytes + self._buffers.nbytes

    def usual(self, most_rows: int, draft: int, prompt: int) -> list[Tier]:
        """Tiers of batches of so many sessions at most: single tokens, drafts of `draft` tokens, pieces of a prompt."""
        tiers = [Tier.of(1, prompt, False)]
        rows = 1
        while rows <= min(most_rows, MOST):
            tiers += [Tier.of(rows, rows, True), Tier.of(rows, min(MOST, rows * draft), True)]
            rows *= 2
        return list(dict.fromkeys(tiers))

    @torch.inference_mode()
    def prepare(self, tiers: Sequence[Tier]) -> None:
        """Capture the graphs of these tiers."""
        for tier in tiers:
            self.graphs.add(tier.name, self._work(tier))

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
        run, path = self.graphs.get(tier.name, lambda: self._work(tier))
        self.path = f"{path} {tier.name}"
        run()
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

    def _work(self, tier: Tier) -> Work:
        forward = self._buffers.views(tier)
        return Work(lambda: self._decoder.run(forward, tier), lambda: self._buffers.clear(tier))
