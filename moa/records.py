"""Activation records on the wire: keys and values of a run of positions, as fp16, int8 or int4.
Numpy only.

A record holds CA's heads, and with borrowed target layers (TLI) those of each of these layers too.
Heads of different widths are cut into equal pieces, so that on the wire all records are `heads x
head_dim` (`RecordLayout`).

A payload holds four planes: keys, values, key scales, value scales (fp16 has no scales).
Quantization is symmetric; a scale belongs to a head of a row (int8) or to a group of 32 numbers in
it (int4, whose 15 levels need finer scales).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moa.errors import ConfigError, ProtocolError

PayloadDtype = Literal["int8", "int4", "fp16"]
DTYPES: tuple[PayloadDtype, ...] = ("int8", "int4", "fp16")
"""Precisions of a record, the default first."""

_INT4_GROUP = 32
"""Numbers of a head that share a scale in int4, where the head's width allows it."""
_LARGEST_LEVEL = {"int8": 127, "int4": 7}
_FP16_MAX = 65504
"""The largest number that fp16 has."""

FloatRows = NDArray[np.float32]


@dataclass(frozen=True)
class RecordLayout:
    """What a record holds: (heads, width) of CA, then of every borrowed layer."""

    parts: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Width of a piece: a head's, or what heads of different widths have in common."""
        return math.gcd(*(width for _, width in self.parts))

    @property
    def count(self) -> int:
        """Pieces of a record's keys, and as many of its values."""
        return sum(heads * width for heads, width in self.parts) // self.width

    def join(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """One array `[rows, count, width]` of the parts, each `[rows, heads, its own width]`."""
        return np.concatenate([part.reshape(len(part), -1, self.width) for part in parts], axis=1)

    def split(self, rows: NDArray[Any]) -> list[NDArray[Any]]:
        """The parts of `[rows, count, width]`, each `[rows, heads, its own width]`."""
        parts = []
        start = 0
        for heads, width in self.parts:
            stop = start + heads * width // self.width
            parts.append(rows[:, start:stop].reshape(len(rows), heads, width))
            start = stop
        return parts


def row_bytes(dtype: PayloadDtype, heads: int, head_dim: int) -> int:
    """The bytes that an activation record, the keys and values that a drafter reads for one
    position, takes in a payload of this precision."""
    numbers = heads * head_dim  # of the keys, and as many of the values
    if dtype == "fp16":
        return 2 * (2 * numbers)  # two bytes a number
    scale_bytes = 2 * heads * (head_dim // _group(dtype, head_dim))  # a scale is an fp16 number
    if dtype == "int8":
        return 2 * (numbers + scale_bytes)
    if head_dim % 2:
        raise ConfigError(f"int4 records need an even head_dim, not {head_dim}")
    return 2 * (numbers // 2 + scale_bytes)


def encode(keys: NDArray[Any], values: NDArray[Any], dtype: PayloadDtype) -> bytes:
    """Pack activation records, keys and values `[rows, heads, head_dim]`, into a payload for the
    wire: all keys, all values, then the scales of both where the precision has scales."""
    planes: list[bytes] = []
    scales: list[bytes] = []
    for rows in (keys, values):
        if dtype == "fp16":
            # What is larger than fp16 reaches would arrive as infinite.
            planes.append(np.clip(rows, -_FP16_MAX, _FP16_MAX).astype("<f2").tobytes())
            continue
        levels, scale = _quantize(np.asarray(rows, dtype=np.float32), dtype)
        planes.append(_pack(levels) if dtype == "int4" else levels.tobytes())
        scales.append(scale.tobytes())
    return b"".join(planes + scales)


def decode(
    payload: bytes, dtype: PayloadDtype, rows: int, heads: int, head_dim: int
) -> tuple[FloatRows, FloatRows]:
    """Unpack a payload of activation records; returns keys and values `[rows, heads, head_dim]`. A
    `ProtocolError` when its size does not fit, or when it holds NaN or infinity: attention would
    carry that from one row into all others."""
    if dtype not in DTYPES:
        raise ProtocolError(f"unknown record precision {dtype!r}")
    if len(payload) != rows * row_bytes(dtype, heads, head_dim):
        raise ProtocolError(
            f"{len(payload)} bytes for {rows} {dtype} records of {heads} x {head_dim}"
        )
    shape = (2, rows, heads, head_dim)
    if dtype == "fp16":
        both = _finite(np.frombuffer(payload, dtype="<f2")).reshape(shape)
        return both[0], both[1]
    numbers = math.prod(shape)
    level_bytes = numbers // 2 if dtype == "int4" else numbers
    packed = np.frombuffer(payload, dtype=np.uint8, count=level_bytes)
    levels = _unpack(packed) if dtype == "int4" else packed.view(np.int8)
    scales = _finite(np.frombuffer(payload, dtype="<f2", offset=level_bytes))
    groups = levels.astype(np.float32).reshape(-1, _group(dtype, head_dim))
    both = (groups * scales[:, None]).reshape(shape)
    return both[0], both[1]


def _finite(numbers: NDArray[np.float16]) -> NDArray[np.float32]:
    """The numbers in float32; a `ProtocolError` where one is NaN or infinite."""
    wide = numbers.astype(np.float32)
    if not np.isfinite(wide).all():
        raise ProtocolError("activation records contain NaN or Inf")
    return wide


def _group(dtype: PayloadDtype, head_dim: int) -> int:
    """How many numbers of a head share a scale."""
    if dtype == "int4" and head_dim % _INT4_GROUP == 0:
        return _INT4_GROUP
    return head_dim


def _quantize(rows: FloatRows, dtype: PayloadDtype) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Quantize numbers in groups that share a scale. Returns whole numbers (levels) `[groups,
    numbers]` and the scale of each group; a level times its scale is about the number."""
    largest = _LARGEST_LEVEL[dtype]
    groups = rows.reshape(-1, _group(dtype, rows.shape[-1]))
    exact_scale = np.abs(groups).max(axis=1, initial=0.0) / largest
    scale = np.clip(exact_scale, 0, _FP16_MAX).astype("<f2")
    # Levels are taken from the scale as it will arrive, rounded to fp16; the clip holds the largest
    # number inside. A group of zeros has the scale 0, by which nothing can be divided.
    divisor = np.where(scale > 0, scale.astype(np.float32), np.float32(1))
    levels = np.clip(np.rint(groups / divisor[:, None]), -largest, largest).astype(np.int8)
    return levels, scale


def _pack(levels: NDArray[np.int8]) -> bytes:
    """Two levels a byte, the even one low, offset by 8."""
    pairs = (levels.reshape(-1, 2) + 8).astype(np.uint8)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).tobytes()


def _unpack(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The levels that `_pack` packed."""
    pairs = np.stack([packed & 15, packed >> 4], axis=1)
    return (pairs.astype(np.int8) - np.int8(8)).reshape(-1)
