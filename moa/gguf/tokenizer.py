"""Makes a `tokenizers.Tokenizer` of what a GGUF file says of its vocabulary. No torch.

A file names the rule by which text is cut into words before merges (`tokenizer.ggml.pre`), and not
the rule itself: those of the usual families are here. A file whose rule is not known is refused,
because another rule would give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from moa.errors import UnsupportedModelError, UsageError
from moa.gguf.reader import GgufHead

_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6
"""Kinds of token."""
_SPACE = "\u2581"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DIGITS_APART = (r"\p{N}", _GPT2)


@dataclass(frozen=True)
class _Words:
    """How text becomes words."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """Whether a word that is in the vocabulary is taken without looking at merges."""
    begins: bool = False
    """Whether a text begins with the begin token where the file does not say."""
    composed: bool = False
    """Whether the family's tokenizer composes characters first (NFC). The file does not say it."""


_RULES: Mapping[str, _Words] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _Words((_LLAMA3,), whole_words=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _Words((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), _Words((_LLAMA3,), whole_words=True)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
        _Words((_QWEN2,), composed=True),
    ),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _Words((_QWEN2,))),
    "qwen35": _Words((_QWEN35,), composed=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _Words(_DEEPSEEK3)),
    "tekken": _Words((_TEKKEN,), whole_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _Words((_GPT4O,))),
    **dict.fromkeys(
        (
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ),
        _Words(_DIGITS_APART),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat"),
        _Words((_GPT2,)),
    ),
}
"""By `tokenizer.ggml.pre`."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer, and its special tokens by what they are for."""

    core: Tokenizer
    begin: str | None
    end: str | None
    padding: str | None
    unknown: str | None
    chat_template: str | None

    @property
    def json(self) -> str:
        """As a `tokenizer.json`."""
        return str(self.core.to_str())


def tokenizer_of(head: GgufHead) -> GgufTokenizer:
    """The tokenizer of a file; an error of one line where it cannot be rebuilt."""
    pieces = _distinct(head.array("tokenizer.ggml.tokens", str))
    if not pieces:
        raise UsageError(f"{head.path} has no vocabulary")
    kinds = head.array("tokenizer.ggml.token_type", int) or [_NORMAL] * len(pieces)
    if len(kinds) != len(pieces):
        raise UsageError(f"{head.path} is damaged: {len(pieces)} tokens, and types of {len(kinds)}")
    model = head.text("tokenizer.ggml.model")
    if model == "gpt2":
        core, begins = _byte_level(head, pieces)
    elif model == "llama":
        core, begins = _sentence_pieces(head, pieces, kinds)
    else:
        raise UnsupportedModelError(
            f"{head.path} has a tokenizer of type {model[:40]!r}, which is not known here"
        )
    _add_special(core, pieces, kinds)
    names = {
        use: _named(head, f"tokenizer.ggml.{use}_token_id", pieces)
        for use in ("bos", "eos", "padding", "unknown")
    }
    if (begin := names["bos"]) is not None and head.flag("tokenizer.ggml.add_bos_token", begins):
        core.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin} $B",
            special_tokens=[(begin, pieces.index(begin))],
        )
    template = head.metadata.get("tokenizer.chat_template")
    return GgufTokenizer(
        core=core,
        begin=names["bos"],
        end=names["eos"],
        padding=names["padding"],
        unknown=names["unknown"],
        chat_template=template if isinstance(template, str) else None,
    )


def _distinct(pieces: Sequence[str]) -> list[str]:
    """Each token once: of two with one text, only the first can be written."""
    seen: set[str] = set()
    found = []
    for i, piece in enumerate(pieces):
        name = piece
        if name in seen:
            name = f"{piece}<{i}>"
        seen.add(name)
        found.append(name)
    return found


def _byte_level(head: GgufHead, pieces: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Merges over bytes, as GPT-2 began it."""
    name = head.text("tokenizer.ggml.pre", "")
    rule = _RULES.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"{head.path} cuts words by the rule {name[:40] or 'default'!r}, which is not known here"
        )
    merges = []
    for merge in head.array("tokenizer.ggml.merges", str):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise UsageError(f"{head.path} is damaged: {merge[:40]!r} is no merge")
        merges.append((merge[:cut], merge[cut + 1 :]))
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    core = Tokenizer(_bpe(head, vocabulary, merges, ignore_merges=rule.whole_words))
    if rule.composed:
        core.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    return core, rule.begins


def _sentence_pieces(
    head: GgufHead, pieces: Sequence[str], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """Merges over characters with the bytes to fall back on, as SentencePiece has them: the score
    of what two pieces make decides which are merged first."""
    scores = head.array("tokenizer.ggml.scores", (int, float))
    if len(scores) != len(pieces):
        raise UsageError(
            f"{head.path} is damaged: {len(pieces)} tokens, and scores of {len(scores)}"
        )
    ids = {piece: i for i, piece in enumerate(pieces)}
    found = [
        (-scores[i], cut, piece)
        for i, piece in enumerate(pieces)
        if kinds[i] in (_NORMAL, _USER_DEFINED)
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    merges = [(piece[:cut], piece[cut:]) for _, cut, piece in sorted(found)]
    unknown = _named(head, "tokenizer.ggml.unknown_token_id", pieces)
    if unknown is None and _UNKNOWN in kinds:
        unknown = pieces[kinds.index(_UNKNOWN)]
    core = Tokenizer(_bpe(head, ids, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    prefixed = head.flag("tokenizer.ggml.add_space_prefix", True)
    replaced = normalizers.Replace(" ", _SPACE)
    core.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if prefixed else replaced
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    core.decoder = decoders.Sequence(steps)
    return core, True


def _bpe(
    head: GgufHead, vocabulary: dict[str, int], merges: list[tuple[str, str]], **how: Any
) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **how)
    except Exception as error:  # `tokenizers` raises bare exceptions for a merge of no token
        raise UsageError(f"{head.path} has a damaged vocabulary: {error}") from None


def _add_special(core: Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    """Tokens that text never merges into: marks of a conversation, and what a model's makers added
    to its vocabulary."""
    special = (_CONTROL, _UNKNOWN)
    marks = [
        AddedToken(piece, normalized=False, special=kind in special)
        for piece, kind in zip(pieces, kinds, strict=True)
        if kind in (*special, _USER_DEFINED) and piece
    ]
    core.add_special_tokens([mark for mark in marks if mark.special])
    core.add_tokens([mark for mark in marks if not mark.special])


def _named(head: GgufHead, key: str, pieces: Sequence[str]) -> str | None:
    if not head.has(key):
        return None
    number = head.number(key)
    return pieces[number] if 0 <= number < len(pieces) else None
