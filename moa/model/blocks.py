"""The Llama-style block that LSA, SA and CA are made of: RMSNorm, rotary positions, grouped-query
attention, SwiGLU.

Names of modules are the paper's published checkpoint keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa.tree import MASKED


def masked(dtype: torch.dtype) -> float:
    """What an additive mask of this type holds where a query may not look: float16 does not reach as
    low as `MASKED`."""
    return max(MASKED, torch.finfo(dtype).min)


def additive(visible: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`moa.tree.additive` for a tensor, on its device. `dtype` must be that of the queries: some
    kernels of accelerators misread another without a word."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, masked(dtype))


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions, `[*positions, head_dim]`, in float32."""
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = theta ** (-even / head_dim)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    angles = torch.cat([angles, angles], dim=-1)  # for both halves of a head: `rotate`
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[..., heads, T, D]` by its positions, whose cosine and sine are `[..., T, D]`. Number
    i of a head and number i + D/2 are the two coordinates of a point."""
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)  # by a right angle
    rotated = x * cos.unsqueeze(-3) + turned * sin.unsqueeze(-3)
    return rotated.to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of grouped-query attention; the caller provides the mask."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        """Make the projections between states of this width and `heads` query heads, which share
        `kv_heads` heads of keys and values."""
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)

    def query(self, x: Tensor) -> Tensor:
        """`[B, T, width] -> [B, heads, T, D]`."""
        return self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)).transpose(-3, -2)

    def key(self, x: Tensor) -> Tensor:
        """`[B, T, width] -> [B, kv_heads, T, D]`, not yet rotated."""
        return self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(-3, -2)

    def value(self, x: Tensor) -> Tensor:
        """`[B, T, width] -> [B, kv_heads, T, D]`."""
        return self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(-3, -2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of `query` over `key` and `value`, projected out: `[B, T, width]`."""
        out = F.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=self.heads != self.kv_heads
        )
        return self.o_proj(out.transpose(-3, -2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """The parts of one decoder layer, under the published names."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, intermediate: int, eps: float
    ) -> None:
        """Make a layer over states of this width; `intermediate` is the inner width of its
        feed-forward part."""
        super().__init__()
        self.self_attn = Attention(width, heads, kv_heads)
        self.mlp = MLP(width, intermediate)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half of the layer, with its residual."""
        return x + self.mlp(self.post_attention_layernorm(x))
