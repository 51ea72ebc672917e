"""Prepare the witness: `python -m benchmarks.witness FOLDER`; then `moa-train FOLDER ...` and every other command."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.witness.gguf_model import TERMS, Words, gguf_file, read_model, trimmed
from demo import natural
from moa.errors import UsageError, run_cli

_CODE, _ENGLISH, _HELD_OUT = 1200, 6000, 12
"""Texts of each kind that the vocabulary is chosen by, and held-out texts of each kind to check it with."""
_CHECKED_TOKENS = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, prepare, check, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.witness", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the model that is written")
    parser.add_argument("--vocabulary", type=int, default=32768, help="words that it keeps (default 32768)")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise UsageError(f"{args.out} exists", hint="remove it, or choose another folder")
    file = gguf_file()
    print(TERMS, file=sys.stderr)
    words, model = Words.of(file), read_model(file)
    texts = chain(islice(natural.code("train"), _CODE), islice(natural.english("train"), _ENGLISH))
    small, kept = trimmed(model, words, texts, args.vocabulary)
    whole, tokenizer = words.tokenizer(), kept.tokenizer()
    held_out = [*islice(natural.code("heldout"), _HELD_OUT), *islice(natural.english("heldout"), _HELD_OUT)]
    if any(tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) != text for text in held_out):
        raise UsageError("the trimmed tokenizer does not give texts back", hint="this is a defect: please report it")
    before = statistics.fmean(nats_per_character(model, whole, text) for text in held_out)
    after = statistics.fmean(nats_per_character(small, tokenizer, text) for text in held_out)
    print(f"{len(kept.pieces)} words; held-out text: {after:.3f} nats a character, {before:.3f} with all words")
    small.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    return 0


def nats_per_character(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str) -> float:
    """Loss by characters: comparable between vocabularies."""
    ids = torch.tensor([tokenizer(text).input_ids[:_CHECKED_TOKENS]])
    with torch.inference_mode():
        likely = model(ids).logits.log_softmax(-1)
    chosen = likely[0, :-1].gather(-1, ids[0, 1:, None])
    return -float(chosen.sum()) / len(tokenizer.decode(ids[0, 1:]))


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.witness", main))
