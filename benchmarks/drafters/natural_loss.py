"""How well models know natural text: loss per token on held-out prompts' continuations, by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.kit.figures import pivot
from benchmarks.kit.progress import steps
from demo import held_out
from demo.skills import Example
from moa.demo import paths


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which models, on how much text."""

    models: tuple[str, ...] = (str(paths().target),)
    """Folders of the models."""
    per_kind: int = 40
    """Prompts of each kind."""


LONGEST = 512
"""Tokens of a prompt and its continuation: what is further is left out."""


@torch.inference_mode()
def loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> float:
    """Mean loss of the continuations' tokens, in nats."""
    total, count = 0.0, 0
    for example in examples:
        prompt = held_out.encode(tokenizer, example)
        ids = torch.tensor([(prompt + tokenizer.encode(example.answer, add_special_tokens=False))[:LONGEST]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        total += float(F.cross_entropy(logits.float(), ids[0, len(prompt) :], reduction="sum"))
        count += logits.shape[0]
    return total / count


def measure(options: Options) -> dict[str, Any]:
    """Every model on every kind."""
    chosen = held_out.natural_prompts(options.per_kind)
    runs = []
    for folder in steps(options.models, "models"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for kind, examples in chosen.items():
            runs.append({"model": Path(folder).name, "kind": kind, "loss": loss(model, tokenizer, examples)})
    return {"runs": runs}


def tables(result: Mapping[str, Any]) -> str:
    """Loss by model and kind."""
    return pivot(result["runs"], "model", "kind", "{loss:.3f}", "loss per token")
