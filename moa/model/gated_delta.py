"""The gated delta rule as one operator, for a graph: the library's own layers loop over tokens, and a
graph of a stranger may have no loops (`moa/graph/control_flow.py`). ONNX Runtime has it as one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over a chain of tokens: each decays the state, corrects what it holds
    for the token's key towards its value, and reads it by the query.

    Query and key are `[B, T, heads * key width]`, value `[B, T, heads * value width]`, decay (its
    logarithm) and rate (of the correction) `[B, T, heads]`; the state is `[B, heads, key width, value
    width]`. Returns what is read after each token, `[B, T, heads * value width]`, and the state after
    the last.
    """
    heads, width = state.shape[1:3]
    if torch.compiler.is_exporting():
        # ONNX Runtime has the whole loop as one operator.
        read, after = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::LinearAttention",
            (query, key, value, state, decay, rate),
            {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta"},
            dtypes=(value.dtype, state.dtype),
            shapes=(value.shape, state.shape),
            version=1,
        )
        return read, after

    def by_head(packed: Tensor) -> Tensor:
        """`[B, T, heads * width]` as `[B, heads, T, width]`."""
        return packed.unflatten(-1, (heads, -1)).transpose(1, 2)

    query, key, value, decay, rate = map(by_head, (query, key, value, decay, rate))
    state = state.to(value)
    reads = []
    for token in range(value.shape[2]):
        state = state * decay[:, :, token, :, None].exp()
        held_value = key[:, :, token, None] @ state
        correction = (value[:, :, token, None] - held_value) * rate[:, :, token, :, None]
        state = state + key[:, :, token, :, None] * correction
        read = query[:, :, token, None] @ state
        reads.append(read.squeeze(2) * width**-0.5)
    return torch.stack(reads, dim=1).flatten(2), state


class GatedDelta(nn.Module):
    """A gated delta layer of the library (Qwen3.5), with its recurrence as that operator."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, cache: Any, **_: Any) -> Tensor:
        """Compute what the library's layer does, of one row `[1, T, hidden]`; the states before it
        are taken from `cache`, and those after it put there."""
        layer = self.layer
        widths = [layer.key_dim, layer.key_dim, layer.value_dim]
        query, key, value = torch.split(self._mixed(hidden_states, cache), widths, dim=-1)
        rate = layer.in_proj_b(hidden_states).sigmoid()
        steps = F.softplus(layer.in_proj_a(hidden_states).float() + layer.dt_bias)
        decay = -layer.A_log.float().exp() * steps
        read, memory = gated_delta(
            self._unit(query), self._unit(key), value, decay, rate, cache.get_recurrent_state(0)
        )
        cache.update_recurrent_state(memory, layer.layer_idx)
        width = layer.head_v_dim
        gate = layer.in_proj_z(hidden_states).reshape(-1, width)
        normed = layer.norm(read.reshape(-1, width), gate)
        out: Tensor = layer.out_proj(normed.reshape(*hidden_states.shape[:2], layer.value_dim))
        return out

    def _mixed(self, hidden_states: Tensor, cache: Any) -> Tensor:
        """Queries, keys and values of these tokens side by side, each mixed with those just before
        it by a short convolution."""
        layer = self.layer
        conv = layer.conv1d
        inputs = cache.update_conv_state(
            layer.in_proj_qkv(hidden_states).transpose(1, 2),
            layer.layer_idx,
            conv_kernel_size=layer.conv_kernel_size,
        )
        mixed = F.silu(F.conv1d(inputs, conv.weight, conv.bias, groups=conv.groups))
        tokens = hidden_states.shape[1]
        return mixed[:, :, -tokens:].transpose(1, 2)  # without the inputs before the step

    def _unit(self, packed: Tensor) -> Tensor:
        """Scale the heads of queries or keys `[B, T, heads * width]` to length one, and repeat each
        for the heads of values that share it."""
        layer = self.layer
        heads = packed.unflatten(-1, (layer.num_k_heads, layer.head_k_dim))
        heads = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)
        return heads.repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=2).flatten(2)
