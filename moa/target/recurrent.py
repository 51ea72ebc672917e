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
        """Begin with empty slots; `how` is passed on for the pages of keys and values."""
        super().__init__(slots=slots, **how)
        self.states: list[States] = [{} for _ in range(slots)]
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        """The committed tokens of each slot."""
        self.behind: set[int] = set()
        """Slots that hold tokens of which no state is known: they must be run again."""
        self._proposed: dict[int, Callable[[int], States]] = {}
        """For each slot the function of its latest forward: of a number of tokens, it returns the
        states after so many of the forward's first tokens."""

    @property
    def nbytes(self) -> int:
        """Memory of all pages, and of the states that are held."""
        state_bytes = 0
        for states in self.states:
            state_bytes += sum(state.nbytes for state in states.values())
        return super().nbytes + state_bytes

    def share(self, source: int, tokens: int) -> int:
        """Take an empty slot, and let it begin with the first `tokens` of the slot `source`.

        If these are all of them, it shares pages and running states. A state is known only after
        the last token of a text: for fewer tokens the slot gets pages of its own, and its tokens
        are run again at its first forward.
        """
        self.check_taken(source)
        if tokens == self.lengths[source] and source not in self.behind:
            slot = super().share(source, tokens)
            self.states[slot] = dict(self.states[source])
        else:
            slot = self._acquire_to_run_again(source, tokens)
        self.texts[slot] = self.texts[source][:tokens]
        return slot

    def _acquire_to_run_again(self, source: int, tokens: int) -> int:
        """Take an empty slot with room for the first `tokens` of the slot `source`, and note that
        it is `behind`: no running state of it is known, so its tokens must be run again before
        anything else."""
        self.check_shareable(source, tokens)
        slot = self.acquire()
        try:
            self.begin([slot], [tokens])
        except BaseException:
            self.release(slot)  # whatever it is: else the slot is lost
            raise
        self.lengths[slot] = tokens
        self.behind.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Release a slot, its pages and its states."""
        super().release(slot)
        self.states[slot] = {}
        self.texts[slot] = []
        self.behind.discard(slot)
        self._proposed.pop(slot, None)

    def propose(self, slot: int, after: Callable[[int], States]) -> None:
        """Keep how the states after a slot's latest forward are found: `after(n)` returns those
        after its first n tokens, once it is known how many are accepted."""
        self._proposed[slot] = after

    def proposed(self, slot: int, tokens: int) -> States:
        """Return the states after the first `tokens` of a slot's latest forward, and forget that
        forward."""
        after = self._proposed.pop(slot)
        return after(tokens)

    def commit(self, slot: int, nodes: Sequence[int]) -> None:
        """Append the first `len(nodes)` tokens of a slot's latest forward, and take over the states
        after them."""
        super().commit(slot, nodes)
        after = self._proposed.pop(slot, None)
        if nodes and after is not None:
            self.states[slot] = after(len(nodes))

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that these tokens have been committed to a slot: they may have to be run again."""
        self.texts[slot] += tokens


class RunningStates:
    """The states of the rows of one forward, which have equally many tokens: what the library's
    layers read and write through its cache."""

    def __init__(self, before: Sequence[States]) -> None:
        """Begin a forward over rows that have these states before it; what its layers compute is
        noted here, and changes nothing that was committed."""
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
        """The latest inputs of a layer's convolution before the forward, `[rows, channels, kernel]`;
        None if no row has run anything yet."""
        return _stacked([states.get(layer, LayerState()).inputs for states in self.before])

    def latest_memory(self, layer: int) -> Tensor | None:
        """The memory of a layer's recurrence before the forward, `[rows, heads, key width, value
        width]`; None if no row has run anything yet."""
        return _stacked([states.get(layer, LayerState()).memory for states in self.before])

    def run_inputs(self, layer: int, new: Tensor, kernel: int) -> Tensor:
        """Note the `new` inputs `[rows, channels, tokens]` of a layer's convolution in this forward.
        Returns them with the latest ones before it in front: `[rows, channels, kernel + tokens]`."""
        before = self.latest_inputs(layer)
        if before is None:
            before = new.new_zeros(*new.shape[:2], kernel)
        self.kernels[layer] = kernel
        self.inputs[layer] = torch.cat([before, new], dim=-1)
        return self.inputs[layer]

    def after(self, row: int, tokens: int) -> States:
        """Return the states of a row by layer: of a convolution after the row's first `tokens`, of
        a recurrence after all tokens of the forward."""
        layers = {*self.inputs, *self.memory}
        return {layer: self._after(layer, row, tokens) for layer in layers}

    def _after(self, layer: int, row: int, tokens: int) -> LayerState:
        """The state of one layer of a row: the latest inputs of its convolution after the row's
        first `tokens`, and the memory of its recurrence after all tokens of the forward."""
        inputs = None
        memory = None
        if layer in self.inputs:
            # The first `kernel` inputs are from before the forward, so after n of its tokens the
            # latest `kernel` ones begin at n.
            latest = self.inputs[layer][row, :, tokens : tokens + self.kernels[layer]]
            inputs = latest.clone()  # not a view that keeps the whole forward's inputs alive
        if layer in self.memory:
            memory = self.memory[layer][row].clone()
        return LayerState(inputs, memory)


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    """The states of all rows as one tensor `[rows, ...]`, with zeros for rows that have run nothing
    yet; None if no row has run anything."""
    known = [row for row in rows if row is not None]
    if not known:
        return None
    zeros = torch.zeros_like(known[0])
    return torch.stack([zeros if row is None else row for row in rows])
