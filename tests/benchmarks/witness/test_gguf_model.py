"""The witness's tokenizer is byte-pair encoding by rank, and a trimmed model computes what the
whole one does."""

from __future__ import annotations

import torch

from benchmarks.witness.gguf_model import SPECIAL, Words, trimmed
from testing.tiny import tiny

SPACE = "\u2581"
PIECES = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "th",
    "in",
    "the",
    f"{SPACE}th",
    f"{SPACE}the",
    "ing",
    *"thein gca",
    SPACE,
)
BYTES = range(len(SPECIAL), len(SPECIAL) + 256)


def some_words() -> Words:
    return Words(PIECES, tuple(3 if i < 4 else 6 if i in BYTES else 1 for i in range(len(PIECES))))


def test_merges_are_by_the_rank_of_what_they_make() -> None:
    tokenizer = some_words().tokenizer()
    # A unigram model would weigh whole paths; here "th" (the lowest rank) is made first, then
    # "the".
    assert tokenizer.convert_ids_to_tokens(tokenizer("the thing").input_ids) == [
        "<bos>",
        "the",
        f"{SPACE}th",
        "ing",
    ]
    assert (
        tokenizer.decode(tokenizer("the cat: ä", add_special_tokens=False).input_ids)
        == "the cat: ä"
    )


def test_a_trimmed_model_keeps_bytes_and_frequent_words_and_computes_the_same() -> None:
    words = some_words()
    model = tiny("gemma3", vocab_size=len(PIECES))
    small, kept = trimmed(model, words, ["the thing " * 3], vocabulary=len(SPECIAL) + 256 + 13)
    assert set(SPECIAL) <= set(kept.pieces)
    assert "the" in kept.pieces
    assert "c" not in kept.pieces
    whole = words.tokenizer()
    part = kept.tokenizer()
    ids, fewer = (torch.tensor([t("the thing").input_ids]) for t in (whole, part))
    assert whole.convert_ids_to_tokens(ids[0]) == part.convert_ids_to_tokens(fewer[0])
    with torch.inference_mode():
        logits, theirs = small(fewer).logits, model(ids).logits
    chosen = [PIECES.index(piece) for piece in kept.pieces]
    torch.testing.assert_close(logits, theirs[..., chosen])
