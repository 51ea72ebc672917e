"""The Mixture-of-Attentions drafter: one definition for training, serving and export.

    target's K, V of one token, all layers ── LSA ── mean ── Ekv2E ── k_proj, v_proj ──► activation record
    token ids ── embedding ── body: N causal layers ── CA over records ── [borrowed target layers] ── head ──► logits

The body is a small causal language model with its own KV cache. Without records, cross-attention (CA) is skipped, and
the drafter is exactly that language model. The paper's drafter is the case of one layer (SA). `project` runs beside the
target and `step` on the device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moa.config import TargetFacts
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.graph import AttentionGraph
from moa.drafters.body_drafting import BodyModel
from moa.drafters.contract import RecordPair, randomize, to_numpy
from moa.drafters.graph import GraphSpec
from moa.drafters.sibling.model import refuse_another_tokenizer
from moa.errors import UnsupportedModelError
from moa.manifest import KVHeads
from moa.model.blocks import Block, RMSNorm, masked, rotary, rotate
from moa.model.borrowed import BorrowedLayers, Rows, SharedWeights, Sibling
from moa.model.checkpoint import backbone_of, filled, stored_weights
from moa.records import RecordLayout
from moa.target.loading import LoadedModel
from moa.target.torch_target import Committed


class AttentionDrafter(BodyModel):
    """The body, CA, LSA and Ekv2E are trained; everything else is the target's."""

    name = "attention"
    config: AttentionConfig
    record_lag = 8
    """To make one record takes as long as to make eight."""

    def __init__(
        self,
        config: AttentionConfig,
        shared: SharedWeights,
        borrowed: BorrowedLayers | None = None,
        body: Sibling | None = None,
    ) -> None:
        """Make the layers of this shape, whose weights are made or loaded later. `shared` are the
        target's embedding and head, `borrowed` the target's last layers if the config says that it
        borrows some, and `body` a language model that is the body, if it is one."""
        super().__init__()
        borrowed_count = 0 if borrowed is None else len(borrowed)
        if config.tli != borrowed_count:
            raise ValueError(f"a drafter of TLI={config.tli} needs that many borrowed layers")
        self.config = config
        if not config.scaled_embedding:
            shared = replace(shared, embedding_scale=1.0)
        # The paper's drafter has one layer, `self_attention`; it and cross-attention keep the names
        # of its published weights.
        if config.body is None:
            self.self_attention = _block(config, "self_attention")
            self.more_self_attention = nn.ModuleList(
                _block(config, "self_attention") for _ in range(config.layers - 1)
            )
            if config.final_norm:
                self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        else:
            self.body = body or Sibling.empty(config.body)
        if config.use_ca:
            self.cross_attention = _block(config, "cross_attention")
            if config.use_lsa:
                self.layer_self_attention = _block(
                    config, "layer_self_attention", config.kv_hidden_size
                )
                self.Ekv2E = nn.Linear(config.kv_hidden_size, config.hidden_size)
            if config.final_state or not config.use_lsa:
                self.final_state = nn.Linear(config.state_size, config.hidden_size, bias=False)
        # Kept outside the module tree: not trained, not saved, and shared with the target without a
        # copy.
        self._borrowed_from_target = (shared, borrowed)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """Tokens that it and the target know: a body with its own head may have a different
        padding."""
        return min(self.config.vocab_size, len(self.shared.head))  # a head has a row for each token

    @property
    def shared(self) -> SharedWeights:  # type: ignore[override]
        """Embedding and head: the target's, or those of a body that has its own."""
        return self._borrowed_from_target[0] if self.config.body is None else self.body.shared

    @property
    def borrowed(self) -> BorrowedLayers | None:
        """The target's last layers, with TLI > 0."""
        return self._borrowed_from_target[1]

    # ---- beside the target ------------------------------------------------------------------------------------

    def activations(self, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """The activation of each token, `[..., hidden_size]`: what the drafter takes from the
        target about it.

        `keys` and `values` are the target's cache, post-RoPE, `[layers, ..., kv_heads, head_dim]`;
        `hidden` is its final, normed state. Layer self-attention (LSA) attends over the target's
        layers; each token is processed independently. What it makes and the final state are added,
        where the config has both.
        """
        parts = []
        if self.config.use_lsa:
            parts.append(self.Ekv2E(self._layer_self_attention(keys, values)))
        if self.config.final_state or not self.config.use_lsa:
            parts.append(self.final_state(hidden))
        return torch.stack(parts).sum(0)

    def _layer_self_attention(self, keys: Tensor, values: Tensor) -> Tensor:
        """The output of layer self-attention (LSA) for each token, `[..., kv_hidden_size]`. Its
        sequence is not the text but the target's layers: one element is a layer's key and value of
        the token, and the number of the layer is its position. The mean over layers is returned."""
        lsa = self.layer_self_attention
        layers = keys.shape[0]
        token_shape = keys.shape[1:-2]
        # `[tokens, layers, kv_hidden_size]`. Head by head: that head's key, then its value.
        by_layer = torch.cat([keys, values], dim=-1).flatten(-2)
        x = by_layer.flatten(1, -2).transpose(0, 1)
        normed = lsa.input_layernorm(x)
        positions = torch.arange(layers, device=x.device)
        cos, sin = rotary(positions, lsa.self_attn.head_dim, self.config.rope_theta)
        query = rotate(lsa.self_attn.query(normed), cos, sin)
        key = rotate(lsa.self_attn.key(normed), cos, sin)
        x = x + lsa.self_attn.attend(query, key, lsa.self_attn.value(normed), None)
        return lsa.feed_forward(x).mean(dim=1).unflatten(0, token_shape)

    def keys_and_values(self, activations: Tensor, positions: Tensor) -> Rows:
        """The keys, rotated at their absolute positions, and the values of cross-attention (CA) for
        tokens with these activations: `[B, record_heads, T, D]` each."""
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        attention = self.cross_attention.self_attn
        normed = self.cross_attention.input_layernorm(activations)
        return rotate(attention.key(normed), cos, sin), attention.value(normed)

    def project(self, keys: Tensor, values: Tensor, hidden: Tensor, positions: Tensor) -> Rows:
        """The keys and values of cross-attention for n tokens, `[n, kv_heads, head_dim]` each:
        their activation records. `keys` and `values` are the target's cache rows of these tokens,
        `hidden` its final states."""
        activations = self.activations(keys, values, hidden)
        key, value = self.keys_and_values(activations.unsqueeze(0), positions.unsqueeze(0))
        return key[0].transpose(0, 1), value[0].transpose(0, 1)

    @torch.inference_mode()
    def records(self, pieces: Sequence[Committed]) -> RecordPair:
        """Activation records of n tokens that the target has run, as two arrays `[n, count, width]`
        of `record_layout`: cross-attention's keys and values, and after them the target's own in
        the layers that the drafter borrows."""
        kv = [piece.kv for piece in pieces]
        keys = torch.cat([key for key, _ in kv], 1)
        values = torch.cat([value for _, value in kv], 1)
        hidden = torch.cat([piece.hidden for piece in pieces])
        positions = torch.cat([piece.positions for piece in pieces])
        own_key, own_value = self.project(keys, values, hidden, positions)
        first_borrowed = len(keys) - self.config.tli
        key_parts = [own_key, *keys[first_borrowed:]]
        value_parts = [own_value, *values[first_borrowed:]]
        layout = self.record_layout
        assert layout is not None  # only a drafter with cross-attention is asked for records
        return (
            layout.join([to_numpy(part) for part in key_parts]),
            layout.join([to_numpy(part) for part in value_parts]),
        )

    @property
    def record_layout(self) -> RecordLayout | None:
        """CA's heads, then the target's in each borrowed layer; None without CA."""
        config = self.config
        if not config.use_ca:
            return None
        own = (config.record_heads, config.head_dim)
        borrowed = (config.target_kv_heads, config.target_head_dim)
        return RecordLayout((own, *[borrowed] * config.tli))

    @property
    def bundle_kind(self) -> Any:
        """Without records it is independent of its target."""
        return "moa" if self.config.use_ca else "independent"

    @property
    def graph_spec(self) -> GraphSpec:
        """Inputs and outputs of the exported graph. Its layers with a cache are the body's, then
        the target's last ones that it borrows (`tli`), whose rows come with the records."""
        config = self.config
        heads, width = self.cache_heads
        own = KVHeads(kv_heads=heads, head_dim=width)
        borrowed = KVHeads(kv_heads=config.target_kv_heads, head_dim=config.target_head_dim)
        records = KVHeads(kv_heads=config.record_heads, head_dim=config.head_dim)
        return GraphSpec(
            hidden_size=config.hidden_size,
            cache=(*[own] * config.layers, *[borrowed] * config.tli),
            records=records if config.use_ca else None,
            borrowed=config.tli,
        )

    @torch.inference_mode()
    def example_records(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Records, the keys and values of cross-attention (CA), `[heads, count, width]` each, made
        by CA's own norm and projections of random activations; None without CA. A comparison of the
        exported graph with torch feeds them to both."""
        if not self.config.use_ca:
            return None
        generator = torch.Generator().manual_seed(0)  # every build compares over the same numbers
        activations = torch.randn(1, count, self.config.hidden_size, generator=generator)
        key, value = self.keys_and_values(activations, torch.arange(count)[None])
        return key[0], value[0]

    def graph_module(self) -> nn.Module:
        """Body, cross-attention, borrowed layers."""
        return AttentionGraph(self)

    # ---- on the device ----------------------------------------------------------------------------------------

    def extend(
        self, ids: Tensor, positions: Tensor, mask: Tensor, past: Sequence[Rows]
    ) -> list[Rows]:
        """The body's keys and values of tokens that need no logits: a prompt, or accepted tokens."""
        # The keys and values of a token do not depend on which states are asked for: to ask for one
        # spares the last layer the states of all others.
        last = torch.tensor([ids.shape[1] - 1], device=ids.device)
        _, rows = self._run_body(self.embed(ids), positions, mask, past, records=(), queries=last)
        return rows

    def features(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        *records: Tensor,
        borrowed_mask: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """The drafter's guess of the target's final state after each token, `[B, T, hidden]`, and
        the keys and values that the tokens add to each layer's cache.

        `mask` `[B, 1, T, P+T]` over P past tokens and these is additive. `records` are keys, values
        and additive mask `[B, 1, 1 or T, R]` of R activation records; without them there is no
        cross-attention. `past` holds the body's layers, then the target's last layers that the
        drafter borrows. In training a `borrowed_mask` is passed, because the borrowed layers have a
        past (the target's) and the body has none. With `queries`, only these tokens get a state.
        """
        return self.states(
            self.embed(ids),
            positions,
            mask,
            past,
            *records,
            borrowed_mask=borrowed_mask,
            queries=queries,
        )

    def states(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        *records: Tensor,
        borrowed_mask: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """The same as `features`, for tokens that are embedded already: `x` `[B, T, hidden]`. The
        exported graph begins here."""
        if self.borrowed is None:
            x, rows = self._run_body(x, positions, mask, past, records, queries)
            return self._normed(x), rows
        # The borrowed layers need a state of every token: they make keys and values of them.
        layers = self.config.layers
        x, rows = self._run_body(x, positions, mask, past[:layers], records, queries=None)
        if borrowed_mask is None:
            borrowed_mask = mask
        x, borrowed_rows = self.borrowed(x, positions, borrowed_mask, past[layers:])
        if queries is not None:
            x = x.index_select(1, queries)
        return x, rows + borrowed_rows

    def empty_rows(self, ids: Tensor) -> list[Rows]:
        """The past of the body's layers before a sequence's first token."""
        heads, width = self.cache_heads
        empty = self.weight.new_zeros(ids.shape[0], heads, 0, width)
        return [(empty, empty)] * self.config.layers

    @property
    def cache_heads(self) -> tuple[int, int]:
        """KV heads of a layer of the body, and their width."""
        if self.config.body is None:
            return self.config.self_attention_num_key_value_heads, self.config.head_dim
        return self.body.heads

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, in the drafter's precision."""
        return self.shared.embed(ids).to(self.weight.dtype)

    @property
    def body_blocks(self) -> list[Block]:
        """The layers of a body that is defined here."""
        return [self.self_attention, *self.more_self_attention]

    @torch.no_grad()
    def leave_records_out(self) -> None:
        """Make cross-attention add nothing until it is trained, so that a pretrained body keeps its
        quality."""
        if self.config.use_ca:
            self.cross_attention.self_attn.o_proj.weight.zero_()
            self.cross_attention.mlp.down_proj.weight.zero_()

    def _normed(self, x: Tensor) -> Tensor:
        """States after the body's final norm, if it has one."""
        if self.config.body is not None:
            return self.body.decoder.norm(x)
        if self.config.final_norm:
            return self.norm(x)
        return x

    def _run_body(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        records: Sequence[Tensor],
        queries: Tensor | None,
    ) -> tuple[Tensor, list[Rows]]:
        """Run the body's layers, and behind them cross-attention over `records` (keys, values,
        mask), where there are any. Returns states of the `queries` (indices into the tokens, None:
        all), and the keys and values of each layer for all tokens."""
        angles = rotary(positions, self.config.head_dim, self.config.rope_theta)
        rows: list[Rows] = []
        for index, layer_past in enumerate(past):
            # Earlier layers need a state of every token: the next layer makes rows of them.
            is_last = index == self.config.layers - 1
            x, layer_rows = self._layer(
                index, x, positions, angles, mask, layer_past, queries if is_last else None
            )
            rows.append(layer_rows)
        if records:
            cos, sin = angles
            if queries is not None:
                angles = cos.index_select(1, queries), sin.index_select(1, queries)
            x = self._cross_attention(x, angles, *records)
        return x, rows

    def _layer(
        self,
        index: int,
        x: Tensor,
        positions: Tensor,
        angles: Rows,
        mask: Tensor,
        past: Rows,
        queries: Tensor | None,
    ) -> tuple[Tensor, Rows]:
        """Run layer `index` of the body. Returns its states of the `queries` (indices into the
        tokens, None: all), and its keys and values of all tokens. `angles` are the cosines and
        sines of the tokens' rotary positions."""
        if self.config.body is not None:  # a model of another library, with layers of its own
            x, rows = self.body.decoder.layer(index, x, positions, mask, past)
            if queries is not None:
                x = x.index_select(1, queries)
            return x, rows
        block = self.body_blocks[index]
        attention = block.self_attn
        cos, sin = angles
        normed = block.input_layernorm(x)
        key = rotate(attention.key(normed), cos, sin)
        value = attention.value(normed)
        if queries is not None:
            # Keys and values are made of all tokens, all else of those that are asked for.
            x = x.index_select(1, queries)
            normed = normed.index_select(1, queries)
            cos = cos.index_select(1, queries)
            sin = sin.index_select(1, queries)
            mask = mask.index_select(2, queries)
        query = rotate(attention.query(normed), cos, sin)
        keys, values = _joined(past, (key, value))
        attended = attention.attend(query, keys, values, mask)
        return block.feed_forward(x + attended), (key, value)

    def _cross_attention(
        self, x: Tensor, angles: Rows, key: Tensor, value: Tensor, mask: Tensor
    ) -> Tensor:
        """The states `x` `[B, T, hidden]` after cross-attention over records, which are given by
        their `key`, `value` and additive `mask`."""
        block = self.cross_attention
        cos, sin = angles
        query = rotate(block.self_attn.query(block.input_layernorm(x)), cos, sin)
        # The exported attention operator does not broadcast masks.
        mask_of_each = mask.expand(-1, -1, x.shape[1], -1)
        attended = block.self_attn.attend(query, key, value, mask_of_each)
        # Where no record is visible the block is skipped: softmax would average the masked values.
        # A visible record has 0 in the mask, a masked one a large negative number.
        sees_a_record = (mask.amax(-1) > masked(mask.dtype) / 2).transpose(-1, -2)
        return torch.where(sees_a_record, block.feed_forward(x + attended), x)


def _joined(past: Rows, new: Rows) -> Rows:
    """Keys and values of earlier tokens with new ones behind them, in the precision of these."""
    past_keys, past_values = past
    keys, values = new
    all_keys = torch.cat([past_keys.to(keys), keys], -2)
    all_values = torch.cat([past_values.to(values), values], -2)
    return all_keys, all_values


def _block(config: AttentionConfig, part: str, width: int | None = None) -> Block:
    """A block of the dimensions that the configuration has for this part."""
    return Block(
        config.hidden_size if width is None else width,
        config.num_attention_heads,
        getattr(config, f"{part}_num_key_value_heads"),
        getattr(config, f"{part}_intermediate_size"),
        config.rms_norm_eps,
    )


def new_attention(
    config: AttentionConfig, target: PreTrainedModel, body: Sibling | None = None
) -> AttentionDrafter:
    """An untrained drafter beside its target; a `body` that is a language model keeps its weights."""
    drafter = _beside(config, target, body)
    randomize(drafter)
    return drafter.to(device=target.device)


def attention_around(
    target: PreTrainedModel,
    facts: TargetFacts,
    body: LoadedModel,
    shape: Mapping[str, Any],
    *,
    frozen: bool,
) -> AttentionDrafter:
    """A drafter whose body is an existing small language model. Its cross-attention is untrained
    and adds nothing at first. The body's embedding and head are never trained."""
    refuse_another_tokenizer(body.folder, body.facts, facts)
    if not body.facts.uniform_cache:
        raise UnsupportedModelError(
            f"a {body.facts.family} cannot be the body of a drafter of records: its layers differ",
            hint="it can be a sibling as it is",
        )
    described = json.loads(body.model.config.to_json_string(use_diff=False))
    config = AttentionConfig.for_body(facts, body.facts, described, **shape)
    drafter = new_attention(config, target, Sibling(body.model))
    drafter.body.decoder.requires_grad_(not frozen)
    drafter.leave_records_out()
    return drafter.to(device=target.device, dtype=torch.float32)


def load_attention(
    folder: Path,
    target: PreTrainedModel,
    facts: TargetFacts,
    dtype: torch.dtype | None = None,
    config: AttentionConfig | None = None,
) -> AttentionDrafter:
    """A trained drafter beside its target: one of ours or the paper's published checkpoint."""
    own = config or AttentionConfig.read(folder, facts)
    drafter = filled(lambda: _beside(own, target), stored_weights(folder), folder)
    return drafter.to(device=target.device, dtype=dtype or target.dtype).eval()


def _beside(
    config: AttentionConfig, target: PreTrainedModel, body: Sibling | None = None
) -> AttentionDrafter:
    """A drafter with the target's embedding and head, and the layers that it borrows."""
    borrowed = None
    if config.tli:
        borrowed = BorrowedLayers(backbone_of(target), config.tli)
    return AttentionDrafter(config, SharedWeights.of(target), borrowed, body)
