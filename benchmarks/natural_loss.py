"""How well models know natural text: loss per token on held-out prompts' continuations, by kind.

python -m benchmarks.natural_loss moa/demo/target OTHER --per-kind 40
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import prompts as held_out
from benchmarks.report import table
from moa.demo.skills import Example
from moa.errors import run_cli

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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.natural_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--per-kind", type=int, default=40, metavar="N", help="prompts of a kind (default %(default)s)")
    args = parser.parse_args(argv)
    chosen = held_out.natural_prompts(args.per_kind)
    rows = []
    for folder in args.models:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows.append([folder.name, *(f"{loss(model, tokenizer, examples):.3f}" for examples in chosen.values())])
    print(table(["loss per token", *chosen], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.natural_loss", main))
