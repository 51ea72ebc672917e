"""The Mixture-of-Attentions drafter: one definition for training, serving and export.

    target's K, V of one token, all layers ── LSA ── mean ── Ekv2E ── k_proj, v_proj ──► activation record
    token ids ── embedding ── body: N causal layers ── CA over records ── [borrowed target layers] ── head ──► logits

The body is a small causal language model with its own KV cache. Without records, cross-attention (CA) is skipped, and
the drafter is exactly that language model. The paper's drafter is the case of one layer (SA). `project` runs beside the
target and `step` on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moa.config import DrafterConfig
from moa.model.blocks import Block, RMSNorm, masked, rotary, rotate
from moa.model.borrowed import BorrowedLayers, Rows, SharedWeights, Sibling
from moa.model.target import Committed
from moa.records import RecordLayout


class Drafter(nn.Module):
    """The body, CA, LSA and Ekv2E are trained; everything else is the target's."""

    def __init__(
        self,
        config: DrafterConfig,
        shared: SharedWeights,
        borrowed: BorrowedLayers | None = None,
        body: Sibling | None = None,
    ) -> None:
        super().__init__()
        if config.tli != (len(borrowed) if borrowed else 0):
            raise ValueError(f"a drafter of TLI={config.tli} needs that many borrowed layers")
        self.config = config
        if not config.scaled_embedding:
            shared = replace(shared, embedding_scale=1.0)
        # The first layer and CA keep the published names.
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
    def shared(self) -> SharedWeights:
        """Embedding and head: the target's, or those of a body that has its own."""
        return self._borrowed_from_target[0] if self.config.body is None else self.body.shared

    @property
    def borrowed(self) -> BorrowedLayers | None:
        """The target's last layers, with TLI > 0."""
        return self._borrowed_from_target[1]

    # ---- beside the target ------------------------------------------------------------------------------------

    def activations(self, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """The activation of each token: `[..., hidden_size]`.

        `keys` and `values` are the target's cache, post-RoPE, `[layers, ..., kv_heads, head_dim]`;
        `hidden` is its final, normed state. LSA attends over the target's layers; each token is
        processed independently.
        """
        parts = []
        if self.config.use_lsa:
            parts.append(self.Ekv2E(self._layer_self_attention(keys, values)))
        if self.config.final_state or not self.config.use_lsa:
            parts.append(self.final_state(hidden))
        return torch.stack(parts).sum(0)

    def _layer_self_attention(self, keys: Tensor, values: Tensor) -> Tensor:
        lsa = self.layer_self_attention
        layers = keys.shape[0]
        lead = keys.shape[1:-2]
        # Head by head: that head's key, then its value.
        x = torch.cat([keys, values], dim=-1).flatten(-2).flatten(1, -2).transpose(0, 1)
        normed = lsa.input_layernorm(x)
        cos, sin = rotary(
            torch.arange(layers, device=x.device), lsa.self_attn.head_dim, self.config.rope_theta
        )
        query = rotate(lsa.self_attn.query(normed), cos, sin)
        key = rotate(lsa.self_attn.key(normed), cos, sin)
        x = x + lsa.self_attn.attend(query, key, lsa.self_attn.value(normed), None)
        return lsa.feed_forward(x).mean(dim=1).unflatten(0, lead)

    def records(self, activations: Tensor, positions: Tensor) -> Rows:
        """CA's keys (rotated at their absolute positions) and values: `[B, record_heads, T, D]`
        each."""
        angles = rotary(positions, self.config.head_dim, self.config.rope_theta)
        attention = self.cross_attention.self_attn
        normed = self.cross_attention.input_layernorm(activations)
        return rotate(attention.key(normed), *angles), attention.value(normed)

    def project(self, keys: Tensor, values: Tensor, hidden: Tensor, positions: Tensor) -> Rows:
        """Activation records of n tokens, `[n, kv_heads, head_dim]` each, from the target's cache
        rows."""
        key, value = self.records(
            self.activations(keys, values, hidden).unsqueeze(0), positions.unsqueeze(0)
        )
        return key[0].transpose(0, 1), value[0].transpose(0, 1)

    @torch.inference_mode()
    def whole_records(
        self, pieces: Sequence[Committed]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The same of tokens that the target has run, as they travel, `[n, *]` of `layout`: with
        the target's rows in the borrowed layers."""
        keys, values = (
            torch.cat(half, 1) for half in zip(*(piece.kv for piece in pieces), strict=True)
        )
        hidden, positions = (
            torch.cat([getattr(p, part) for p in pieces]) for part in ("hidden", "positions")
        )
        made = self.project(keys, values, hidden, positions)
        last = len(keys) - self.config.tli
        key, value = (
            self.layout.join([part.float().cpu().numpy() for part in (own, *theirs[last:])])
            for own, theirs in zip(made, (keys, values), strict=True)
        )
        return key, value

    @property
    def layout(self) -> RecordLayout:
        """The layout of a record: CA's heads, then the target's in each borrowed layer."""
        config = self.config
        theirs = config.target_kv_heads, config.kv_hidden_size // (2 * config.target_kv_heads)
        return RecordLayout(((config.record_heads, config.head_dim), *[theirs] * config.tli))

    # ---- on the device ----------------------------------------------------------------------------------------

    def extend(
        self, ids: Tensor, positions: Tensor, mask: Tensor, past: Sequence[Rows]
    ) -> list[Rows]:
        """The body's keys and values of tokens that need no logits: a prompt, or accepted tokens."""
        last = torch.tensor([ids.shape[1] - 1], device=ids.device)
        return self._run_body(self.embed(ids), positions, mask, past, (), last)[1]

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
        """The drafter's guess of the target's final state after each token, and the cache rows that
        it adds.

        `mask` `[B, 1, T, P+T]` and that of `records` (keys, values, mask), `[B, 1, 1 or T, R]`, are
        additive; without records there is no cross-attention. `past` holds the body's layers, then
        the borrowed ones. In training a `borrowed_mask` is passed, because the borrowed layers have
        a past (the target's) and the body has none. With `queries`, only these tokens get a state.
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
        """`features` after embedded tokens."""
        layers = self.config.layers
        if self.borrowed is None:
            x, rows = self._run_body(x, positions, mask, past, records, queries)
            return self._normed(x), rows
        x, rows = self._run_body(x, positions, mask, past[:layers], records, None)
        x, more = self.borrowed(
            x, positions, mask if borrowed_mask is None else borrowed_mask, past[layers:]
        )
        return x if queries is None else x.index_select(1, queries), rows + more

    def empty_rows(self, ids: Tensor) -> list[Rows]:
        """The past of the body's layers before a sequence's first token."""
        heads, width = self.cache_heads
        none = self.weight.new_zeros(ids.shape[0], heads, 0, width)
        return [(none, none)] * self.config.layers

    @property
    def cache_heads(self) -> tuple[int, int]:
        """KV heads of a layer of the body, and their width."""
        if self.config.body is None:
            return self.config.self_attention_num_key_value_heads, self.config.head_dim
        return self.body.heads

    @property
    def weight(self) -> Tensor:
        """A weight, to read dtype and device from."""
        return next(self.parameters())

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, in the drafter's precision."""
        return self.shared.embed(ids).to(self.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head."""
        return self.shared.logits(hidden)

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
        if self.config.body is not None:
            return self.body.decoder.norm(x)
        return self.norm(x) if self.config.final_norm else x

    def _run_body(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        records: Sequence[Tensor],
        queries: Tensor | None,
    ) -> tuple[Tensor, list[Rows]]:
        """Run the body's layers, and cross-attention behind them; states for the `queries`, keys
        and values for all tokens."""
        angles = rotary(positions, self.config.head_dim, self.config.rope_theta)
        rows: list[Rows] = []
        for index, before in enumerate(past):
            last = queries if index == self.config.layers - 1 else None
            x, new = self._layer(index, x, positions, angles, mask, before, last)
            rows.append(new)
        if records:
            if queries is not None:
                angles = angles[0].index_select(1, queries), angles[1].index_select(1, queries)
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
        """One layer of the body: new keys and values of all tokens, output for the `queries`."""
        if self.config.body is not None:
            x, rows = self.body.decoder.layer(index, x, positions, mask, past)
            return x if queries is None else x.index_select(1, queries), rows
        block = self.body_blocks[index]
        attention = block.self_attn
        cos, sin = angles
        normed = block.input_layernorm(x)
        key = rotate(attention.key(normed), cos, sin)
        value = attention.value(normed)
        if queries is not None:
            x, normed, cos, sin = (t.index_select(1, queries) for t in (x, normed, cos, sin))
            mask = mask.index_select(2, queries)
        keys = torch.cat([past[0].to(key), key], -2)
        values = torch.cat([past[1].to(value), value], -2)
        seen = attention.attend(rotate(attention.query(normed), cos, sin), keys, values, mask)
        return block.feed_forward(x + seen), (key, value)

    def _cross_attention(
        self, x: Tensor, angles: Rows, key: Tensor, value: Tensor, mask: Tensor
    ) -> Tensor:
        block = self.cross_attention
        query = rotate(block.self_attn.query(block.input_layernorm(x)), *angles)
        # The exported attention operator does not broadcast masks.
        seen = block.self_attn.attend(query, key, value, mask.expand(-1, -1, x.shape[1], -1))
        # Where no record is visible the block is skipped: softmax would average the masked values.
        visible = (mask.amax(-1) > masked(mask.dtype) / 2).transpose(-1, -2)
        return torch.where(visible, block.feed_forward(x + seen), x)


def _block(config: DrafterConfig, part: str, width: int = 0) -> Block:
    return Block(
        width or config.hidden_size,
        config.num_attention_heads,
        getattr(config, f"{part}_num_key_value_heads"),
        getattr(config, f"{part}_intermediate_size"),
        config.rms_norm_eps,
    )
