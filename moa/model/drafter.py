"""The Mixture-of-Attentions drafter: the one definition, for training, serving and export.

    target's K, V of one token, all layers ── LSA ── mean ── Ekv2E ── k_proj, v_proj ──► activation record
    token ids ── embedding ── SA (own cache) ── CA (over the records) ── [borrowed target layers] ── head ──► logits

What two machines need is the cut between `project` (beside the target) and `step` (on the device).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa.config import DrafterConfig
from moa.model.blocks import MASKED, Block, rotary, rotate
from moa.model.borrowed import BorrowedLayers, Rows
from moa.model.shared import SharedWeights


class Drafter(nn.Module):
    """LSA, SA, CA and Ekv2E are trained; everything else is the target's."""

    def __init__(self, config: DrafterConfig, shared: SharedWeights, borrowed: BorrowedLayers | None = None) -> None:
        super().__init__()
        if config.tli != (len(borrowed) if borrowed else 0):
            raise ValueError(f"a drafter of TLI={config.tli} needs that many borrowed layers")
        self.config = config
        heads, eps = config.num_attention_heads, config.rms_norm_eps
        self.self_attention = Block(
            config.hidden_size,
            heads,
            config.self_attention_num_key_value_heads,
            config.self_attention_intermediate_size,
            eps,
        )
        self.cross_attention = Block(
            config.hidden_size,
            heads,
            config.cross_attention_num_key_value_heads,
            config.cross_attention_intermediate_size,
            eps,
        )
        if config.use_lsa:
            self.layer_self_attention = Block(
                config.kv_hidden_size,
                heads,
                config.layer_self_attention_num_key_value_heads,
                config.layer_self_attention_intermediate_size,
                eps,
            )
            self.Ekv2E = nn.Linear(config.kv_hidden_size, config.hidden_size)
        if config.final_state or not config.use_lsa:
            self.final_state = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        if config.confidence:
            self.confidence_head = nn.Linear(config.hidden_size, 1)
        # Held outside the module tree: not trained, not saved, and shared with the target rather than copied.
        self._borrowed_from_target = (shared, borrowed)

    @property
    def shared(self) -> SharedWeights:
        """The target's embedding and head."""
        return self._borrowed_from_target[0]

    @property
    def borrowed(self) -> BorrowedLayers | None:
        """The target's last layers, with TLI > 0."""
        return self._borrowed_from_target[1]

    # ---- beside the target ------------------------------------------------------------------------------------

    def activations(self, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """What the target knows after each token: `[..., hidden_size]`.

        `keys` and `values` are the target's cache, post-RoPE, `[layers, ..., kv_heads, head_dim]`; `hidden` is its
        final, normed state. The sequence that LSA reads is the target's layers; all tokens are independent.
        """
        parts = []
        if self.config.use_lsa:
            parts.append(self.Ekv2E(self._layer_self_attention(keys, values)))
        if self.config.final_state or not self.config.use_lsa:
            parts.append(self.final_state(hidden))
        return torch.stack(parts).sum(0)

    def _layer_self_attention(self, keys: Tensor, values: Tensor) -> Tensor:
        lsa = self.layer_self_attention
        layers, lead = keys.shape[0], keys.shape[1:-2]
        # Head by head: that head's key, then its value.
        x = torch.cat([keys, values], dim=-1).flatten(-2).flatten(1, -2).transpose(0, 1)
        normed = lsa.input_layernorm(x)
        cos, sin = rotary(torch.arange(layers, device=x.device), lsa.self_attn.head_dim, self.config.rope_theta)
        query = rotate(lsa.self_attn.query(normed), cos, sin)
        key = rotate(lsa.self_attn.key(normed), cos, sin)
        x = x + lsa.self_attn.attend(query, key, lsa.self_attn.value(normed), None)
        return lsa.feed_forward(x).mean(dim=1).unflatten(0, lead)

    def records(self, activations: Tensor, positions: Tensor) -> Rows:
        """CA's keys (rotated at their absolute positions) and values: `[B, kv_heads, T, D]` each."""
        normed = self.cross_attention.input_layernorm(activations)
        attention = self.cross_attention.self_attn
        cos, sin = rotary(positions, attention.head_dim, self.config.rope_theta)
        return rotate(attention.key(normed), cos, sin), attention.value(normed)

    def project(self, keys: Tensor, values: Tensor, hidden: Tensor, positions: Tensor) -> Rows:
        """Activation records of n tokens, `[n, kv_heads, head_dim]` each, from the target's cache rows."""
        key, value = self.records(self.activations(keys, values, hidden).unsqueeze(0), positions.unsqueeze(0))
        return key[0].transpose(0, 1), value[0].transpose(0, 1)

    # ---- on the device ----------------------------------------------------------------------------------------

    def extend(self, ids: Tensor, positions: Tensor) -> Rows:
        """SA's cache rows of tokens that need no logits: a prompt, or what the target has accepted.

        SA is one layer, so a row depends on nothing but its own token and position.
        """
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        block = self.self_attention
        normed = block.input_layernorm(self.embed(ids))
        return rotate(block.self_attn.key(normed), cos, sin), block.self_attn.value(normed)

    def step(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        record_k: Tensor,
        record_v: Tensor,
        record_mask: Tensor,
        *,
        borrowed_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """Logits after each token, and the cache rows it adds.

        `mask` `[B, 1, T, P+T]` and `record_mask` `[B, 1, 1 or T, R]` are additive. `past[0]` is SA's cache, the rest
        the borrowed layers'. Training passes a `borrowed_mask` of its own, since there the past of the borrowed
        layers is the target's and SA has none.
        """
        hidden, rows = self.features(
            ids, positions, mask, past, record_k, record_v, record_mask, borrowed_mask=borrowed_mask
        )
        return self.logits(hidden), rows

    def features(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        record_k: Tensor,
        record_v: Tensor,
        record_mask: Tensor,
        *,
        borrowed_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """`step` up to the head: the drafter's guess of the target's final hidden state."""
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embed(ids)
        x, sa_rows = self._self_attention(x, cos, sin, mask, past[0])
        if self.config.use_ca:
            x = self._cross_attention(x, cos, sin, record_k, record_v, record_mask)
        rows = [sa_rows]
        if self.borrowed is not None:
            x, more = self.borrowed(x, positions, mask if borrowed_mask is None else borrowed_mask, past[1:])
            rows += more
        return x, rows

    def embed(self, ids: Tensor) -> Tensor:
        """The target's token embeddings, in the drafter's precision."""
        return self.shared.embed(ids).to(self.self_attention.input_layernorm.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head."""
        return self.shared.logits(hidden)

    def agreement(self, hidden: Tensor) -> Tensor:
        """With a confidence head: the log-probability that the target's choice is this state's most likely token."""
        return F.logsigmoid(self.confidence_head(hidden).squeeze(-1).float())

    def _self_attention(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: Rows) -> tuple[Tensor, Rows]:
        block = self.self_attention
        normed = block.input_layernorm(x)
        key = rotate(block.self_attn.key(normed), cos, sin)
        value = block.self_attn.value(normed)
        query = rotate(block.self_attn.query(normed), cos, sin)
        keys, values = torch.cat([past[0].to(key), key], -2), torch.cat([past[1].to(value), value], -2)
        seen = block.self_attn.attend(query, keys, values, mask)
        return block.feed_forward(x + seen), (key, value)

    def _cross_attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, record_k: Tensor, record_v: Tensor, record_mask: Tensor
    ) -> Tensor:
        block = self.cross_attention
        query = rotate(block.self_attn.query(block.input_layernorm(x)), cos, sin)
        seen = block.self_attn.attend(query, record_k, record_v, record_mask)
        # Where no record is visible, attention has nothing to say; softmax would average what is masked.
        any_visible = (record_mask.amax(-1) > MASKED / 2).to(x.dtype).transpose(-1, -2)
        return block.feed_forward(x + seen * any_visible)
