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
    """Rebuild a model's tokenizer from the metadata of its GGUF file, with its special tokens and
    chat template; an error of one line where the file is damaged, or cuts words by an unknown
    rule."""
    pieces = _distinct(head.array("tokenizer.ggml.tokens", str))
    if not pieces:
        raise UsageError(f"{head.path} has no vocabulary")
    # A kind for each token: normal, control, a single byte, ...
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
    # `begins` is for a file that does not say whether texts start with the begin token.
    begin = _named(head, "tokenizer.ggml.bos_token_id", pieces)
    if begin is not None and head.flag("tokenizer.ggml.add_bos_token", begins):
        core.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin} $B",
            special_tokens=[(begin, pieces.index(begin))],
        )
    template = head.metadata.get("tokenizer.chat_template")
    return GgufTokenizer(
        core=core,
        begin=begin,
        end=_named(head, "tokenizer.ggml.eos_token_id", pieces),
        padding=_named(head, "tokenizer.ggml.padding_token_id", pieces),
        unknown=_named(head, "tokenizer.ggml.unknown_token_id", pieces),
        chat_template=template if isinstance(template, str) else None,
    )


def _distinct(pieces: Sequence[str]) -> list[str]:
    """The tokens' texts, each once: a later token with the text of an earlier one gets its id behind
    it. No text is ever encoded to such a token, but ids must not move."""
    seen: set[str] = set()
    distinct = []
    for token, piece in enumerate(pieces):
        name = piece
        if name in seen:
            name = f"{piece}<{token}>"
        seen.add(name)
        distinct.append(name)
    return distinct


def _byte_level(head: GgufHead, pieces: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Make a tokenizer that merges bytes to tokens, as GPT-2's does. Returns it, and whether a text
    begins with the begin token if the file does not say."""
    name = head.text("tokenizer.ggml.pre", "")
    rule = _RULES.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"{head.path} cuts words by the rule {name[:40] or 'default'!r}, which is not known here"
        )
    merges = []
    for merge in head.array("tokenizer.ggml.merges", str):
        space = merge.find(" ", 1)  # a space at the very beginning is a part of the first piece
        if space < 0:
            raise UsageError(f"{head.path} is damaged: {merge[:40]!r} is no merge")
        merges.append((merge[:space], merge[space + 1 :]))
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
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
    """Make a tokenizer that merges characters to tokens, as SentencePiece does, and falls back on
    bytes for characters that it does not know. Returns it, and whether a text begins with the begin
    token if the file does not say: it does."""
    scores = head.array("tokenizer.ggml.scores", (int, float))
    if len(scores) != len(pieces):
        raise UsageError(
            f"{head.path} is damaged: {len(pieces)} tokens, and scores of {len(scores)}"
        )
    ids = {piece: token for token, piece in enumerate(pieces)}
    merges = _merges_by_score(ids, kinds, scores)
    unknown = _named(head, "tokenizer.ggml.unknown_token_id", pieces)
    if unknown is None and _UNKNOWN in kinds:
        unknown = pieces[kinds.index(_UNKNOWN)]
    core = Tokenizer(_bpe(head, ids, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    mark_spaces: Any = normalizers.Replace(" ", _SPACE)
    if head.flag("tokenizer.ggml.add_space_prefix", True):
        mark_spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), mark_spaces])
        steps.append(decoders.Strip(" ", 1, 0))  # the space that was put before the text
    core.normalizer = mark_spaces
    core.decoder = decoders.Sequence(steps)
    return core, True


def _merges_by_score(
    ids: Mapping[str, int], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third one, in the order in which they are merged: by the score
    of what they make, the best first. SentencePiece's files have no merges, only the scores."""
    found = []
    for piece, token in ids.items():
        if kinds[token] not in (_NORMAL, _USER_DEFINED):
            continue
        for cut in range(1, len(piece)):
            if piece[:cut] in ids and piece[cut:] in ids:
                found.append((-scores[token], cut, piece))
    return [(piece[:cut], piece[cut:]) for _, cut, piece in sorted(found)]


def _bpe(
    head: GgufHead, vocabulary: dict[str, int], merges: list[tuple[str, str]], **how: Any
) -> models.BPE:
    """The model of merges over a vocabulary; a `UsageError` where they do not fit each other."""
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **how)
    except Exception as error:  # `tokenizers` raises bare exceptions for a merge of no token
        raise UsageError(f"{head.path} has a damaged vocabulary: {error}") from None


def _add_special(core: Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    """Add the tokens that text never merges into: special ones, such as the marks of a conversation,
    which decoding may leave out, and others that a model's makers added to its vocabulary."""
    special = []
    others = []
    for piece, kind in zip(pieces, kinds, strict=True):
        if not piece:
            continue  # there is no text to find
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(piece, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            others.append(AddedToken(piece, normalized=False, special=False))
    core.add_special_tokens(special)
    core.add_tokens(others)


def _named(head: GgufHead, key: str, pieces: Sequence[str]) -> str | None:
    """The text of the token whose id an entry gives; None without the entry, or such a token."""
    if not head.has(key):
        return None
    token = head.number(key)
    if not 0 <= token < len(pieces):
        return None
    return pieces[token]
