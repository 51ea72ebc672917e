"""Arrays of files from outside: `.npy` and `.npz`, whose sizes are checked before anything is read."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGEST = 2**26
"""Bytes of all arrays of a `.npz` file together."""
_BROKEN = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def read_npy(path: Path) -> NDArray[Any]:
    """The array of a `.npy` file; ValueError if it is none."""
    return _array(path.read_bytes(), path.name)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of a `.npz` file by name; ValueError if it is none, or too large."""
    try:
        with zipfile.ZipFile(path) as file:
            size = sum(member.file_size for member in file.infolist())
            if size > _LARGEST:
                raise ValueError(f"{size} bytes, at most {_LARGEST}")
            # A member is never read beyond the size that the directory states.
            members = file.infolist()
            return {m.filename.removesuffix(".npy"): _array(file.read(m), m.filename) for m in members}
    except _BROKEN as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _array(content: bytes, name: str) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except _BROKEN as error:
        raise ValueError(f"{name} is no array: {error}") from None
    return found
