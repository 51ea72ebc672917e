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
    """Unpack a tensor of a GGUF file, and yield its numbers as float32, some rows `[rows, width]`
    at a time, so that a large one is never whole in memory. A tensor of one dimension is one
    row."""
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
    rows_at_once = max(1, _AT_ONCE // width)
    for start in range(0, rows, rows_at_once):
        packed = np.array(data[start : start + rows_at_once])
        yield unpack(packed).reshape(-1, width)


def _float16(blocks: Bytes) -> Float:
    """Read bytes as float16 numbers, two bytes each."""
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _blocks(size: int, unpack: Callable[[Bytes], Float]) -> Callable[[Bytes], Float]:
    """Make a function that unpacks rows of blocks of `size` bytes, from one that unpacks blocks."""
    return lambda rows: unpack(np.ascontiguousarray(rows).reshape(-1, size))


def _nibbles(packed: Bytes) -> Bytes:
    """Split bytes into numbers of four bits: the low halves of all bytes, then the high ones."""
    low = packed & 15
    high = packed >> 4
    return np.concatenate([low, high], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Unpack four bytes into 32 bits, each as 16 or 0: the fifth bit of a number."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little")
    return bits * np.uint8(16)


# Each function below unpacks blocks `[blocks, bytes]` of one of llama.cpp's formats into numbers
# `[blocks, numbers]`. The layout of a block is given byte by byte.


def _q4_0(blocks: Bytes) -> Float:
    """32 numbers of four bits: scale (2 bytes), codes (16)."""
    scale = _float16(blocks[:, :2])
    codes = _nibbles(blocks[:, 2:])
    return scale * (codes.astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Float:
    """32 numbers of four bits: scale (2 bytes), smallest number (2), codes (16)."""
    scale = _float16(blocks[:, :2])
    smallest = _float16(blocks[:, 2:4])
    codes = _nibbles(blocks[:, 4:])
    return scale * codes.astype(np.float32) + smallest


def _q5_0(blocks: Bytes) -> Float:
    """32 numbers of five bits: scale (2 bytes), the codes' fifth bits (4), their other bits (16)."""
    scale = _float16(blocks[:, :2])
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return scale * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Float:
    """32 numbers of five bits: scale (2 bytes), smallest number (2), the codes' fifth bits (4), their
    other bits (16)."""
    scale = _float16(blocks[:, :2])
    smallest = _float16(blocks[:, 2:4])
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return scale * codes.astype(np.float32) + smallest


def _q8_0(blocks: Bytes) -> Float:
    """32 numbers of eight bits: scale (2 bytes), codes with a sign (32)."""
    scale = _float16(blocks[:, :2])
    codes = blocks[:, 2:].view(np.int8)
    return scale * codes.astype(np.float32)


def _scales_and_minima(packed: Bytes) -> tuple[Float, Float]:
    """Unpack twelve bytes into eight scales and eight minima of six bits, `[blocks, 8]` each.

    The first four scales are the low six bits of bytes 0 to 3, the first four minima those of bytes 4
    to 7. Of the others, bytes 8 to 11 have the low four bits (of a scale in the low half, of a
    minimum in the high half), and the two bits that are left over in bytes 0 to 7 are the high ones.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    last_scales = (third & 15) | ((first >> 6) << 4)
    last_minima = (third >> 4) | ((second >> 6) << 4)
    scales = np.concatenate([first & 63, last_scales], axis=-1)
    minima = np.concatenate([second & 63, last_minima], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q45_k(blocks: Bytes, *, fifth: bool) -> Float:
    """256 numbers of four bits, or with `fifth` of five: eight runs of 32, with a scale and a minimum
    each. Scale of the scales (2 bytes), scale of the minima (2), both packed (12), the codes' fifth
    bits if any (32), their other bits (128).

    A byte with fifth bits has one number of each run, bit j for run j. Each 32 bytes of codes have
    two runs: one in the low halves, one in the high halves.
    """
    scale_of_scales = _float16(blocks[:, :2])
    scale_of_minima = _float16(blocks[:, 2:4])
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes_start = 48 if fifth else 16
    packed = blocks[:, codes_start:].reshape(-1, 4, 32)
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    if fifth:
        run = np.arange(8, dtype=np.uint8)[:, None]
        fifth_bits = (blocks[:, None, 16:48] >> run) & 1
        codes = codes | (fifth_bits << 4)
    scale = (scale_of_scales * scales)[:, :, None]  # of each run
    minimum = (scale_of_minima * minima)[:, :, None]
    return scale * codes.astype(np.float32) - minimum


def _q6_k(blocks: Bytes) -> Float:
    """256 numbers of six bits: sixteen runs of 16, with a scale each. The codes' low four bits (128
    bytes), their high two (64), scales with a sign (16), scale of the scales (2).

    A block has two halves of 128 numbers. In each, 64 bytes have the low bits of two numbers, and 32
    bytes the high bits of four.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low_shifts = np.array([0, 4], np.uint8)[:, None]
    low_bits = ((low >> low_shifts) & 15).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high_shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high_bits = (high >> high_shifts) & 3
    codes = (low_bits | (high_bits << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scale_of_scales = _float16(blocks[:, 208:])
    return (scale_of_scales * scales)[:, :, None] * codes


def _bf16(rows: Bytes) -> Float:
    """Read bytes as bfloat16 numbers, which are the upper halves of float32 ones."""
    wide = np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)


_UNPACK: Mapping[str, Callable[[Bytes], Any]] = {
    "F32": lambda rows: np.ascontiguousarray(rows).view(np.float32),
    "F16": _float16,
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
