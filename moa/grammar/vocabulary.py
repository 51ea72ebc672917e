"""The bytes of each token of a tokenizer, read in a process of its own.

llguidance keeps what it reads them from, a tokenizer that takes 100 MB for 150,000 words, for as
long as it has the tokens. A process that has a tokenizer already needs no second one: as a program
this reads it, tells the bytes, and ends (`tokens.py` runs it). Imports nothing of this project, so
that it starts in a tenth of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import msgspec
from llguidance import LLTokenizer


class Vocabulary(msgspec.Struct):
    """Tokens, or why they cannot be told."""

    contents: list[bytes] = []
    """The bytes of each token."""
    special: list[int] = []
    """Those that no text contains."""
    refused: str = ""
    """Why the tokenizer is of no use; empty if it is."""


class Asked(msgspec.Struct):
    """What the program is to read."""

    content: str
    """Of a `tokenizer.json`."""
    size: int
    """Tokens of the model's logits."""
    eos_ids: list[int]
    text: dict[int, str]
    """Tokens that stand for a text, whatever llguidance takes them for."""


def read(tokens: LLTokenizer, size: int, text: Mapping[int, str]) -> Vocabulary:
    """The bytes of the first `size` of these tokens, of which those of `text` stand for this
    text."""
    found = Vocabulary()
    for token in range(size):
        content = tokens.decode_bytes([token])
        if token in text:
            content = text[token].encode()
        elif not content or tokens.is_special_token(token):
            # One without bytes, as of a vocabulary that is longer than the tokenizer's, would get
            # some of its own.
            found.special.append(token)
        found.contents.append(content)
    return found


def text_among(tokens: LLTokenizer, added: Mapping[int, str]) -> dict[int, str]:
    """Of added tokens that are text those that llguidance takes for special ones."""
    return {token: text for token, text in added.items() if tokens.is_special_token(token)}


_ASKED = msgspec.msgpack.Decoder(Asked)


def opened(content: str, *, size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's own reading of a `tokenizer.json`; a `ValueError` if it cannot use it."""
    return LLTokenizer(content, n_vocab=size, eos_token=list(eos_ids))


def answer(question: bytes) -> bytes:
    """What the program writes for what it has read."""
    asked = _ASKED.decode(question)
    try:
        tokens = opened(asked.content, size=asked.size, eos_ids=asked.eos_ids)
        found = read(tokens, asked.size, text_among(tokens, asked.text))
    except ValueError as error:
        found = Vocabulary(refused=str(error))
    return msgspec.msgpack.encode(found)


def serve(question: BinaryIO, out: BinaryIO) -> None:
    """Answer the question of standard input."""
    out.write(answer(question.read()))
    out.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
