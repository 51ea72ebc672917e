"""The protocol's version, its optional features, and how two ends agree on both.

Four rules let old and new ends talk (`docs/wire-protocol.md` explains them):

1. A field is only ever added at the end of a message, with a default that means "as before".
2. A field is never removed, moved or given another type; one that is no longer needed keeps its
   place.
3. The tag of a message is never used again for another.
4. What an old end could not understand is sent only after a feature named for it was agreed in
   hello and welcome.

Breaking one of them needs a new protocol version.
"""

from __future__ import annotations

from collections.abc import Collection

PROTOCOL_VERSIONS = (3,)
"""Supported versions, best first."""

FEATURES = frozenset(
    {
        "records",
        "resume",
        "append",
        "logprobs",
        "foresee",
        "grammar",
        "progress",
        "penalties",
        "messages",
        "behind",
    }
)
"""Optional abilities of this code: activation records, resuming, further turns,
log-probabilities, guesses at what a stream will bring, answers that match a grammar, news of a
round that takes long, penalties and biases, conversations told as messages beside their tokens, and
news of an engine behind the verifier."""

SUBPROTOCOL = "moa.v3"
"""The websocket subprotocol offered in the handshake, so that a proxy or an unrelated server is
noticed at once."""

TOKEN_SUBPROTOCOL = "moa.token."
"""A second subprotocol, which carries the token of a web page: scripts cannot set headers."""

SESSION_HEADER = "X-Session-Id"
"""Header of the handshake with a random key that a client keeps: a proxy passes equal keys to the
same of several verifiers, the one that still has the client's sessions."""


def agree_version(offered: Collection[int]) -> int | None:
    """The best version that both ends speak, or None."""
    return next((version for version in PROTOCOL_VERSIONS if version in offered), None)


def agree_features(offered: Collection[str], *, without: Collection[str] = ()) -> list[str]:
    """The features that both ends have, sorted; unknown ones are ignored."""
    return sorted((FEATURES & set(offered)) - set(without))
