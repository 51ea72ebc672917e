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
    """One layer; norms are in float32."""

    before: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    out: Tensor
    out_bias: Tensor | None
    between: Tensor
    gate_up: Tensor
    down: Tensor
    window: int
    """0: none."""
    scale: float


@dataclass(frozen=True)
class Weights:
    """All of a model."""

    facts: TargetFacts
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor
    turns: Tensor
    """Rotary cosines, and sines with the first half's sign flipped: float32 `[capacity, 2,
    head_dim]`."""

    @classmethod
    def of(
        cls, model: Any, facts: TargetFacts, *, capacity: int, windows: Sequence[int | None]
    ) -> Weights:
        """Join the matrices that read the same input; the model's layers become views of these."""
        backbone = model.get_decoder()
        layers = []
        for layer, window in zip(backbone.layers, windows, strict=True):
            attention = layer.self_attn
            mlp = layer.mlp
            qkv, bias = join_weights([attention.q_proj, attention.k_proj, attention.v_proj])
            norms = [
                norm.weight.float()
                for name in ("q_norm", "k_norm")
                if (norm := getattr(attention, name, None))
            ]
            layers.append(
                Layer(
                    before=layer.input_layernorm.weight.float(),
                    qkv=qkv,
                    qkv_bias=bias,
                    head_norms=(norms[0], norms[1]) if norms else None,
                    out=attention.o_proj.weight,
                    out_bias=attention.o_proj.bias,
                    between=layer.post_attention_layernorm.weight.float(),
                    gate_up=join_weights([mlp.gate_proj, mlp.up_proj])[0],
                    down=mlp.down_proj.weight,
                    window=window or 0,
                    scale=attention.scaling,
                )
            )
        embedding = backbone.embed_tokens.weight
        head = model.get_output_embeddings().weight
        rotations = rotary_table(backbone, embedding[:1].float(), capacity).float().contiguous()
        return cls(facts, embedding, layers, backbone.norm.weight.float(), head, rotations)


def can_run(model: Any, facts: TargetFacts) -> bool:
    """Whether the decoder knows this model: a dense family, with SwiGLU, in plain matrices (not
    quantized ones)."""
    if facts.family not in DENSE_FAMILIES or getattr(model.config, "hidden_act", "silu") != "silu":
        return False
    for layer in model.get_decoder().layers:
        mlp = layer.mlp
        attention = layer.self_attn
        matrices = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        matrices += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if not all(type(one) is nn.Linear and type(one.weight.data) is Tensor for one in matrices):
            return False
        if any(one.bias is not None for one in matrices[4:]):
            return False
    return True
