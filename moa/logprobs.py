"""Log-probabilities of the target's tokens: of each chosen token and of the likeliest others.

They are the target's own, before temperature, penalties and any filter. On the wire they are rows
of little-endian numbers, one row a token: the chosen token's, then the ids and log-probabilities of
the likeliest.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moa.errors import ProtocolError

MAX_TOP = 20
"""Most likeliest tokens that may be requested."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one token: its own, and (id, log-probability) of the likeliest, best
    first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def row_bytes(top: int) -> int:
    """The length of a row with so many likeliest tokens; 0 if none are requested (-1)."""
    if top < 0:
        return 0
    return 4 + 8 * top  # the chosen token's, then an id and a log-probability for each


def pack(chosen: NDArray[Any], ids: NDArray[Any], logprobs: NDArray[Any]) -> bytes:
    """The payload of log-probabilities `[tokens]` of the chosen tokens, and of ids and
    log-probabilities `[tokens, top]` of the likeliest."""
    rows = np.empty(len(chosen), dtype=_row(ids.shape[1]))
    rows["chosen"] = chosen
    rows["ids"] = ids
    rows["logprobs"] = logprobs
    return rows.tobytes()


def unpack(payload: bytes, top: int, vocab_size: int) -> list[TokenLogprobs]:
    """Read a received payload of log-probabilities: a row for each token, with `top` likeliest
    ones. A `ProtocolError` if it is no such rows, or holds what no log-probability or token can
    be."""
    if top < 0 or len(payload) % row_bytes(top):
        raise ProtocolError(f"{len(payload)} bytes are no rows of log-probabilities")
    rows = np.frombuffer(payload, dtype=_row(top))
    numbers = np.concatenate([rows["chosen"], rows["logprobs"].reshape(-1)])
    are_logprobs = (numbers <= 0.0).all()  # NaN compares false
    if not are_logprobs or (rows["ids"] >= vocab_size).any():
        raise ProtocolError("log-probabilities above 0, or of tokens that there are not")
    found: list[TokenLogprobs] = []
    for row in rows:
        best = zip(row["ids"].tolist(), row["logprobs"].tolist(), strict=True)
        found.append(TokenLogprobs(float(row["chosen"]), tuple(best)))
    return found


def _row(top: int) -> np.dtype[Any]:
    """The layout of a row."""
    return np.dtype([("chosen", "<f4"), ("ids", "<u4", (top,)), ("logprobs", "<f4", (top,))])
