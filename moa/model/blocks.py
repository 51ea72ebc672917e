"""The Llama-style block that LSA, SA and CA are made of: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Names of modules are the paper's published checkpoint keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moa.tree import MASKED


def masked(dtype: torch.dtype) -> float:
    """What an additive mask holds where a query may not look."""
    return max(MASKED, torch.finfo(dtype).min)


def additive(visible: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`moa.tree.additive` for a tensor, on its device. `dtype` must be that of the queries: some kernels of
    accelerators misread another without a word."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, masked(dtype))


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, `[*positions, head_dim]`, in float32."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.to(torch.float32).unsqueeze(-1) * theta ** (-steps / head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `[..., heads, T, D]` by its positions, `[..., T, D]`."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos.unsqueeze(-3) + torch.cat([-high, low], dim=-1) * sin.unsqueeze(-3)).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.device.type == "cpu":
            return _NormOnCpu.apply(x, self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class _NormOnCpu(torch.autograd.Function):
    """The same norm for training on a CPU, where torch's own runs several passes and keeps each result for the
    gradient.

    LSA normalises every layer of every token: with torch's that is a fifth of a training step, with this a twentieth.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            wide = x.float()
            power = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
            scale = power.add_(eps).rsqrt_()
            ctx.save_for_backward(x, weight, scale)
            return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, gradient = x.float(), gradient.float()
        for_weight = (wide * scale).mul_(gradient).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, for_weight, None
        inner = gradient * weight
        along = (inner * wide).sum(-1, keepdim=True).mul_(scale * scale / x.shape[-1])
        return inner.sub_(wide * along).mul_(scale).to(x.dtype), for_weight, None


class Attention(nn.Module):
    """Projections of grouped-query attention; the caller provides the mask."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
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
        if mask is None and query.device.type == "cpu":
            out = _short_attention(query, key, value)
        else:
            out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(out.transpose(-3, -2).flatten(-2))


def _short_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Unmasked attention in two products, the heads of a group as rows of one.

    LSA's sequences are as long as the target is deep, and there are as many as there are tokens. The fused CPU kernel
    is made for the opposite: in bf16 it takes over twice as long.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * length, width) * width**-0.5
    share = torch.matmul(grouped, key.transpose(-1, -2)).softmax(-1).to(value.dtype)
    return torch.matmul(share, value).view(batch, heads, length, width)


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

    def __init__(self, width: int, heads: int, kv_heads: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, kv_heads)
        self.mlp = MLP(width, intermediate)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half of the layer, with its residual."""
        return x + self.mlp(self.post_attention_layernorm(x))
