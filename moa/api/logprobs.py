"""Log-probabilities as each route of the API writes them. Every entry is of a token that the target
has verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moa.api.answer import Scored
from moa.logprobs import TokenLogprobs

_LEAST = -9999.0
"""What OpenAI writes for a token that is hardly possible; JSON knows no infinity."""


def scored(logprobs: TokenLogprobs, token: int, text: Callable[[int], str]) -> Scored:
    """A token's log-probabilities with the texts of ids."""
    top = tuple((text(id), max(_LEAST, logprob)) for id, logprob in logprobs.top)
    return Scored(text(token), max(_LEAST, logprobs.logprob), top)


def chat(entries: Sequence[Scored]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": parts(entries), "refusal": None}


def completion(entries: Sequence[Scored], offset: int = 0) -> dict[str, Any]:
    """Log-probabilities of tokens as OpenAI's completions have them in `choices[].logprobs`. The
    text of these tokens begins at character `offset` of the answer."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [dict(entry.top) for entry in entries],
        "text_offset": offsets,
    }


def parts(entries: Sequence[Scored]) -> list[msgspec.Raw]:
    """A list of tokens, as chats and responses have it; as JSON, because responses repeat it
    several times."""
    return [_encoded(entry) for entry in entries]


def _encoded(entry: Scored) -> msgspec.Raw:
    """A token's entry as JSON."""
    part = _part(entry.token, entry.logprob)
    part["top_logprobs"] = [_part(token, logprob) for token, logprob in entry.top]
    return msgspec.Raw(msgspec.json.encode(part))


def _part(token: str, logprob: float) -> dict[str, Any]:
    """What an entry says of a token."""
    # Half of a character has no text of its own, and so no bytes that we could tell.
    is_incomplete = "\ufffd" in token
    return {
        "token": token,
        "logprob": logprob,
        "bytes": None if is_incomplete else list(token.encode()),
    }
