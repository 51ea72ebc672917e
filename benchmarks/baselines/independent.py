"""An independent drafter, a body that never sees records, as the plain Llama that it is: to stand
alone, to assist Hugging Face's `generate`, or to be exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from moa.drafters.attention.model import AttentionDrafter
from moa.errors import UnsupportedModelError


def as_llama(
    model: AttentionDrafter, max_positions: int, eos_ids: Sequence[int]
) -> LlamaForCausalLM:
    """The same model as a plain Hugging Face one, to stand alone or to assist `generate`."""
    config = model.config
    shared = model.shared
    if shared.embedding_scale != 1.0 or shared.logit_softcap is not None:
        raise UnsupportedModelError(
            "a Llama cannot scale its embeddings or cap its logits as this drafter's target does"
        )
    tied = shared.embedding.data_ptr() == shared.head.data_ptr()
    # As a keyword of both transformers 4 and 5, which keeps it elsewhere.
    rotation: dict[str, Any] = {"rope_theta": config.rope_theta}
    llama: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.self_attention_intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.self_attention_num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            **rotation,
            max_position_embeddings=max_positions,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=list(eos_ids),
            pad_token_id=None,
        )
    )
    state = {
        f"model.layers.{number}.{name}": value
        for number, block in enumerate(model.body_blocks)
        for name, value in block.state_dict().items()
    }
    state |= {"model.norm.weight": model.norm.weight}
    state |= {"model.embed_tokens.weight": shared.embedding, "lm_head.weight": shared.head}
    llama.load_state_dict(state)
    llama.to(device=model.weight.device, dtype=model.weight.dtype).eval().requires_grad_(False)
    return llama
