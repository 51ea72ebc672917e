"""The forward of a dense Llama-like target, from static buffers to chosen tokens: ten kernels a layer, nothing
allocated, nothing read back. So it can be captured as a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moa.model.accelerator.buffers import MOST, SPLIT, ForwardInput, Tier
from moa.model.accelerator.weights import Weights
from moa.model.pages import PAGE, PagePool

if TYPE_CHECKING:
    from moa.model.accelerator.kernels import TritonKernels


class GraphDecoder:
    """Weights, kernels, and memory for the largest tier, which all tiers share."""

    def __init__(self, weights: Weights, pool: PagePool, kernels: TritonKernels) -> None:
        facts, self._weights, self._pool, self._kernels = weights.facts, weights, pool, kernels
        device, dtype = weights.embedding.device, weights.embedding.dtype
        splits = -(-pool.per_slot * PAGE // SPLIT)

        def memory(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(MOST, *shape, dtype=of, device=device)

        inner, middle = facts.heads * facts.head_dim, len(weights.layers[0].gate_up)
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
        return sum(one.nbytes for one in (*self._scratch, self._logits, self.best, self.choices, self.tapped))

    def run(self, forward: ForwardInput, tier: Tier) -> None:
        """Run the tokens in the buffers; `hidden`, and with a head `best` and `choices`, are the results."""
        kernels, weights, eps = self._kernels, self._weights, self._weights.facts.rms_norm_eps
        x, normed, more, hidden, qkv, query, attended, parts, sums, both, gated = (
            one[: tier.tokens] for one in self._scratch
        )
        torch.index_select(weights.embedding, 0, forward.ids, out=x)
        added = None
        for number, (layer, (keys, values)) in enumerate(zip(weights.layers, self._pool.layers, strict=True)):
            kernels.add_norm(x, added, layer.before, eps, normed)
            for at in (column for layer_number, column in self._taps if layer_number == number):
                self.tapped[: tier.tokens, at : at + x.shape[1]].copy_(x)
            kernels.product(normed, layer.qkv, layer.qkv_bias, qkv)
            kernels.rotate_and_store(forward, qkv, weights.turns, layer.head_norms, eps, query, keys, values)
            kernels.attend(forward, query, keys, values, layer.window, layer.scale, parts, sums, attended)
            kernels.product(attended, layer.out, layer.out_bias, more)
            kernels.add_norm(x, more, layer.between, eps, normed)
            kernels.product(normed, layer.gate_up, None, both)
            kernels.gate(both, gated)
            kernels.product(gated, layer.down, None, more)
            added = more
        kernels.add_norm(x, added, weights.norm, eps, hidden)
        if tier.head:
            judged, logits = normed, self._logits[: tier.tokens]
            torch.index_select(hidden, 0, forward.judged, out=judged)
            kernels.product(judged, weights.head, None, logits)
            torch.max(logits, -1, out=(self.best[: tier.tokens], self.choices[: tier.tokens]))

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head by the same product, outside of a graph: float32 `[n,vocab]`."""
        logits = torch.empty(len(hidden), len(self._weights.head), dtype=torch.float32, device=hidden.device)
        self._kernels.product(hidden, self._weights.head, None, logits)
        return logits
