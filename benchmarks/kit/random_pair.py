"""Write a random target and drafter: `python -m benchmarks.kit.random_pair FOLDER HIDDEN LAYERS
VOCABULARY`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.model.checkpoint import save_drafter
from moa.target.torch_target import Target
from testing.tiny import tiny_tokenizer


def llama(hidden: int, layers: int, vocabulary: int, **more: Any) -> LlamaConfig:
    """A Llama's shape: heads of 64, a quarter of them for keys and values, a feed-forward of 2.75
    times its width."""
    heads = max(2, hidden // 64)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": int(2.75 * hidden) // 32 * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 64,
        "max_position_embeddings": 16384,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        **more,
    }
    return LlamaConfig(**shape)


def main(folder: str, hidden: str, layers: str, vocabulary: str) -> None:
    """Draw both from one seed, and save them as a user would."""
    torch.manual_seed(0)
    source = f"{folder}/target"
    LlamaForCausalLM(llama(int(hidden), int(layers), int(vocabulary))).save_pretrained(source)
    tiny_tokenizer(int(vocabulary)).save_pretrained(source)
    target = Target.load(source)
    save_drafter(
        new_attention(AttentionConfig.for_target(target.facts), target.model),
        Path(folder) / "drafter",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
