"""Runs batches of any rows on an accelerator: fills the buffers, replays the tier's graph, reads
the choices."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moa.config import TargetFacts
from moa.target.contract import NO_NUMBER, ExpectedLoad
from moa.target.cuda.buffers import (
    MOST,
    SPLIT,
    Buffers,
    ForwardInput,
    RowPiece,
    Tier,
    check_nodes,
    cut,
)
from moa.target.cuda.graphs import Capture, Graphs, Work, cuda_graphs
from moa.target.cuda.weights import Weights
from moa.target.decoder import Forward
from moa.target.pages import PAGE, PagePool
from moa.target.rows import RowBatch

if TYPE_CHECKING:
    from moa.target.cuda.kernels import TritonKernels


class GraphDecoder:
    """The forward of a dense Llama-like target, from static buffers to chosen tokens: ten kernels a
    layer, nothing allocated, nothing read back, so it can be captured as a graph. All tiers share
    the memory of the largest."""

    def __init__(self, weights: Weights, pool: PagePool, kernels: TritonKernels) -> None:
        facts = weights.facts
        self._weights = weights
        self._pool = pool
        self._kernels = kernels
        device = weights.embedding.device
        dtype = weights.embedding.dtype
        splits = -(-pool.pages_per_slot * PAGE // SPLIT)

        def memory(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(MOST, *shape, dtype=of, device=device)

        inner = facts.heads * facts.head_dim
        middle = len(weights.layers[0].gate_up)
        self.hidden = memory(facts.hidden_size)
        """Final states, after the last norm, of the latest forward."""
        self._scratch = (
            *(memory(facts.hidden_size) for _ in range(3)),
            self.hidden,
            memory(inner + 2 * facts.kv_heads * facts.head_dim),
            memory(facts.heads, facts.head_dim),
            memory(inner),
            memory(facts.heads, splits, facts.head_dim, of=torch.float32),
            memory(facts.heads, splits, 2, of=torch.float32),
            memory(middle),
            memory(middle // 2),
        )
        self._logits = memory(len(weights.head), of=torch.float32)
        self.best = memory(of=torch.float32)
        """The best logit of each judged token, and the token it is of."""
        self.choices = memory(of=torch.long)

        self._taps: list[tuple[int, int]] = []
        self.tapped = memory(0)
        """The inputs of the tapped layers, side by side."""

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers; before any graph is captured."""
        width = self.hidden.shape[1]
        self._taps = [(layer, width * place) for place, layer in enumerate(layers)]
        self.tapped = self.hidden.new_zeros(MOST, width * len(layers))

    @property
    def nbytes(self) -> int:
        """Memory of these tensors."""
        return sum(
            one.nbytes
            for one in (*self._scratch, self._logits, self.best, self.choices, self.tapped)
        )

    def run(self, forward: ForwardInput[Tensor], tier: Tier) -> None:
        """Run the tokens in the buffers; `hidden`, and with a head `best` and `choices`, are the
        results."""
        kernels = self._kernels
        weights = self._weights
        eps = self._weights.facts.rms_norm_eps
        x, normed, more, hidden, qkv, query, attended, parts, sums, both, gated = (
            one[: tier.tokens] for one in self._scratch
        )
        torch.index_select(weights.embedding, 0, forward.ids, out=x)
        added = None
        for number, (layer, (keys, values)) in enumerate(
            zip(weights.layers, self._pool.layers, strict=True)
        ):
            kernels.add_norm(x, added, layer.before, eps, normed)
            for at in (column for layer_number, column in self._taps if layer_number == number):
                self.tapped[: tier.tokens, at : at + x.shape[1]].copy_(x)
            kernels.product(normed, layer.qkv, layer.qkv_bias, qkv)
            kernels.rotate_and_store(
                forward, qkv, weights.turns, layer.head_norms, eps, query, keys, values
            )
            kernels.attend(
                forward, query, keys, values, layer.window, layer.scale, parts, sums, attended
            )
            kernels.product(attended, layer.out, layer.out_bias, more)
            kernels.add_norm(x, more, layer.between, eps, normed)
            kernels.product(normed, layer.gate_up, None, both)
            kernels.gate(both, gated)
            kernels.product(gated, layer.down, None, more)
            added = more
        kernels.add_norm(x, added, weights.norm, eps, hidden)
        if tier.head:
            judged = normed
            logits = self._logits[: tier.tokens]
            torch.index_select(hidden, 0, forward.judged, out=judged)
            kernels.product(judged, weights.head, None, logits)
            torch.max(logits, -1, out=(self.best[: tier.tokens], self.choices[: tier.tokens]))

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head by the same product, outside of a graph: float32 `[n,vocab]`."""
        logits = torch.empty(
            len(hidden), len(self._weights.head), dtype=torch.float32, device=hidden.device
        )
        self._kernels.product(hidden, self._weights.head, None, logits)
        return logits


class Accelerator(NamedTuple):
    """What runs the forwards."""

    kernels: TritonKernels
    capture: Capture

    @classmethod
    def of(cls, device: torch.device, *, library_products: bool) -> Accelerator | None:
        """Triton and CUDA graphs; None where there are none."""
        if device.type != "cuda" or find_spec("triton") is None:
            return None
        from moa.target.cuda.kernels import TritonKernels

        return cls(TritonKernels(device, library_products=library_products), cuda_graphs())


class GraphRunner:
    """The decoder over tiers."""

    name = "cuda"
    samples = True

    def __init__(
        self,
        model: Any,
        facts: TargetFacts,
        cache: PagePool,
        accelerator: Accelerator,
        windows: Sequence[int | None],
    ) -> None:
        weights = Weights.of(model, facts, capacity=cache.capacity, windows=windows)
        self._decoder = GraphDecoder(weights, cache, accelerator.kernels)
        self.graphs = Graphs(accelerator.capture)
        """Of forwards, and of the drafter's steps beside them."""
        self._buffers = Buffers(cache, facts.heads // facts.kv_heads)
        self.logits = self._decoder.logits
        self.tap = self._decoder.tap

    @property
    def nbytes(self) -> int:
        """Memory of all static buffers."""
        return self._decoder.nbytes + self._buffers.nbytes

    @property
    def unprepared(self) -> bool:
        """Whether a forward had no graph yet."""
        return self.graphs.unprepared > 0

    def check(self, batch: RowBatch) -> None:
        """Refuse a tree that a mask has no bits for."""
        check_nodes(batch)

    @torch.inference_mode()
    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Capture the graphs of the usual forwards."""
        for tier in usual_tiers(load):
            self.graphs.add(tier.name, self._work(tier))

    def prepare_more(self) -> None:
        """Capture the graph of a forward that had none."""
        self.graphs.prepare()

    def run(self, batch: RowBatch) -> Forward:
        """Keys and values go to the pages of the batch's slots. A batch beyond the largest tier runs
        in several forwards."""
        judged = batch.judged()
        choices = np.full(judged.shape, -1, dtype=np.int64)
        hidden = []
        tapped = []
        path = ""
        for pieces in cut(batch):
            where = np.concatenate(
                [np.arange(start, stop) + batch.starts[row] for row, start, stop in pieces]
            )
            found, best, path = self._forward(batch, pieces, np.flatnonzero(judged[where]))
            choices[where[judged[where]]] = best
            hidden.append(found)
            tapped.append(self._decoder.tapped[: len(found)].clone())
        return Forward(
            hidden=hidden[0] if len(hidden) == 1 else torch.cat(hidden),
            tapped=torch.cat(tapped) if self._decoder.tapped.shape[1] else None,
            choices=choices,
            path=path,
        )

    def _forward(
        self, batch: RowBatch, pieces: Sequence[RowPiece], judged: npt.NDArray[np.int64]
    ) -> tuple[Tensor, npt.NDArray[np.int64], str]:
        """Final states, the choices of judged tokens, and how it ran."""
        tokens = sum(stop - start for _, start, stop in pieces)
        tier = Tier.of(len(pieces), tokens, len(judged) > 0)
        self._buffers.fill(tier, batch, pieces, judged)
        run, path = self.graphs.get(tier.name, lambda: self._work(tier))
        run()
        # Reading waits for the device. A forward without choices is waited for too: the host's
        # buffer is filled again.
        if len(judged):
            best = self._decoder.choices[: len(judged)].cpu().numpy()
            finite = self._decoder.best[: len(judged)].isfinite().cpu().numpy()
            choices = np.where(finite, best, NO_NUMBER)
        else:
            choices = np.zeros(0, dtype=np.int64)
            if self._decoder.hidden.device.type == "cuda":
                torch.cuda.synchronize(self._decoder.hidden.device)
        return self._decoder.hidden[:tokens].clone(), choices, f"{path} {tier.name}"

    def _work(self, tier: Tier) -> Work:
        forward = self._buffers.views(tier)
        return Work(lambda: self._decoder.run(forward, tier), lambda: self._buffers.clear(tier))


def usual_tiers(load: ExpectedLoad) -> list[Tier]:
    """Tiers of batches of so many sessions at most: single tokens, usual drafts, pieces of a prompt."""
    tiers = [Tier.of(1, load.prompt_tokens, False)]
    rows = 1
    while rows <= min(load.rows, MOST):
        tiers.append(Tier.of(rows, rows, True))
        tiers.append(Tier.of(rows, min(MOST, rows * load.draft_tokens), True))
        rows *= 2
    return list(dict.fromkeys(tiers))
