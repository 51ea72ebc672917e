"""Layers that keep a running state instead of keys and values: gated delta rules, short convolutions.

A running state cannot be cut where a draft was rejected. A slot's state is therefore that after its
committed tokens, never changed in place, and a forward only proposes others:

* of a convolution the inputs of the whole draft are kept: the state after any of its tokens is a
  part of them;
* of a recurrence the state after the last token is kept, and the layer's inputs. If only the first
  tokens are accepted, the layer computes these again from the state before the draft: what it would
  have computed if nothing else had been drafted.

Drafts are chains: a branch would need a state of its own for each node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moa.errors import UsageError
from moa.target.pages import PagePool


@dataclass(frozen=True)
class LayerState:
    """What one layer keeps of a sequence."""

    inputs: Tensor | None = None
    """The latest inputs of its convolution, `[channels, kernel]`."""
    memory: Tensor | None = None
    """The state of its recurrence, `[heads, key width, value width]`."""

    @property
    def nbytes(self) -> int:
        """Memory of both."""
        tensors = [tensor for tensor in (self.inputs, self.memory) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


States = dict[int, LayerState]
"""By layer; a layer that has run nothing yet is missing."""


class RecurrentPool(PagePool):
    """Pages of keys and values, and the running states of the other layers."""

    def __init__(self, *, slots: int, **how: Any) -> None:
        super().__init__(slots=slots, **how)
        self.states: list[States] = [{} for _ in range(slots)]
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        """The committed tokens of each slot."""
        self.behind: set[int] = set()
        """Slots that hold tokens of which no state is known: they must be run again."""
        self._proposed: dict[int, Callable[[int], States]] = {}
        """By slot, what its latest forward proposed."""

    @property
    def nbytes(self) -> int:
        """Memory of all pages, and of the states that are held."""
        state_bytes = 0
        for states in self.states:
            state_bytes += sum(state.nbytes for state in states.values())
        return super().nbytes + state_bytes

    def share(self, source: int, tokens: int) -> int:
        """Take a slot that begins with the first `tokens` of `source`. The state after all of them
        is at hand; in the middle none is, so fewer are run again at the slot's first forward."""
        self.check_taken(source)
        if tokens == self.lengths[source] and source not in self.behind:
            slot = super().share(source, tokens)
            self.states[slot] = dict(self.states[source])
        else:
            if not 0 < tokens <= self.lengths[source]:
                raise UsageError(
                    f"slot {source} holds {self.lengths[source]} tokens and cannot share {tokens}"
                )
            slot = self.acquire()
            try:
                self.begin([slot], [tokens])
            except BaseException:
                self.release(slot)  # whatever it is: else the slot is lost
                raise
            self.lengths[slot] = tokens
            self.behind.add(slot)
        self.texts[slot] = self.texts[source][:tokens]
        return slot

    def release(self, slot: int) -> None:
        """Release a slot, its pages and its states."""
        super().release(slot)
        self.states[slot] = {}
        self.texts[slot] = []
        self.behind.discard(slot)
        self._proposed.pop(slot, None)

    def propose(self, slot: int, after: Callable[[int], States]) -> None:
        """The latest forward of a slot: `after(n)` are the states after its first n tokens."""
        self._proposed[slot] = after

    def proposed(self, slot: int, tokens: int) -> States:
        """The states after the first `tokens` of the latest forward."""
        return self._proposed.pop(slot)(tokens)

    def commit(self, slot: int, nodes: Sequence[int]) -> None:
        """Append the first `len(nodes)` tokens of the latest forward."""
        super().commit(slot, nodes)
        after = self._proposed.pop(slot, None)
        if nodes and after is not None:
            self.states[slot] = after(len(nodes))

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that these tokens have been committed."""
        self.texts[slot] += tokens


class RunningStates:
    """The states of the rows of one forward, which have equally many tokens: what the library's
    layers read and write through its cache."""

    def __init__(self, before: Sequence[States]) -> None:
        self.before = before
        """The states of each row before the forward."""
        self.inputs: dict[int, Tensor] = {}
        """By layer, the convolution's inputs: those before the forward, then those of its tokens,
        `[rows, channels, kernel + tokens]`."""
        self.kernels: dict[int, int] = {}
        """By layer, how many inputs are kept."""
        self.memory: dict[int, Tensor] = {}
        """By layer, the recurrence's state after all tokens."""

    def latest_inputs(self, layer: int) -> Tensor | None:
        """The convolution's state of all rows; None where none has run anything."""
        return _stacked([states.get(layer, LayerState()).inputs for states in self.before])

    def latest_memory(self, layer: int) -> Tensor | None:
        """The recurrence's state of all rows; None where none has run anything."""
        return _stacked([states.get(layer, LayerState()).memory for states in self.before])

    def run_inputs(self, layer: int, new: Tensor, kernel: int) -> Tensor:
        """The convolution's inputs with those of the forward's tokens, `[rows, channels, tokens]`."""
        before = self.latest_inputs(layer)
        if before is None:
            before = new.new_zeros(*new.shape[:2], kernel)
        self.kernels[layer] = kernel
        self.inputs[layer] = torch.cat([before, new], dim=-1)
        return self.inputs[layer]

    def after(self, row: int, tokens: int) -> States:
        """The states of a row after its first `tokens`, with the recurrence's after all of them."""
        layers = {*self.inputs, *self.memory}
        return {layer: self._after(layer, row, tokens) for layer in layers}

    def _after(self, layer: int, row: int, tokens: int) -> LayerState:
        """One layer's state of a row after its first `tokens`."""
        inputs = None
        memory = None
        if layer in self.inputs:
            kept = self.inputs[layer][row, :, tokens : tokens + self.kernels[layer]]
            inputs = kept.clone()  # not a view that keeps the whole forward's inputs alive
        if layer in self.memory:
            memory = self.memory[layer][row].clone()
        return LayerState(inputs, memory)


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    """The states of all rows in one tensor, zeros for rows that have none yet; None if all have
    none."""
    known = [row for row in rows if row is not None]
    if not known:
        return None
    zeros = torch.zeros_like(known[0])
    return torch.stack([zeros if row is None else row for row in rows])
