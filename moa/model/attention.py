"""Tree attention: the attention function given to `transformers`.

For grouped-query attention with a mask, the library repeats keys and values. This function instead makes the query
heads of a group rows of one product with their shared key head, and repeats the mask, once per forward. That makes
batched verification about three times as fast on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

# transformers 5 refuses any name with "sdpa" in it for models, such as Gemma 2, whose soft cap its own sdpa drops.
ATTENTION = "moa_tree"


def tree_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [B,H,T,D] over `key`, `value` [B,Hkv,V,D] under an additive mask [B,1,T or G*T,V].

    The mask already includes the sliding window. A soft cap bends the scores before the mask, which the
    fused kernel cannot do, so capped models take the explicit product.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    query = query.reshape(batch, kv_heads, groups * length, width)
    if attention_mask is not None and attention_mask.shape[-2] != groups * length:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        scores = torch.matmul(query, key.transpose(2, 3)) * (width**-0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask
        out = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value)
    return out.reshape(batch, heads, length, width).transpose(1, 2), None


# With the library's eager mask registered too, a model with this attention still runs plain forwards correctly.
AttentionInterface.register(ATTENTION, tree_sdpa)
AttentionMaskInterface.register(ATTENTION, eager_mask)
