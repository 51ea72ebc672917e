"""Drafting in torch with a body: a language model that has a KV cache of its own, with or without
records, with or without layers of the target behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moa.drafters.captured_chains import ChainStep
from moa.drafters.contract import Drafter, Drafting
from moa.drafters.drafting import Level, TorchDrafting, causal_over, mask_over
from moa.manifest import KVHeads
from moa.model.borrowed import Rows
from moa.model.slots import SlotPool
from moa.target.torch_target import Committed

if TYPE_CHECKING:
    from moa.target.cuda.graphs import Graphs


class BodyModel(Drafter):
    """A drafter that is a language model: it reads tokens, and has a cache of its own."""

    def features(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        *records: Tensor,
    ) -> tuple[Tensor, list[Rows]]:
        """The final states of tokens `ids`, which the head reads, and the keys and values of each
        layer for them. `records` are keys, values and mask of the activation records, where the
        drafter reads any."""
        raise NotImplementedError

    def extend(
        self, ids: Tensor, positions: Tensor, mask: Tensor, past: Sequence[Rows]
    ) -> list[Rows]:
        """The body's rows of tokens that need no logits: a prompt, or accepted tokens."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of the head after these states."""
        return self.shared.logits(hidden)

    def drafting(
        self, *, slots: int, capacity: int, scratch: int = 256, graphs: Graphs | None = None
    ) -> Drafting:
        """The drafter at work in torch."""
        return BodyDrafting(self, slots=slots, capacity=capacity, scratch=scratch, graphs=graphs)


