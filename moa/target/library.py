"""The library's own model over the paged KV cache: the reference for all families, and the only way
for Gemma."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import eager_mask

from moa.config import TargetFacts
from moa.errors import UsageError
from moa.target.contract import ExpectedLoad
from moa.target.decoder import Forward
from moa.target.families import (
    RECURRENT_KINDS,
    MaskPlan,
    cached_layers,
    chains_only,
    recurrent_layers,
)
from moa.target.head import Head
from moa.target.layout import Group, Layout
from moa.target.pages import PagePool
from moa.target.recurrent import LayerState, RecurrentPool, RunningStates
from moa.target.rows import Row, RowBatch

# transformers 5 refuses any name with "sdpa" in it for models, such as Gemma 2, whose soft cap its
# own sdpa drops.
ATTENTION = "moa_tree"
"""The name under which the library knows our attention function."""
_CATCH_UP_AT_ONCE = 256
"""Tokens of a forward that runs a shared prefix again; bounds its memory."""


def tree_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [B,H,T,D] over `key`, `value` [B,Hkv,V,D] under an additive mask [B,1,T
    or G*T,V].

    For grouped-query attention with a mask, the library repeats keys and values. Here the query
    heads of a group are rows of one product with their shared key head, and the mask is repeated,
    once per forward: batched verification is about three times as fast on a CPU. The mask already
    includes the sliding window. A soft cap bends the scores before the mask, and a sink (`s_aux`, a
    number of each head) takes a share of the attention that goes nowhere: the fused kernel can do
    neither, so such models take the explicit product.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    query = query.reshape(batch, kv_heads, groups * length, width)
    if attention_mask is not None and attention_mask.shape[-2] != groups * length:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if softcap is None and s_aux is None:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        sinks = None
        if s_aux is not None:
            # One for each row of the product: `[B, Hkv, G*T, 1]`.
            of_heads = s_aux.to(query).view(1, kv_heads, groups, 1)
            sinks = of_heads.expand(batch, -1, -1, length).reshape(batch, kv_heads, -1, 1)
        if scaling is None:
            scaling = width**-0.5
        out = _explicit_attention(query, key, value, attention_mask, scaling, softcap, sinks)
    return out.reshape(batch, heads, length, width).transpose(1, 2), None


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of `query` `[B, Hkv, T, D]` step by step, for models that the fused kernel cannot
    compute: with a soft cap, which bounds the scores, or with sinks `[B, Hkv, T, 1]`, scores of no
    token, which take a share of the attention."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    # A sink's share has no value: it goes nowhere.
    return torch.matmul(shares[..., : key.shape[-2]], value)


# With the library's eager mask registered too, a model with this attention still runs plain
# forwards correctly.
AttentionInterface.register(ATTENTION, tree_sdpa)
AttentionMaskInterface.register(ATTENTION, eager_mask)


def cache_argument(module: nn.Module) -> str:
    """The name by which a model or a layer of the library takes its cache: `past_key_values`, and
    `cache` in later releases of transformers 5."""
    parameters = inspect.signature(module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def takes_cache(module: nn.Module) -> bool:
    """Whether a module of the library takes a cache of keys, values or running states."""
    return cache_argument(module) in inspect.signature(module.forward).parameters


class Taps:
    """Captures the inputs of chosen decoder layers, counted from 0, at every forward of the
    library's model."""

    def __init__(self, backbone: nn.Module, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._inputs: dict[int, Tensor] = {}
        for index in set(layers):
            layer: nn.Module = backbone.layers[index]  # type: ignore[index, assignment]
            layer.register_forward_pre_hook(_keeping(self._inputs, index), with_kwargs=True)

    def take(self) -> Tensor:
        """The inputs of the layers in the latest forward, side by side: `[B, T, taps * hidden]`."""
        return torch.cat([self._inputs[index] for index in self.layers], dim=-1)


def _keeping(inputs: dict[int, Tensor], layer: int) -> Any:
    """A hook for a layer's module that keeps its input states in `inputs` at every forward."""

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        inputs[layer] = states.detach()

    return keep


class LibraryDecoder:
    """Runs a batch as the library does, padded to its longest row; with layers that keep a running
    state, which padding would change, rows of one length at a time."""

    name = "library"
    nbytes = 0
    unprepared = False

    def __init__(
        self, model: Any, facts: TargetFacts, cache: PagePool, *, plan: MaskPlan, head: Head
    ) -> None:
        """Run a model of the library over this cache. `plan` says how it takes its masks, `head` is
        its LM head."""
        self._backbone = model.get_decoder()
        self._facts = facts
        self._cache = cache
        self._cache_argument = cache_argument(self._backbone)
        self._plan = plan
        self._head = head
        self._cached = {layer: place for place, layer in enumerate(cached_layers(model.config))}
        """The place in the pool of each layer that has keys and values."""
        self._running = _RunningLayers(self._backbone) if chains_only(model.config) else None
        self._taps: Taps | None = None
        self.logits = head.logits
        self._device = head.weight.device
        self.samples = self._device.type != "cpu"

    def check(self, batch: RowBatch) -> None:
        """Raise a `UsageError` for a draft that branches, if layers of this model keep a running
        state: that belongs to one sequence of tokens."""
        if self._running is None:
            return
        for b, slot in enumerate(batch.slots):
            if not batch.chain(b):
                raise UsageError(
                    f"slot {slot}: drafts for {self._facts.family} must be chains: its layers keep one "
                    "running state, which cannot branch"
                )

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers from now on."""
        self._taps = Taps(self._backbone, layers)

    def run(self, batch: RowBatch) -> Forward:
        """Compute the final states of a batch's tokens; their keys and values go to the pages of
        its slots. A slot that was begun with a part of another's text has no running state after
        it: these tokens are run again first."""
        if isinstance(self._cache, RecurrentPool):
            for slot in self._cache.behind.intersection(batch.slots):
                self._catch_up(self._cache, slot)
        return self._run(batch)

    def _run(self, batch: RowBatch) -> Forward:
        """Compute a batch whose slots all have their running states."""
        # A mask has a row for each query head that shares a key head. Where layers differ in that,
        # it is repeated in attention.
        repeats = 1
        if self._cache.uniform:
            repeats = self._facts.heads // self._facts.kv_heads
        layout = Layout(
            batch,
            self._cache,
            windows=self._plan.windows,
            repeats=repeats,
            together=self._running is None,
            same_size=self._running is not None,
        )
        ids = torch.from_numpy(batch.ids).to(self._device)
        # For each group the final states of its tokens, and the tapped ones or None.
        parts = [self._run_group(batch, ids, layout, group) for group in layout.groups]
        hidden, tapped = parts[0]
        if len(parts) > 1:
            tokens_by_group = torch.cat([_indices(group, len(ids)) for group in layout.groups])
            batch_order = tokens_by_group.argsort()
            hidden = torch.cat([part for part, _ in parts])[batch_order]
            if tapped is not None:
                tapped = torch.cat([part for _, part in parts if part is not None])[batch_order]
        return Forward(hidden=hidden, tapped=tapped, path=self.name)

    def _run_group(
        self, batch: RowBatch, ids: Tensor, layout: Layout, group: Group
    ) -> tuple[Tensor, Tensor | None]:
        """Run the library's model over one group of rows, as one padded batch. Returns the final
        states of its tokens `[tokens, hidden]`, and side by side the inputs of the layers that a
        drafter reads (taps), or None. New running states are only proposed to the cache: which of
        the tokens count is known when a commit takes them over."""
        shape = group.rows, group.width
        states = None
        if isinstance(self._cache, RecurrentPool):
            states = RunningStates([self._cache.states[batch.slots[b]] for b in group.members])
        view = _PageView(layout, group, self._cache, self._cached, states)
        out = self._backbone(
            input_ids=_padded(ids, group).view(shape),
            attention_mask=self._masks(group),
            position_ids=_padded(layout.positions, group).view(shape),
            use_cache=True,
            **{self._cache_argument: view},
        )
        if isinstance(self._cache, RecurrentPool) and self._running is not None and states:
            layers = self._running.take()
            for row, b in enumerate(group.members):
                self._cache.propose(
                    batch.slots[b], layers.after(states, row=row, tokens=batch.sizes[b])
                )
        hidden = _packed(out.last_hidden_state, group.real_places)
        if self._taps is None:
            return hidden, None
        return hidden, _packed(self._taps.take(), group.real_places)

    def _masks(self, group: Group) -> Any:
        """The masks of a group as the library's model takes them: one, or a dict with one for each
        kind of layer."""
        if not self._plan.per_layer_type:
            return group.masks["all"]
        # Nothing is padded in a group of one length, so a running state needs no mask.
        masks = dict(group.masks)
        for kind in masks:
            if kind in RECURRENT_KINDS:
                masks[kind] = None
        return masks

    def _catch_up(self, cache: RecurrentPool, slot: int) -> None:
        """Run the committed tokens of a slot again, in pieces from the beginning, so that the
        running states after them are known."""
        text = cache.texts[slot][: cache.lengths[slot]]
        cache.behind.discard(slot)
        cache.lengths[slot] = 0
        for start in range(0, len(text), _CATCH_UP_AT_ONCE):
            piece = text[start : start + _CATCH_UP_AT_ONCE]
            self._run(RowBatch.of([Row.chain(slot, piece)], self._facts.vocab_size))
            # All tokens count. They are committed already, so only the states are taken over.
            cache.states[slot] = cache.proposed(slot, len(piece))
            cache.lengths[slot] += len(piece)

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Make the head's copy: the first request would wait for it, or find no memory."""
        _ = self._head.wide

    def prepare_more(self) -> None:
        """All is made at the start."""


class _RunningLayers:
    """The modules of a model that keep a running state, and their inputs in the latest forward."""

    def __init__(self, backbone: Any) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._inputs: dict[int, Tensor] = {}
        for layer in recurrent_layers(backbone.config):
            # The part of the layer that takes the cache is the one with the state.
            module = next(part for part in backbone.layers[layer].children() if takes_cache(part))
            self._modules[layer] = module
            module.register_forward_pre_hook(_keeping(self._inputs, layer), with_kwargs=True)

    def take(self) -> _LayerInputs:
        """Return the modules with their inputs in the latest forward, and forget these."""
        inputs = dict(self._inputs)
        self._inputs.clear()
        return _LayerInputs(self._modules, inputs)


@dataclass(frozen=True)
class _LayerInputs:
    """Layers that keep a running state, and their inputs in one forward, `[rows, tokens, hidden]`."""

    modules: Mapping[int, nn.Module]
    inputs: Mapping[int, Tensor]

    def after(
        self, states: RunningStates, *, row: int, tokens: int
    ) -> Callable[[int], dict[int, LayerState]]:
        """Return a function of a number of tokens, which returns the running states of a row after
        so many of the `tokens` that it had in this forward, by layer. How many of them are accepted
        is known only after the forward, and the function is called then."""

        def after(accepted: int) -> dict[int, LayerState]:
            """The states of the row after its first `accepted` tokens."""
            result = states.after(row, accepted)
            if accepted == tokens:
                return result
            # The memories of recurrences in `result` are those after all tokens: compute them again,
            # from the state before the row, over the accepted ones alone.
            for layer in states.memory:
                recomputed = RunningStates([states.before[row]])
                module = self.modules[layer]
                inputs = self.inputs[layer][row : row + 1, :accepted]
                module(inputs, **{cache_argument(module): _StateView(recomputed)})
                result[layer] = LayerState(result[layer].inputs, recomputed.memory[layer][0])
            return result

        return after


class _StateView(Cache):
    """The part of a cache in which the library's layers keep running states."""

    def __init__(self, states: RunningStates | None) -> None:
        super().__init__(layers=[])
        self._states = states

    @property
    def states(self) -> RunningStates:
        """The states of the rows of this forward."""
        assert self._states is not None
        return self._states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always true. The library's layers ask whether a state may be wanted back: then they change
        none in place."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The latest inputs of a layer's convolution."""
        return self.states.latest_inputs(layer_idx)

    def update_conv_state(  # type: ignore[override]  # it is only called with the kernel's size
        self, conv_states: Tensor, layer_idx: int, *_: Any, conv_kernel_size: int, **__: Any
    ) -> Tensor:
        """The convolution's inputs, with those before the forward in front."""
        return self.states.run_inputs(layer_idx, conv_states, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a layer's recurrence before the forward."""
        return self.states.latest_memory(layer_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Tensor:
        """Propose the state after it."""
        self.states.memory[layer_idx] = recurrent_states
        return recurrent_states


class _PageView(_StateView):
    """The cache of one forward, with the interface that `transformers` layers need."""

    def __init__(
        self,
        layout: Layout,
        group: Group,
        pool: PagePool,
        places: Mapping[int, int],
        states: RunningStates | None = None,
    ) -> None:
        """View the cache for the rows of one group. `places` says for each layer where in the pool
        its keys and values are; `states` are the running states of layers that keep those."""
        super().__init__(states)
        self._layout = layout
        self._group = group
        self._pool = pool
        self._places = places

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values `[B,Hkv,T,D]` in the pool; returns all keys and
        values `[B,Hkv,V,D]` that the rows may attend to, these among them. The library's layers
        call it."""
        keys, values = self._pool.layers[self._places[layer_idx]]
        return self._store(keys, key_states), self._store(values, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always zero. The library would derive positions and masks from it; but rows differ in
        length, and every forward passes its own."""
        return 0

    def _store(self, memory: Tensor, new: Tensor) -> Tensor:
        """Write the group's new keys or values to their columns; returns what its rows may read."""
        group = self._group
        tokens = _packed(new.transpose(1, 2), group.real_places)
        memory.index_copy_(0, self._layout.columns[group.tokens], tokens)
        return group.read(memory)


def _indices(group: Group, tokens: int) -> Tensor:
    """The indices of a group's tokens in a batch of `tokens`."""
    if isinstance(group.tokens, Tensor):
        return group.tokens
    return torch.arange(tokens)[group.tokens]


def _packed(padded: Tensor, real_places: Tensor | None) -> Tensor:
    """Padded rows `[rows, width, ...]` as tokens one after another `[tokens, ...]`, without the
    padding; `real_places` says where it is not, and is None where there is none."""
    flat = padded.flatten(0, 1)
    if real_places is None:
        return flat
    return flat.index_select(0, real_places)


def _padded(packed: Tensor, group: Group) -> Tensor:
    """The tokens of a group, out of those of the batch, with padding: `[rows * width, ...]`."""
    if group.padded_tokens is None:
        return packed[group.tokens]
    return torch.index_select(packed, 0, group.padded_tokens)
