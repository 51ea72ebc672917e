"""Runs batches of any rows on an accelerator: fills the buffers, replays the tier's graph, reads
the choices."""

from __future__ import annotations

import math
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
from moa.target.cuda.weights import Layer, Weights
from moa.target.decoder import Forward
from moa.target.pages import PAGE, PagePool
from moa.target.rows import RowBatch

if TYPE_CHECKING:
    from moa.target.cuda.kernels import TritonKernels


class _Memory(NamedTuple):
    """Intermediate results of a forward, `[tokens, ...]` each. Every layer writes over those of the
    layer before."""

    x: Tensor
    """The states that each layer adds to."""
    normed: Tensor
    """The states after a norm."""
    more: Tensor
    """What attention or the feed-forward part adds to the states."""
    hidden: Tensor
    """Final states, after the last norm."""
    qkv: Tensor
    """Queries, keys and values side by side."""
    query: Tensor
    """Rotated queries, `[tokens, heads, head_dim]`."""
    attended: Tensor
    """What attention has read."""
    parts: Tensor
    """Of `attended`, a part for each split of the columns."""
    sums: Tensor
    """Best score, and sum of weights, of each part."""
    both: Tensor
    """The two inner matrices' results of the feed-forward part, side by side."""
    gated: Tensor
    """One of these, gated by the other."""

    def of_first(self, tokens: int) -> _Memory:
        """Views of the results of the first tokens."""
        return _Memory(*(whole[:tokens] for whole in self))


