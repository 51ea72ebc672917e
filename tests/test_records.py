from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moa import records
from moa.errors import ProtocolError

TOLERANCE = {"fp16": 1e-3, "int8": 1 / 127, "int4": 1 / 7}


@pytest.mark.parametrize("dtype", records.DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim"), [(1, 1, 2), (3, 2, 16), (7, 4, 64), (0, 2, 16)]
)
def test_round_trip_is_within_half_a_level(
    dtype: records.PayloadDtype, rows: int, heads: int, head_dim: int
) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, rows, heads, head_dim)).astype(np.float32) * 3
    payload = records.encode(keys, values, dtype)
    assert len(payload) == rows * records.row_bytes(dtype, heads, head_dim)
    for sent, got in zip(
        (keys, values), records.decode(payload, dtype, rows, heads, head_dim), strict=True
    ):
        assert got.dtype == np.float32
        assert got.shape == sent.shape
        bound = np.abs(sent).max(axis=-1, keepdims=True) * TOLERANCE[dtype] * 0.51 + 1e-6
        assert (np.abs(got - sent) <= bound).all()


@pytest.mark.parametrize("dtype", records.DTYPES)
def test_extremes_neither_overflow_nor_turn_into_nan_and_spoil_no_other_row(
    dtype: records.PayloadDtype,
) -> None:
    keys = np.array(
        [[[0.0, 0.0]], [[1e30, -1e30]], [[1e-30, 0.0]], [[0.3, -2.0]]], dtype=np.float32
    )
    got, _ = records.decode(records.encode(keys, keys, dtype), dtype, 4, 1, 2)
    assert np.isfinite(got).all()
    assert (got[0] == 0).all()
    assert got[1, 0, 0] > 0 > got[1, 0, 1]
    alone, _ = records.decode(records.encode(keys[3:], keys[3:], dtype), dtype, 1, 1, 2)
    np.testing.assert_array_equal(got[3:], alone)


@pytest.mark.parametrize(
    ("payload", "dtype", "rows", "message"),
    [
        (b"abc", "int8", 2, "3 bytes for 2 int8 records"),
        (b"", "int3", 0, "unknown record precision"),
    ],
)
def test_another_size_or_precision_is_refused(
    payload: bytes, dtype: Any, rows: int, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        records.decode(payload, dtype, rows, 1, 2)


@pytest.mark.parametrize("dtype", records.DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_refused(dtype: records.PayloadDtype, bad: float) -> None:
    rows = np.ones((2, 1, 32), dtype=np.float32)
    payload = bytearray(records.encode(rows, rows, dtype))
    payload[-2:] = np.float16(bad).tobytes()  # a scale, or a number itself
    with pytest.raises(ProtocolError, match="NaN or Inf"):
        records.decode(bytes(payload), dtype, 2, 1, 32)
