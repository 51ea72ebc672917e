"""`python -m moa.demo.train`: makes the embedded pair from nothing, each stage from where it was left.

    tokenizer   a few seconds
    target      a Llama of 7M parameters on the exercises and the standard library
    drafter     its MoA drafter, with this project's own trainer
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from moa.demo import corpus, tokenizer as demo_tokenizer
from moa.demo.skills import Example
from moa.errors import run_cli
from moa.training.data import Document, PackedRows, pack
from moa.training.loop import Loop, LoopSettings
from moa.training.pretrain import Pretraining

ROW = 256
EXERCISE_TOKENS = 10_000_000
LIBRARY_PASSES = 3
LONGEST_CHAT = 3
"""Exercises in one conversation, so that the target learns to go on after an answer."""


def chat_document(tokens: PreTrainedTokenizerBase, examples: list[Example]) -> Document:
    """Exercises as one conversation in the tokenizer's chat template; the answers, and where they end, are wanted."""
    ids: list[int] = []
    wanted: list[bool] = []
    for turn, example in enumerate(examples):
        question = f"<|user|>\n{example.prompt}<|end|>\n<|assistant|>\n"
        prompt = tokens.encode(("" if turn else "<|bos|>") + question, add_special_tokens=False)
        answer = tokens.encode(f"{example.answer}<|end|>", add_special_tokens=False)
        newline = tokens.encode("\n", add_special_tokens=False)
        ids += prompt + answer + newline
        wanted += [False] * len(prompt) + [True] * len(answer) + [False] * len(newline)
    return Document(ids, wanted)


def documents(tokens: PreTrainedTokenizerBase, *, exercise_tokens: int, library_passes: int, seed: int) -> Iterator[Document]:
    """The training text, exercises first; packed rows are shuffled when read."""
    rng = random.Random(seed)
    stream = corpus.examples("train", seed)
    count = 0
    while count < exercise_tokens:
        turns = rng.choice([1, 1, 1, *range(2, LONGEST_CHAT + 1)])
        document = chat_document(tokens, [next(stream) for _ in range(turns)])
        count += len(document.ids)
        yield document
    for number in range(library_passes):
        for text in corpus.stdlib_text("train"):
            # Each pass cuts the files at other places, so that it is not the same rows again.
            ids = tokens.encode("<|bos|>" + text, add_special_tokens=False)
            yield from (Document.text(part) for part in (ids[: 1 + number * ROW // library_passes], ids[1 + number * ROW // library_passes :]))


def target_config(vocabulary: int) -> LlamaConfig:
    """The demo's target: 7.1M parameters."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=4,
        pad_token_id=0,
    )


def train_target(folder: Path, work: Path, settings: LoopSettings) -> None:
    """Train the target and write it to `folder` in half precision."""
    tokens = AutoTokenizer.from_pretrained(folder)
    data = work / "target" / "data"
    if (data / "marks.npy").exists():
        rows = PackedRows(data)
    else:
        rows = pack(documents(tokens, exercise_tokens=EXERCISE_TOKENS, library_passes=LIBRARY_PASSES, seed=0), ROW, data)
    print(f"{len(rows)} rows of {ROW} tokens, {rows.wanted_tokens:,} wanted", file=sys.stderr, flush=True)
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(target_config(len(tokens)))
    Loop(Pretraining(model), rows, settings, work / "target").run()
    # float16 keeps three more bits of every weight than bfloat16, and the range is not needed.
    model.half().save_pretrained(folder)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m moa.demo.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "target"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "target", help="folder of the finished target and tokenizer")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for data and checkpoints (default: ./work)")
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    if args.stage == "tokenizer":
        demo_tokenizer.train(args.out)
    else:
        train_target(args.out, args.work, LoopSettings(steps=args.steps, batch=16, learning_rate=3e-3, warmup=100))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("moa.demo.train", main))
