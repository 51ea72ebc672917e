"""A model's tokens as llguidance needs them.

It takes every added token of the form <...> for a special one, which no text contains: also those
that the tokenizer calls text, such as the `<tool_call>` of Qwen and Hermes. Then a grammar with
these characters demands a token that it does not take, and one of free text forbids it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper


class _Added(msgspec.Struct):
    """An added token of a `tokenizer.json`."""

    id: int
    content: str
    special: bool = False


class _File(msgspec.Struct):
    """What is read of a `tokenizer.json`."""

    added_tokens: list[_Added] = []


_file_of = msgspec.json.Decoder(_File)


def tokens_of(content: str, *, size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Returns the tokens of a `tokenizer.json` with this content, for a model whose logits are over
    `size` tokens. A `ValueError` if llguidance cannot use it."""
    eos = list(eos_ids)
    tokens = LLTokenizer(content, n_vocab=size, eos_token=eos)
    added = _file_of.decode(content).added_tokens
    text = {
        one.id: one.content
        for one in added
        if not one.special and one.id < size and tokens.is_special_token(one.id)
    }
    if not text:
        return tokens
    own = TokenizerWrapper(_OwnTokens(tokens, size, eos, text))
    return LLTokenizer(own, n_vocab=size, eos_token=eos)


class _OwnTokens:
    """The tokens of another tokenizer, of which some are text: what `TokenizerWrapper` takes."""

    bos_token_id = None

    def __init__(
        self, tokens: LLTokenizer, size: int, eos_ids: Sequence[int], text: dict[int, str]
    ) -> None:
        """Take the first `size` of these tokens, of which those of `text` stand for this text."""
        self._tokens = tokens
        self.eos_token_id = eos_ids[0]
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for token in range(size):
            content = tokens.decode_bytes([token])
            if token in text:
                content = text[token].encode()
            elif not content or tokens.is_special_token(token):
                # One without bytes, as of a vocabulary that is longer than the tokenizer's, would
                # get some of its own.
                self.special_token_ids.append(token)
            self.tokens.append(content)

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the tokens that the tokenizer makes of a text."""
        if isinstance(text, bytes):
            return self._tokens.tokenize_bytes(text)
        return self._tokens.tokenize_str(text)
