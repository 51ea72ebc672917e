"""What a drafter takes of a Hugging Face model, frozen: the target's embedding, head and their
scales, and its last layers (TLI); or a small model as the body."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moa.errors import ConfigError
from moa.model.gated_delta import GatedDelta
from moa.target.families import (
    layer_memory,
    layer_windows,
    per_layer_width,
    refuse_as_sibling,
    scaling_of,
)
from moa.target.library import ATTENTION, cache_argument
from moa.target.rope import settle_rope

Rows = tuple[Tensor, Tensor]
"""Keys and values, `[B, kv_heads, T, D]` each."""


@dataclass(frozen=True)
class SharedWeights:
    """The target's embedding and head; tied targets give the same tensor twice."""

    embedding: Tensor
    head: Tensor
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    """What the head's products are multiplied with, before the cap."""
    bias: Tensor | None = None
    """Added to the logits of a part of a head."""
    per_layer: Tensor | None = None
    """What each token brings to the layers beside its embedding, `[V, layers * width]`."""
    per_layer_scale: float = 1.0

    def embed(self, ids: Tensor) -> Tensor:
        """The target's token embeddings, scaled as the target scales them."""
        embedded = F.embedding(ids, self.embedding)
        if self.embedding_scale == 1.0:
            return embedded
        return embedded * self.embedding_scale

    def inputs(self, ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """What the layers read of these tokens, by the names of the graph's inputs."""
        found = {"x": self.embed(ids).to(dtype)}
        if self.per_layer is not None:
            rows = F.embedding(ids, self.per_layer) * self.per_layer_scale
            found["per_layer"] = rows.to(dtype)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of the target's head after these states."""
        logits = F.linear(hidden.to(self.head.dtype), self.head)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    @classmethod
    def of(cls, model: PreTrainedModel) -> SharedWeights:
        """The embedding and head of a loaded model, without a copy."""
        scaling = scaling_of(model.config)
        return cls(
            embedding=_weight(model.get_input_embeddings()),
            head=_weight(model.get_output_embeddings()),
            embedding_scale=scaling.embedding,
            logit_softcap=scaling.softcap,
            logit_scale=scaling.logits,
        )


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


class _Past:
    """The minimal cache for a `transformers` attention layer: joins past keys and values with the
    new ones, and keeps those."""

    def __init__(self, past: Rows) -> None:
        self.past = past
        self.new: Rows = past
        """The rows of the latest forward; the past before the first one."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Rows:
        """Take the new rows, and return them after the past ones: a layer calls this."""
        self.new = (key, value)
        past_key, past_value = self.past
        all_keys = torch.cat([past_key.to(key), key], dim=-2)
        all_values = torch.cat([past_value.to(value), value], dim=-2)
        return all_keys, all_values


class _Running:
    """The same for a layer that keeps running states: the latest inputs of its convolution, and
    perhaps the memory of a recurrence."""

    def __init__(self, past: Sequence[Tensor]) -> None:
        self.inputs, *memory = past
        self.memory = tuple(memory)

    def is_recording_past(self, layer: int) -> bool:
        """Yes: no state is changed in place."""
        return True

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor:
        """The state before the step."""
        return self.inputs

    def update_conv_state(
        self, new: Tensor, layer: int, *_: Any, conv_kernel_size: int, **__: Any
    ) -> Tensor:
        """All inputs `[B, channels, kernel + T]`; keeps the last ones."""
        whole = torch.cat([self.inputs.to(new), new], dim=-1)
        self.inputs = whole[..., -conv_kernel_size:]
        return whole

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor:
        """The memory before the step."""
        (memory,) = self.memory
        return memory

    def update_recurrent_state(self, memory: Tensor, layer: int) -> None:
        """The memory after it."""
        self.memory = (memory,)

    @property
    def new(self) -> tuple[Tensor, ...]:
        """The states after the step."""
        return (self.inputs, *self.memory)


@dataclass
class BesideStates:
    """What layers read beside the states of the layer before them, in one step."""

    per_layer: Tensor | None = None
    """What the tokens bring to each layer, `[B, T, layers, width]`."""
    rows: dict[str, Rows] = field(default_factory=dict)
    """By kind of layer, the rows that later layers of the kind read instead of their own. The
    library's layers put them there."""

    def select(self, queries: Tensor) -> None:
        """Keep of the tokens those of `queries` alone; all rows stay."""
        if self.per_layer is not None:
            self.per_layer = self.per_layer.index_select(1, queries)


class PerLayerInputs(nn.Module):
    """What each token brings to each layer (Gemma 4): a row of a table of its own, and a product of
    its embedding."""

    def __init__(self, backbone: Any) -> None:
        """Use the modules of a model's decoder, without a copy."""
        super().__init__()
        table: Any = backbone.embed_tokens_per_layer
        self.table = cast(nn.Embedding, table)
        self.table_scale = float(table.scalar_embed_scale)
        self.projection = cast(nn.Linear, backbone.per_layer_model_projection)
        self.norm = cast(nn.Module, backbone.per_layer_projection_norm)
        self._projection_scale = float(backbone.per_layer_model_projection_scale)
        self._scale = float(backbone.per_layer_input_scale)
        self._layers = len(backbone.layers)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """`[B, T, layers, width]`, of embedded tokens and their rows of the table."""
        projected = self.projection(x) * self._projection_scale
        by_layer = self.norm(projected.unflatten(-1, (self._layers, -1)))
        brought: Tensor = (by_layer + rows.unflatten(-1, (self._layers, -1))) * self._scale
        return brought


class BorrowedLayers(nn.Module):
    """The last `count` decoder layers of a model, its rotary embedding and its final norm.

    With TLI, a layer's past contains the target's own keys and values for verified tokens, and the
    drafter's for drafted ones. Sliding windows are not applied: a drafter may look further than its
    target does, and drafts are short.
    """

    def __init__(self, backbone: nn.Module, count: int) -> None:
        """Use the last `count` layers of a model's decoder, without a copy, and freeze them."""
        super().__init__()
        self.layers = nn.ModuleList(list(backbone.layers)[-count:])  # type: ignore[arg-type]
        # LFM2 calls its last norm so, though it is no norm of embeddings.
        last_norm = backbone.norm if hasattr(backbone, "norm") else backbone.embedding_norm
        self.norm = cast(nn.Module, last_norm)
        self._rotary = _rotary_of(backbone)
        self._cache_argument = cache_argument(self.layers[0])
        self._takes_shared_rows = (
            "shared_kv_states" in inspect.signature(self.layers[0].forward).parameters
        )
        kinds = getattr(backbone.config, "layer_types", None)
        if not kinds:
            kinds = [None] * len(backbone.layers)  # type: ignore[arg-type]
        self._kinds: list[str | None] = list(kinds[-count:])
        """The kind of each layer, such as "sliding_attention", by which some families rotate."""
        self.requires_grad_(False)

    def __len__(self) -> int:
        return len(self.layers)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor, past: Sequence[Rows]
    ) -> tuple[Tensor, list[Rows]]:
        """Run all layers over states `x` `[B, T, hidden]`. `past` has the keys and values of each
        layer for the tokens before. Returns the states after the final norm, and each layer's keys
        and values of these tokens."""
        new_rows = []
        for index, layer_past in enumerate(past):
            x, layer_rows = self.layer(index, x, positions, mask, layer_past)
            new_rows.append(layer_rows)
        return self.norm(x), new_rows

    def layer(
        self,
        index: int,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Rows,
        beside: BesideStates | None = None,
    ) -> tuple[Tensor, Rows]:
        """Run one layer; returns the states after it, and its keys and values of these tokens."""
        cache = _Past(past)
        return self._run(index, x, positions, mask, cache, beside), cache.new

    def reading_layer(
        self, index: int, x: Tensor, positions: Tensor, mask: Tensor, beside: BesideStates
    ) -> Tensor:
        """Run a layer that has no keys and values of its own: it attends over those of an earlier
        layer, which are in `beside`. Returns the states after it."""
        return self._run(index, x, positions, mask, None, beside)

    def running_layer(
        self, index: int, x: Tensor, positions: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one layer with running states over a chain of tokens. `past` are its states before the
        chain; returns the hidden states after the layer, and its own after the last token."""
        cache = _Running(past)
        return self._run(index, x, positions, None, cache), cache.new

    def _run(
        self,
        index: int,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Any,
        beside: BesideStates | None = None,
    ) -> Tensor:
        """Run one of the library's layers, with the arguments that its family takes for rotary
        positions, cache, and what later layers share; returns the states after it."""
        arguments = self._rotary(x, positions, self._kinds[index]) | {self._cache_argument: cache}
        if self._takes_shared_rows:
            beside = beside or BesideStates()
            arguments["shared_kv_states"] = beside.rows
            if beside.per_layer is not None:
                arguments["per_layer_input"] = beside.per_layer[:, :, index]
        out = self.layers[index](x, attention_mask=mask, position_ids=positions, **arguments)
        states: Tensor = out[0] if isinstance(out, tuple) else out  # some versions return a tuple
        return states


class Sibling(nn.Module):
    """A small causal language model as a drafter's body: its layers and final norm, its embedding
    and head."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Use the modules of a loaded model, without a copy, and freeze them; an
        `UnsupportedModelError` for a model that cannot be a drafter."""
        super().__init__()
        refuse_as_sibling(model.config)
        backbone = model.get_decoder()
        assert isinstance(backbone, nn.Module)
        settle_rope(backbone, longest=0)  # drafts are best in texts of usual length
        self.decoder = BorrowedLayers(backbone, len(backbone.layers))  # type: ignore[arg-type]
        self.embedding = cast(nn.Embedding, model.get_input_embeddings())
        head = cast(nn.Linear, model.get_output_embeddings())
        is_tied = head.weight is self.embedding.weight
        self.head = None if is_tied else head
        self._scaling = scaling_of(model.config)
        self.memory = layer_memory(model.config)
        """What its layers keep of a text."""
        self.windows = layer_windows(model.config)
        """Tokens that a layer sees, where it looks through a sliding window."""
        self.per_layer = PerLayerInputs(backbone) if per_layer_width(model.config) else None
        for layer in self.decoder.layers:
            # The library's own loops over tokens, which an exported graph may not.
            if isinstance(own := getattr(layer, "linear_attn", None), nn.Module):
                layer.linear_attn = GatedDelta(own)
        self.requires_grad_(False)

    @classmethod
    def empty(cls, config: Mapping[str, Any]) -> Sibling:
        """A model of the shape that a `config.json` describes, with random weights: its own are
        loaded later. A `ConfigError` where that is no causal language model."""
        values = dict(config)
        try:
            shape = AutoConfig.for_model(values.pop("model_type"), **values)
            return cls(AutoModelForCausalLM.from_config(shape, attn_implementation=ATTENTION))
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"drafter config: the body is no causal language model: {error}"
            ) from None

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads of a layer, and their width: of a model whose layers are all alike."""
        (heads,) = {*self.memory.cached.values()}
        return heads

    @property
    def shared(self) -> SharedWeights:
        """Its embedding and head, which are never trained."""
        head = self.embedding if self.head is None else self.head
        table = None
        table_scale = 1.0
        if self.per_layer is not None:
            table = self.per_layer.table.weight.detach()
            table_scale = self.per_layer.table_scale
        return SharedWeights(
            embedding=self.embedding.weight.detach(),
            head=head.weight.detach(),
            embedding_scale=self._scaling.embedding,
            logit_softcap=self._scaling.softcap,
            logit_scale=self._scaling.logits,
            per_layer=table,
            per_layer_scale=table_scale,
        )


def _rotary_of(backbone: nn.Module) -> Callable[[Tensor, Tensor, str | None], dict[str, Any]]:
    """Return a function of states, positions and a layer's kind, which returns the arguments that
    tell a layer of this model its rotary positions. Families with two kinds of layers rotate each
    kind in its own way, and name that differently in transformers 4 and 5."""
    by_kind: Any = getattr(backbone, "rotary_embs", None)
    if by_kind is not None:  # OLMo 3 in transformers 4
        return lambda x, positions, kind: {"position_embeddings": by_kind[kind](x, positions)}
    rotary: Any = backbone.rotary_emb
    local: Any = getattr(backbone, "rotary_emb_local", None)
    if local is not None:  # Gemma 3 in transformers 4: a layer takes of both what it needs
        return lambda x, positions, _: {
            "position_embeddings_global": rotary(x, positions),
            "position_embeddings_local": local(x, positions),
        }
    if "layer_type" in inspect.signature(rotary.forward).parameters:  # transformers 5
        return lambda x, positions, kind: {"position_embeddings": rotary(x, positions, kind)}
    return lambda x, positions, _: {"position_embeddings": rotary(x, positions)}
