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


def scored(told: TokenLogprobs, token: int, text: Callable[[int], str]) -> Scored:
    """A token's log-probabilities with the texts of ids."""
    top = tuple((text(id), max(_LEAST, logprob)) for id, logprob in told.top)
    return Scored(text(token), max(_LEAST, told.logprob), top)


def chat(entries: Sequence[Scored]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": parts(entries), "refusal": None}


def completion(entries: Sequence[Scored], offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion whose text begins at this offset."""
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
    return [
        msgspec.Raw(
            msgspec.json.encode(
                _part(entry.token, entry.logprob)
                | {"top_logprobs": [_part(*other) for other in entry.top]}
            )
        )
        for entry in entries
    ]


def _part(token: str, logprob: float) -> dict[str, Any]:
    # Half of a character has no text of its own, and so no bytes that we could tell.
    return {
        "token": token,
        "logprob": logprob,
        "bytes": None if "\ufffd" in token else list(token.encode()),
    }
