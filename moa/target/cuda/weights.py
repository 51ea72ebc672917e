"""The weights of a dense Llama-like target, as the accelerator's kernels take them: matrices that
read the same input are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moa.config import TargetFacts
from moa.target.products import join_weights, rotary_table

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. Those of norms are in float32."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    """The feed-forward part's first two matrices, one above the other."""
    down: Tensor
    window: int
    """How many tokens a token looks back, itself among them; 0: all."""
    scale: float


@dataclass(frozen=True)
class Weights:
    """All of a model."""

    facts: TargetFacts
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor
    rotary_table: Tensor
    """Rotary cosines, and sines with the first half's sign flipped: float32 `[capacity, 2,
    head_dim]`."""

    @classmethod
    def of(
        cls, model: Any, facts: TargetFacts, *, capacity: int, windows: Sequence[int | None]
    ) -> Weights:
        """Take the weights of a model as the kernels read them: matrices that read the same input
        are joined to one, and the model's own layers become views of it. `windows` are the tokens
        that each layer looks back, None: all; `capacity` is the most tokens of a text."""
        backbone = model.get_decoder()
        embedding = backbone.embed_tokens.weight
        table = rotary_table(backbone, embedding[:1].float(), capacity)
        return cls(
            facts=facts,
            embedding=embedding,
            layers=[
                _layer(layer, window)
                for layer, window in zip(backbone.layers, windows, strict=True)
            ],
            norm=backbone.norm.weight.float(),
            head=model.get_output_embeddings().weight,
            rotary_table=table.float().contiguous(),
        )


def _layer(layer: Any, window: int | None) -> Layer:
    """The weights of one of the library's layers, which looks back so many tokens (None: all)."""
    attention = layer.self_attn
    mlp = layer.mlp
    qkv, bias = join_weights([attention.q_proj, attention.k_proj, attention.v_proj])
    query_norm = getattr(attention, "q_norm", None)
    key_norm = getattr(attention, "k_norm", None)
    head_norms = None
    if query_norm is not None and key_norm is not None:
        head_norms = (query_norm.weight.float(), key_norm.weight.float())
    return Layer(
        attention_norm=layer.input_layernorm.weight.float(),
        qkv=qkv,
        qkv_bias=bias,
        head_norms=head_norms,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight.float(),
        gate_up=join_weights([mlp.gate_proj, mlp.up_proj])[0],
        down=mlp.down_proj.weight,
        window=window or 0,
        scale=attention.scaling,
    )


def can_run(model: Any, facts: TargetFacts) -> bool:
    """Whether the accelerator's decoder can run this model: a dense family, with SwiGLU, in plain
    matrices (not quantized ones), without biases in the feed-forward part."""
    if facts.family not in DENSE_FAMILIES or getattr(model.config, "hidden_act", "silu") != "silu":
        return False
    for layer in model.get_decoder().layers:
        attention = layer.self_attn
        mlp = layer.mlp
        of_attention = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        of_mlp = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        for part in of_attention + of_mlp:
            if type(part) is not nn.Linear or type(part.weight.data) is not Tensor:
                return False
        if any(part.bias is not None for part in of_mlp):
            return False
    return True
