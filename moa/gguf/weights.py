"""Tensors of GGUF files as float32: what each way of storing them means. Numpy, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa.errors import UnsupportedModelError, UsageError
from moa.gguf.reader import StoredBlocks

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_AT_ONCE = 2**24
"""Numbers that are unpacked at a time: 64 MiB, whatever the tensor's size."""


def rows_of(path: Path, tensor: StoredBlocks) -> Iterator[Float]:
    """A tensor as float32, some rows at a time, `[rows, width]`; one of one dimension is a row."""
    unpack = _UNPACK.get(tensor.kind)
    if unpack is None:
        raise UnsupportedModelError(
            f"{path}: {tensor.name} is stored as {tensor.kind}, which is not read here",
            hint=f"take a file of {', '.join(_UNPACK)}",
        )
    if not tensor.size:
        raise UsageError(f"{path}: {tensor.name} is empty")
    width = tensor.shape[0]
    rows = int(np.prod(tensor.shape[1:], dtype=np.int64))
    row_bytes = tensor.size // rows
    data = np.memmap(path, np.uint8, "r", tensor.start, (rows, row_bytes))
    step = max(1, _AT_ONCE // width)
    for at in range(0, rows, step):
        yield unpack(np.array(data[at : at + step])).reshape(-1, width)


def _halves(blocks: Bytes) -> Float:
    """float16 numbers."""
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _blocks(size: int, unpack: Callable[[Bytes], Float]) -> Callable[[Bytes], Float]:
    """Unpacks rows of blocks of `size` bytes."""
    return lambda rows: unpack(np.ascontiguousarray(rows).reshape(-1, size))


def _nibbles(packed: Bytes) -> Bytes:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """32 bits, each as 16 or 0: the fifth bit of a number."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little")
    return bits * np.uint8(16)


def _q4_0(blocks: Bytes) -> Float:
    return _halves(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Float:
    scale, least = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    return scale * _nibbles(blocks[:, 4:]).astype(np.float32) + least


def _q5_0(blocks: Bytes) -> Float:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _halves(blocks[:, :2]) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Float:
    scale, least = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return scale * codes.astype(np.float32) + least


def _q8_0(blocks: Bytes) -> Float:
    return _halves(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _scales_and_minima(packed: Bytes) -> tuple[Float, Float]:
    """Eight of each, six bits wide, in twelve bytes."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q45_k(blocks: Bytes, *, fifth: bool) -> Float:
    """256 numbers of four or five bits: eight runs of 32, with a scale and a minimum each."""
    scale, least = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    packed = blocks[:, 48 if fifth else 16 :].reshape(-1, 4, 32)
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    if fifth:
        run = np.arange(8, dtype=np.uint8)[:, None]
        codes = codes | (blocks[:, None, 16:48] >> run & 1) << 4
    by_run = (scale * scales)[:, :, None], (least * minima)[:, :, None]
    return by_run[0] * codes.astype(np.float32) - by_run[1]


def _q6_k(blocks: Bytes) -> Float:
    """256 numbers of six bits: sixteen runs of 16, with a scale each."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = np.array([0, 4], np.uint8)[:, None]
    fours = (low >> shifts & 15).reshape(-1, 2, 4, 32)
    twos = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (fours | twos << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_halves(blocks[:, 208:]) * scales)[:, :, None] * codes


def _bf16(rows: Bytes) -> Float:
    wide = np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)


_UNPACK: Mapping[str, Callable[[Bytes], Any]] = {
    "F32": lambda rows: np.ascontiguousarray(rows).view(np.float32),
    "F16": _halves,
    "BF16": _bf16,
    "Q4_0": _blocks(18, _q4_0),
    "Q4_1": _blocks(20, _q4_1),
    "Q5_0": _blocks(22, _q5_0),
    "Q5_1": _blocks(24, _q5_1),
    "Q8_0": _blocks(34, _q8_0),
    "Q4_K": _blocks(144, lambda blocks: _q45_k(blocks, fifth=False)),
    "Q5_K": _blocks(176, lambda blocks: _q45_k(blocks, fifth=True)),
    "Q6_K": _blocks(210, _q6_k),
}