class GraphDecoder:
    """The forward of a dense Llama-like target, from static buffers to chosen tokens: ten kernels a
    layer, nothing allocated, nothing read back, so it can be captured as a graph. All tiers share
    the memory of the largest."""

    def __init__(self, weights: Weights, pool: PagePool, kernels: TritonKernels) -> None:
        """Allocate the memory of all intermediate results once, for the most tokens of a forward:
        a captured graph writes to the addresses that it was captured with."""
        facts = weights.facts
        self._weights = weights
        self._pool = pool
        self._kernels = kernels
        device = weights.embedding.device
        dtype = weights.embedding.dtype
        splits = math.ceil(pool.pages_per_slot * PAGE / SPLIT)

        def memory(*shape: int, of: torch.dtype = dtype) -> Tensor:
            """Zeros of this shape for each token of the largest tier."""
            return torch.zeros(MOST, *shape, dtype=of, device=device)

        inner = facts.heads * facts.head_dim
        middle = len(weights.layers[0].gate_up)
        self.hidden = memory(facts.hidden_size)
        """Final states, after the last norm, of the latest forward."""
        self._memory = _Memory(
            x=memory(facts.hidden_size),
            normed=memory(facts.hidden_size),
            more=memory(facts.hidden_size),
            hidden=self.hidden,
            qkv=memory(inner + 2 * facts.kv_heads * facts.head_dim),
            query=memory(facts.heads, facts.head_dim),
            attended=memory(inner),
            parts=memory(facts.heads, splits, facts.head_dim, of=torch.float32),
            sums=memory(facts.heads, splits, 2, of=torch.float32),
            both=memory(middle),
            gated=memory(middle // 2),
        )
        self._logits = memory(len(weights.head), of=torch.float32)
        self.best = memory(of=torch.float32)
        """The best logit of each judged token, and the token it is of."""
        self.choices = memory(of=torch.long)

        self._taps: list[tuple[int, int]] = []
        self.tapped = memory(0)
        """The inputs of the tapped layers, side by side."""

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers in every forward; call it before any graph is captured."""
        width = self.hidden.shape[1]
        self._taps = [(layer, width * place) for place, layer in enumerate(layers)]
        self.tapped = self.hidden.new_zeros(MOST, width * len(layers))

    @property
    def nbytes(self) -> int:
        """Memory of the static tensors, without the inputs."""
        tensors = (*self._memory, self._logits, self.best, self.choices, self.tapped)
        return sum(tensor.nbytes for tensor in tensors)

    def run(self, forward: ForwardInput[Tensor], tier: Tier) -> None:
        """Run the tokens whose inputs are in `forward`, in a forward of the size `tier`. The final
        states are left in `hidden`; if the LM head runs, the best logits are in `best` and their
        tokens in `choices`. Keys and values go to the pool."""
        weights = self._weights
        memory = self._memory.of_first(tier.tokens)
        torch.index_select(weights.embedding, 0, forward.ids, out=memory.x)
        # What the layer before adds to the states: the kernel of the next norm adds it on the way.
        added = None
        for number, layer in enumerate(weights.layers):
            self._attention(number, layer, forward, memory, added)
            self._feed_forward(layer, memory)
            added = memory.more
        eps = weights.facts.rms_norm_eps
        self._kernels.add_norm(memory.x, added, weights.norm, eps, memory.hidden)
        if tier.head:
            self._choose(forward, memory)

    def _attention(
        self,
        number: int,
        layer: Layer,
        forward: ForwardInput[Tensor],
        memory: _Memory,
        added: Tensor | None,
    ) -> None:
        """Run the attention of layer `number`. What the layer before adds to the states, `added`,
        is added first; what this one adds is left in `more`."""
        kernels = self._kernels
        eps = self._weights.facts.rms_norm_eps
        keys, values = self._pool.layers[number]
        kernels.add_norm(memory.x, added, layer.attention_norm, eps, memory.normed)
        self._keep_taps(number, memory.x)
        kernels.product(memory.normed, layer.qkv, layer.qkv_bias, memory.qkv)
        kernels.rotate_and_store(
            forward,
            memory.qkv,
            self._weights.rotary_table,
            layer.head_norms,
            eps,
            memory.query,
            keys,
            values,
        )
        kernels.attend(
            forward,
            memory.query,
            keys,
            values,
            layer.window,
            layer.scale,
            memory.parts,
            memory.sums,
            memory.attended,
        )
        kernels.product(memory.attended, layer.out, layer.out_bias, memory.more)

    def _keep_taps(self, number: int, x: Tensor) -> None:
        """Copy the inputs of layer `number` to its columns of `tapped`, if it is tapped."""
        for tapped_layer, first_column in self._taps:
            if tapped_layer == number:
                columns = slice(first_column, first_column + x.shape[1])
                self.tapped[: len(x), columns].copy_(x)

    def _feed_forward(self, layer: Layer, memory: _Memory) -> None:
        """Run the feed-forward part of a layer. What attention adds to the states, `more`, is added
        first; then `more` gets what this part adds."""
        kernels = self._kernels
        eps = self._weights.facts.rms_norm_eps
        kernels.add_norm(memory.x, memory.more, layer.mlp_norm, eps, memory.normed)
        kernels.product(memory.normed, layer.gate_up, None, memory.both)
        kernels.gate(memory.both, memory.gated)
        kernels.product(memory.gated, layer.down, None, memory.more)

    def _choose(self, forward: ForwardInput[Tensor], memory: _Memory) -> None:
        """Run the LM head for the judged tokens, and leave the best logit of each in `best` and its
        token in `choices`."""
        judged = memory.normed  # memory that is not needed any more
        count = len(judged)
        logits = self._logits[:count]
        torch.index_select(memory.hidden, 0, forward.judged, out=judged)
        self._kernels.product(judged, self._weights.head, None, logits)
        torch.max(logits, -1, out=(self.best[:count], self.choices[:count]))

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head's float32 logits `[n,vocab]` of final states `[n,hidden]`. It is computed
        outside of any graph, but by the kernel that forwards use, so the bits are the same."""
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
        """The kernels in Triton and CUDA graphs for this device; None on a device that is not
        CUDA's, or without Triton. `library_products` is faster for many tokens, but no longer exact
        to the bit."""
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
        """Take the weights of a model, and make the buffers for forwards over its KV cache.
        `windows` are the tokens that each layer looks back, None: all."""
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
        """Capture the graphs of the forwards that a server expects, before its port opens."""
        for tier in usual_tiers(load):
            self.graphs.add(tier.name, self._work(tier))

    def prepare_more(self) -> None:
        """Capture the graph of a forward that had none."""
        self.graphs.prepare()

    def run(self, batch: RowBatch) -> Forward:
        """Compute the final states of a batch's tokens, and the likeliest token after those of
        which it is wanted (judged ones). Keys and values go to the pages of the rows' slots. A
        batch with more tokens than the largest graph takes runs in several forwards."""
        is_judged = batch.judged()
        choices = np.full(is_judged.shape, -1, dtype=np.int64)
        hidden = []
        tapped = []
        path = ""
        for pieces in cut(batch):
            # The batch's tokens that this forward runs, in its order.
            tokens = np.concatenate(
                [np.arange(start, stop) + batch.starts[row] for row, start, stop in pieces]
            )
            judged = np.flatnonzero(is_judged[tokens])
            states, chosen, path = self._forward(batch, pieces, judged)
            choices[tokens[judged]] = chosen
            hidden.append(states)
            # A copy: the next forward writes over it.
            tapped.append(self._decoder.tapped[: len(states)].clone())
        return Forward(
            hidden=hidden[0] if len(hidden) == 1 else torch.cat(hidden),
            tapped=torch.cat(tapped) if self._decoder.tapped.shape[1] else None,
            choices=choices,
            path=path,
        )

    def _forward(
        self, batch: RowBatch, pieces: Sequence[RowPiece], judged: npt.NDArray[np.int64]
    ) -> tuple[Tensor, npt.NDArray[np.int64], str]:
        """Run one forward of these pieces of the batch's rows. Returns the final states of its
        tokens, the likeliest token after each of the `judged` ones (indices into its tokens), and
        how it ran, for metrics."""
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
        """What a graph of this tier runs, and how its inputs are made harmless."""
        forward = self._buffers.views(tier)
        return Work(lambda: self._decoder.run(forward, tier), lambda: self._buffers.clear(tier))


def usual_tiers(load: ExpectedLoad) -> list[Tier]:
    """The sizes of the forwards that a server expects: a piece of a prompt, which needs no LM head;
    and for each power of two of sessions a single token of each, and a usual draft of each."""
    tiers = [Tier.of(1, load.prompt_tokens, False)]
    rows = 1
    while rows <= min(load.rows, MOST):
        tiers.append(Tier.of(rows, rows, True))
        tiers.append(Tier.of(rows, min(MOST, rows * load.draft_tokens), True))
        rows *= 2
    return list(dict.fromkeys(tiers))