class BodyDrafting(TorchDrafting):
    """A drafter with a body, at work in torch. For each slot it keeps the keys and values of the
    body, and beside them what records bring: those of cross-attention, and the target's own in
    borrowed layers."""

    record_lag = 0
    """No token may lack its record: rows are written once, in order, and a late record has no place."""

    def __init__(
        self,
        drafter: BodyModel,
        *,
        slots: int = 1,
        capacity: int = 2048,
        scratch: int = 256,
        graphs: Graphs | None = None,
    ) -> None:
        """Allocate memory for `slots` texts of `capacity` tokens each. A slot has `scratch` columns
        more, for the tokens of a draft. With `graphs`, chains are drafted by captured graphs."""
        weight = drafter.weight
        super().__init__(drafter.vocab_size, weight.device)
        self.drafter = drafter
        spec = drafter.graph_spec

        def pool_of(layers: Sequence[KVHeads]) -> SlotPool:
            """Memory for the keys and values of these layers, which are alike."""
            return SlotPool(
                layers=len(layers),
                slots=slots,
                kv_heads=layers[0].kv_heads,
                capacity=capacity + scratch,
                head_dim=layers[0].head_dim,
                dtype=weight.dtype,
                device=weight.device,
            )

        self.layers = len(spec.cache) - spec.borrowed
        """How many layers the body has."""
        self.pool = pool_of(spec.cache[: self.layers])
        self.records = pool_of([spec.records]) if spec.records else None
        self.borrowed = pool_of(spec.cache[self.layers :]) if spec.borrowed else None
        self._layout = drafter.record_layout
        self.reads_records = self._layout is not None
        pools = (self.pool, self.records, self.borrowed)
        self._pools = [pool for pool in pools if pool is not None]
        self.capture(graphs)

    def open(self) -> int:
        """Take an empty slot."""
        slots = [pool.acquire() for pool in self._pools]
        return slots[0]  # the same in all pools, which are always taken and released together

    def close(self, slot: int) -> None:
        """Give a slot back."""
        for pool in self._pools:
            pool.release(slot)

    @torch.inference_mode()
    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Read tokens that the target has run: store the activation records that are made of what
        it `committed` for them, and the body's own keys and values."""
        if self._layout is not None:
            self.give(slot, committed.start, *self.drafter.records([committed]))
        self.read(slot, tokens)

    def missing(self, slot: int, start: int, stop: int) -> tuple[int, int] | None:
        """The positions within start..stop whose activation records a slot lacks. Records are
        appended in order, so these are all from the first missing one on. None if it lacks none, or
        if the drafter reads none."""
        if self.records is None:
            return None
        first = max(start, self.records.lengths[slot])
        if first >= stop:
            return None
        return first, stop

    @torch.inference_mode()
    def give(self, slot: int, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Store activation records, `[n, count, width]` each, of a slot's positions from `start`
        on. Positions before it that have none get zeros."""
        assert self._layout is not None
        assert self.records is not None
        layers: list[Rows] = []
        for key, value in zip(self._layout.split(keys), self._layout.split(values), strict=True):
            layers.append((_heads_first(key), _heads_first(value)))
        # A record holds cross-attention's rows first, then those of each borrowed layer.
        own, *borrowed = layers
        self._append(self.records, slot, start, [own])
        if self.borrowed is not None:
            self._append(self.borrowed, slot, start, borrowed)

    def _append(self, pool: SlotPool, slot: int, start: int, layers: Sequence[Rows]) -> None:
        """Append keys and values `[heads, n, width]` of each layer, at position `start`; missing
        rows before it are zero."""
        keys = torch.stack([key for key, _ in layers])
        values = torch.stack([value for _, value in layers])
        missing = start - pool.lengths[slot]
        if missing > 0:  # a pool is appended to without gaps
            zeros = keys.new_zeros(*keys.shape[:2], missing, keys.shape[3])
            keys = torch.cat([zeros, keys], 2)
            values = torch.cat([zeros, values], 2)
        pool.append(slot, keys.to(pool.k), values.to(pool.v))

    @torch.inference_mode()
    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Compute the body's keys and values of more tokens of a slot's text, and append them to
        its cache. Their activation records, if the drafter reads any, must be in the slot
        already."""
        if len(tokens) == 0:
            return
        start = self.pool.lengths[slot]
        ids, positions = self.piece_of_text(tokens, start)
        mask = causal_over(len(tokens), self.pool, start)
        rows = self.drafter.extend(ids, positions, mask, self.pool.prefix(slot))
        self.pool.append_layers(slot, rows)

    def logits(self, level: Level) -> Tensor:
        """Logits `[B, T, vocab]` after each node of a level, the drafted tokens of one depth in B
        trees, by one step of the drafter. The nodes' keys and values are kept for the levels
        below."""
        past = level.past(self.pool)
        records: list[Tensor] = []
        if self.borrowed is not None:
            past += level.past(self.borrowed)
        if self.records is not None:
            # Records exist only for tokens that the target has run: for no node of the draft.
            view = max(1, *level.lengths)  # attention needs one column at least
            visible = np.arange(view) < np.array(level.lengths)[:, None]
            keys, values = level.past(self.records, view)[0]
            records = [keys, values, mask_over(visible[:, None, None], self.pool)]
        hidden, rows = self.drafter.features(level.ids, level.positions, level.mask, past, *records)
        level.keep(self.pool, rows[: self.layers])
        if self.borrowed is not None:
            level.keep(self.borrowed, rows[self.layers :])
        return self.drafter.logits(hidden)[..., : self.vocab_size]

    # ---- chains as graphs

    @property
    def draft_pools(self) -> list[SlotPool]:
        """The pools into which drafted tokens are written: not that of the records, which only
        tokens have that the target has run."""
        if self.borrowed is None:
            return [self.pool]
        return [self.pool, self.borrowed]

    def chain_step(self, step: ChainStep) -> Tensor:
        """Logits `[rows, vocab]` after the newest token of each chain, one drafted sequence, with
        the activation records that were there when the chains began. It may use only kernels over
        fixed memory, because the step is captured as a graph."""
        past = step.past(self.pool)
        if self.borrowed is not None:
            past += step.past(self.borrowed)
        records: list[Tensor] = []
        if self.records is not None:
            records = [*step.past(self.records)[0], step.mask(step.before(step.known))]
        hidden, rows = self.drafter.features(
            step.token.unsqueeze(1), step.place.unsqueeze(1), step.visible(), past, *records
        )
        step.keep(self.pool, rows[: self.layers])
        if self.borrowed is not None:
            step.keep(self.borrowed, rows[self.layers :])
        return self.drafter.logits(hidden)[:, 0, : self.vocab_size]


def _heads_first(rows: NDArray[Any]) -> Tensor:
    """Rows `[n, heads, width]` as a tensor `[heads, n, width]`."""
    return torch.from_numpy(np.ascontiguousarray(rows.swapaxes(0, 1)))
