"""A model's tokens as llguidance needs them.

It takes every added token of the form <...> for a special one, which no text contains: also those
that the tokenizer calls text, such as the `<tool_call>` of Qwen and Hermes. Then a grammar with
these characters demands a token that it does not take, and one of free text forbids it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from moa.grammar import vocabulary
from moa.grammar.vocabulary import Vocabulary
from moa.process.children import without_our_settings

Encode = Callable[[str], Sequence[int]]
"""The tokens of a text, without a start token."""
_PROGRAM = Path(vocabulary.__file__)
_READ = msgspec.msgpack.Decoder(Vocabulary)
_SECONDS = 60.0
"""Seconds by the clock for which a process that reads a tokenizer is waited for."""


class _Added(msgspec.Struct):
    """An added token of a `tokenizer.json`."""

    id: int
    content: str
    special: bool = False


class _File(msgspec.Struct):
    """What is read of a `tokenizer.json`."""

    added_tokens: list[_Added] = []
    normalizer: msgspec.Raw = msgspec.Raw(b"null")


_file_of = msgspec.json.Decoder(_File)


def tokens_of(
    content: str, *, size: int, eos_ids: Sequence[int], encode: Encode | None = None
) -> LLTokenizer:
    """Returns the tokens of a `tokenizer.json` with this content, for a model whose logits are over
    `size` tokens. A `ValueError` if llguidance cannot use it.

    `encode` is the same tokenizer, where this process has it loaded: then no second one stays in
    memory. It says how a text that must follow is divided, nothing else.
    """
    file = _file_of.decode(content)
    text = {one.id: one.content for one in file.added_tokens if not one.special and one.id < size}
    # llguidance leaves out what a normalizer puts before a text: what must follow has a text before
    # it. A tokenizer that is loaded elsewhere does not.
    if encode is not None and b'"Prepend"' not in bytes(file.normalizer):
        found = _read_elsewhere(vocabulary.Asked(content, size, list(eos_ids), text))
        if found is not None:
            return _wrapped(found, encode, size, eos_ids)
    tokens = vocabulary.opened(content, size=size, eos_ids=eos_ids)
    text = vocabulary.text_among(tokens, text)
    if not text:
        return tokens
    return _wrapped(vocabulary.read(tokens, size, text), tokens.tokenize_str, size, eos_ids)


def _wrapped(found: Vocabulary, encode: Encode, size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The tokens of a vocabulary, with this division of a text into them."""
    own = _OwnTokens(found, encode, eos_ids)
    wrapper = TokenizerWrapper(own)
    tokens = LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_ids))
    # It has copied them, and keeps the wrapper for its division.
    wrapper.tokens = own.tokens = []
    return tokens


def _read_elsewhere(asked: vocabulary.Asked) -> Vocabulary | None:
    """Have a process of its own read a tokenizer: what that takes of memory ends with it. None where
    a system lets no process start, or leaves it no time: then it is read here, for more memory."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM)],
            input=msgspec.msgpack.encode(asked),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=without_our_settings(),
            start_new_session=True,  # a Ctrl-C that stops an answer does not kill it
            timeout=_SECONDS,
            check=True,
        )
        found = _READ.decode(done.stdout)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return None
    if found.refused:
        raise ValueError(found.refused)
    return found


class _OwnTokens:
    """Tokens, and a tokenizer's division of a text into them: what `TokenizerWrapper` takes."""

    bos_token_id = None

    def __init__(self, found: Vocabulary, encode: Encode, eos_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_ids[0]
        self.tokens = found.contents
        self.special_token_ids = found.special
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens that the tokenizer makes of a text."""
        if not isinstance(text, str):  # the wrapper asks whether bytes are taken
            raise TypeError("a text is wanted")
        return list(self._encode(text))
