"""Tokenizers rebuilt from GGUF files, against llama.cpp's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moa.errors import UnsupportedModelError, UsageError
from moa.gguf.reader import GgufHead
from moa.gguf.tokenizer import tokenizer_of
from moa.llama.library import find, load
from moa.llama.runtime import Vocabulary
from testing import gguf_tiny

_CONTROL = 3
_USER_DEFINED = 4
SPECIAL = ["<|im_start|>", "<|im_end|>"]
ADDED = "<tool_call>"
ALPHABETS = [
    "abcdefghij déjà vu 0123456789 ",
    "مرحبا بالعالم ١٢٣",
    "שלום עולם",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪",
    "漢字かな交じり文한국어",
    " \t\n\r\u00a0\u3000",
    "{}[]();:'\"\\`~!@#$%^&*",
    "हिन्दी தமிழ்",
    "'s 'T 'RE \u02bcs it's I'LL",
]


def trained() -> Tokenizer:
    """A byte-level tokenizer of some hundred merges, learnt from this very folder."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    core.train_from_iterator([*texts, *ALPHABETS * 4], trainer)
    return core


def byte_level(rule: str) -> dict[str, Any]:
    """What a file of this rule says."""
    import json

    model = json.loads(trained().to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [1] * len(pieces)
    pieces += [*SPECIAL, ADDED]
    kinds += [_CONTROL] * len(SPECIAL) + [_USER_DEFINED]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(pieces) - 3,
        "tokenizer.ggml.eos_token_id": len(pieces) - 2,
    }


def head_of(metadata: dict[str, Any]) -> GgufHead:
    return GgufHead(Path("a.gguf"), metadata, ())


def lines(count: int) -> list[str]:
    """Text of many scripts, and special tokens that somebody types."""
    rng = random.Random(0)
    found = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    for _ in range(count):
        pieces = []
        for _ in range(rng.randrange(1, 50)):
            if rng.random() < 0.05:
                pieces.append(rng.choice([*SPECIAL, ADDED]))
            pieces.append(rng.choice(rng.choice(ALPHABETS)))
        found.append("".join(pieces))
    return found


@pytest.mark.parametrize(
    "rule",
    ["llama-bpe", "qwen2", "qwen35", "gpt-2", "smollm", "tekken", "gpt-4o", "deepseek-v3"],
)
def test_its_tokens_are_those_of_llama_cpp(rule: str, tmp_path: Path) -> None:
    gguf_tiny.need_llama()
    metadata = byte_level(rule)
    file = gguf_tiny.save_vocabulary(tmp_path / "words.gguf", metadata)
    with Vocabulary(load(find()), file) as truth:
        ours = tokenizer_of(head_of(metadata)).core
        texts = lines(400)
        if rule in ("tekken", "gpt-4o"):
            # llama.cpp's form of these two leaves out the marks that their makers' rules have.
            texts = ["".join(c for c in line if category(c)[0] != "M") for line in texts]
        wrong = [line for line in texts if ours.encode(line).ids != truth.tokenize(line)]
    assert not wrong, wrong[:3]


def test_special_tokens_and_the_template_are_found() -> None:
    metadata = byte_level("llama-bpe") | {"tokenizer.chat_template": "{{ messages }}"}
    made = tokenizer_of(head_of(metadata))
    assert (made.begin, made.end, made.padding) == ("<|im_start|>", "<|im_end|>", None)
    assert made.chat_template == "{{ messages }}"
    assert made.core.encode("a").tokens == ["<|im_start|>", "a"], "this rule begins texts"
    assert made.core.encode("a", add_special_tokens=False).tokens == ["a"]
    text = f"é {ADDED} 😀"
    ids = made.core.encode(text, add_special_tokens=False).ids
    assert made.core.decode(ids, skip_special_tokens=False) == text
    quiet = metadata | {"tokenizer.ggml.add_bos_token": False}
    assert tokenizer_of(head_of(quiet)).core.encode("a").tokens == ["a"]


def test_sentence_pieces_merge_by_score_and_fall_back_on_bytes() -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    words = ["\u2581", "t", "h", "e", "th", "he", "the", "\u2581the"]
    scores = [0.0] * len(pieces) + [-9.0, -8.0, -7.0, -6.0, -3.0, -2.0, -1.0, -0.5]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.token_type": [*kinds, *[1] * len(words)],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    core = tokenizer_of(head_of(metadata)).core
    assert core.encode("the the").tokens == ["<s>", "\u2581", "t", "he", "\u2581", "t", "he"] or (
        core.encode("the the").tokens == ["<s>", "\u2581the", "\u2581the"]
    )
    assert core.encode("é").tokens[-2:] == ["<0xC3>", "<0xA9>"]
    assert core.decode(core.encode("the é").ids) == "the é"


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"tokenizer.ggml.pre": "new-rule"}, UnsupportedModelError, "by the rule 'new-rule'"),
        ({"tokenizer.ggml.model": "rwkv"}, UnsupportedModelError, "of type 'rwkv'"),
        ({"tokenizer.ggml.tokens": []}, UsageError, "no vocabulary"),
        ({"tokenizer.ggml.tokens": [1, 2]}, UsageError, "items of one type"),
        ({"tokenizer.ggml.token_type": [1]}, UsageError, "types of 1"),
        ({"tokenizer.ggml.merges": ["ab"]}, UsageError, "'ab' is no merge"),
        ({"tokenizer.ggml.merges": ["no where"]}, UsageError, "damaged vocabulary"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_with_a_line(
    change: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        tokenizer_of(head_of(byte_level("qwen2") | change))


def test_a_vocabulary_with_a_text_twice_keeps_its_ids() -> None:
    metadata = byte_level("qwen2")
    pieces = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [*pieces, "a"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    core = tokenizer_of(head_of(metadata)).core
    assert core.get_vocab_size() == len(pieces) + 1
    assert core.encode("a").ids == [pieces.index("a")]
