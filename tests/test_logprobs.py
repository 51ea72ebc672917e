"""Rows of log-probabilities: what is packed is unpacked, and nothing else is taken for them."""

from __future__ import annotations

import numpy as np
import pytest

from moa.errors import ProtocolError
from moa.logprobs import TokenLogprobs, pack, row_bytes, unpack


def packed(chosen: float = -0.5, id: int = 7, best: float = -0.25) -> bytes:
    return pack(np.array([chosen]), np.array([[id, 3]]), np.array([[best, -2.0]]))


def test_rows_are_read_as_they_were_written() -> None:
    assert unpack(packed() * 2, 2, 128) == [TokenLogprobs(-0.5, ((7, -0.25), (3, -2.0)))] * 2
    assert len(packed()) == row_bytes(2)
    alone = pack(np.array([-1.0]), np.empty((1, 0)), np.empty((1, 0)))
    assert unpack(alone, 0, 128) == [TokenLogprobs(-1.0)]


@pytest.mark.parametrize(
    "payload", [packed()[:-1], packed(chosen=0.5), packed(best=float("nan")), packed(id=128)]
)
def test_what_cannot_be_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(payload, 2, 128)


def test_nobody_is_told_what_he_did_not_ask_for() -> None:
    with pytest.raises(ProtocolError):
        unpack(packed(), -1, 128)
    assert row_bytes(-1) == 0
