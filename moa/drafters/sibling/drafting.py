"""Drafting in torch with a sibling whose layers differ: keys and values of several shapes, layers that
read those of an earlier one, running states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from moa.drafters.contract import DraftRequest
from moa.drafters.drafting import Level, TorchDrafting, causal_over
from moa.model.borrowed import Rows
from moa.model.slots import SlotPool
from moa.target.torch_target import Committed
from moa.tree import DraftTree

Running = list[Tensor]
"""The running states of all layers that keep any, `[rows, ...]` each."""


class MixedDrafting(TorchDrafting):
    """A pool of keys and values for each shape, and the running states of each slot.

    A running state cannot be cut: a slot's is that after the tokens it has read, and those after
    drafted tokens live as long as the draft. With any, drafts are chains.
    """

    reads_records = False
    record_lag = 0

    def __init__(self, drafter: Any, *, slots: int, capacity: int, scratch: int) -> None:
        """Allocate memory for `slots` texts of `capacity` tokens each, and `scratch` columns more
        for the tokens of a draft. `drafter` is a `SiblingDrafter`, whose module imports this
        one."""
        weight = drafter.weight
        super().__init__(drafter.vocab_size, weight.device)
        self.drafter = drafter
        shapes = [shape for _, shape in drafter.config.cached]
        self._pools = {
            (heads, width): SlotPool(
                layers=shapes.count((heads, width)),
                slots=slots,
                kv_heads=heads,
                capacity=capacity + scratch,
                head_dim=width,
                dtype=weight.dtype,
                device=weight.device,
            )
            for heads, width in dict.fromkeys(shapes)
        }
        self._shapes = shapes
        """Of each layer that keeps keys and values, the shape by which its pool is found."""
        self.pool = self._pools[shapes[0]]
        # Running states before the first token; empty where no layer keeps any.
        self._nothing = [
            torch.zeros((1, *shape), dtype=weight.dtype, device=weight.device)
            for shape in drafter.config.states
        ]
        self._read: dict[int, Running] = {}
        """By slot, the states after the tokens that it has read."""
        self._drafted: dict[int, Running] = {}
        """By slot, the states after the newest token of its draft."""

    def open(self) -> int:
        """Take an empty slot."""
        slots = [pool.acquire() for pool in self._pools.values()]
        self._read[slots[0]] = self._nothing
        return slots[0]  # the same in all pools, which are always taken and released together

    def close(self, slot: int) -> None:
        """Give a slot back."""
        for pool in self._pools.values():
            pool.release(slot)
        del self._read[slot]

    def missing(self, slot: int, start: int, stop: int) -> tuple[int, int] | None:
        """No records: it reads none."""
        return None

    def give(self, slot: int, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Take no records."""

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Read tokens that the target has run."""
        self.read(slot, tokens)

    @torch.inference_mode()
    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Compute the keys, values and running states of more tokens of a slot's text, and store
        them behind those of the tokens that it has read."""
        if len(tokens) == 0:
            return
        start = self.pool.lengths[slot]
        ids, positions = self.piece_of_text(tokens, start)
        past = {shape: pool.prefix(slot) for shape, pool in self._pools.items()}
        # No final state is wanted: where the last layers keep nothing, they run for one token
        # alone.
        last = torch.tensor([len(tokens) - 1], device=self.device)
        _, rows, self._read[slot] = self._step(
            ids,
            positions,
            causal_over(len(tokens), self.pool, start),
            self._by_layer(past),
            self._read[slot],
            queries=last,
        )
        for shape, rows_of_pool in self._by_pool(rows).items():
            self._pools[shape].append_layers(slot, rows_of_pool)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft a tree of guesses for each request. Where layers keep running states it is a chain,
        one guess after another: such a state belongs to one sequence, and cannot be shared by
        branches."""
        if self._nothing:
            requests = [
                replace(request, shape=replace(request.shape, breadth=1)) for request in requests
            ]
        self._drafted = {request.slot: self._read[request.slot] for request in requests}
        return super().draft(requests)

    def logits(self, level: Level) -> Tensor:
        """Logits `[B, T, V]` after each node of a level, the newest nodes of B drafts, by one step
        of the model. Keys, values and running states after the nodes are kept for the levels
        below."""
        past = {shape: level.past(pool) for shape, pool in self._pools.items()}
        # The states of several drafts are one batch.
        states = [self._drafted[slot] for slot in level.slots]
        running = [torch.cat(of_layer) for of_layer in zip(*states, strict=True)]
        hidden, rows, after = self._step(
            level.ids, level.positions, level.mask, self._by_layer(past), running
        )
        for shape, of_pool in self._by_pool(rows).items():
            level.keep(self._pools[shape], of_pool)
        for row, slot in enumerate(level.slots):
            self._drafted[slot] = [state[row : row + 1] for state in after]
        return self.drafter.logits(hidden)[..., : self.vocab_size]

    def _step(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        running: Running,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows], Running]:
        """Run the model over these tokens. Returns their final states, the keys and values that
        they add to each layer's cache, and the running states after them."""
        inputs = self.drafter.shared.inputs(ids, self.drafter.weight.dtype)
        return self.drafter.states(
            inputs["x"],
            positions,
            mask,
            past,
            per_layer=inputs.get("per_layer"),
            queries=queries,
            running=running,
        )

    def _by_layer(self, by_pool: dict[tuple[int, int], list[Rows]]) -> list[Rows]:
        """The rows of all pools in the order of the layers."""
        pools = {shape: iter(rows) for shape, rows in by_pool.items()}
        return [next(pools[shape]) for shape in self._shapes]

    def _by_pool(self, rows: Sequence[Rows]) -> dict[tuple[int, int], list[Rows]]:
        """Rows of all layers by the shape of their pool."""
        found: dict[tuple[int, int], list[Rows]] = {shape: [] for shape in self._pools}
        for shape, row in zip(self._shapes, rows, strict=True):
            found[shape].append(row)
        return found
