"""Reads the head of a GGUF file: its metadata, and where its tensors lie. No torch, no numpy.

A file comes from anywhere, and its counts and lengths are only claims. Each is compared with the
file's size and with a bound before anything is made of it, so that a damaged or hostile file costs
one line and no memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from moa.errors import UsageError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_ENTRIES = 65_536
"""Entries of metadata; real files have 20 to 60."""
_MOST_TENSORS = 1_000_000
_MOST_ITEMS = 4_000_000
"""Items of an array: sixteen times the largest vocabulary there is."""
_MOST_DIMENSIONS = 4
_MOST_NAME = 4096
"""Bytes of a key or of a tensor's name."""
_MOST_TEXT = 4 * 2**20
"""Bytes of any other string; the largest chat templates have 20 kB."""
_LENGTH = struct.Struct("<Q")
"""The number of bytes of a string, in front of it."""
_STRING = 8
_ARRAY = 9
_SCALARS: Mapping[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""By type: its name, and how many numbers take how many bytes. A type that is not here is newer
than this table: only where its tensor begins is checked."""


@dataclass(frozen=True)
class StoredBlocks:
    """Where a tensor lies, and in what type."""

    name: str
    kind: str
    """`Q4_K`, or `type 41` where this program does not know it."""
    shape: tuple[int, ...]
    """As GGUF has it: the fastest dimension first."""
    start: int
    """Its first byte in the file."""
    size: int
    """Its bytes; 0 where the type is unknown."""


@dataclass(frozen=True)
class GgufHead:
    """All that a file says before its weights."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[StoredBlocks, ...]

    @property
    def architecture(self) -> str:
        """Which family the model is of, as llama.cpp calls it."""
        return self.text("general.architecture")

    def has(self, key: str) -> bool:
        """Whether there is such an entry; `{arch}` in it stands for the architecture."""
        return key.replace("{arch}", self.architecture) in self.metadata

    def text(self, key: str, default: str | None = None) -> str:
        """A string; a `UsageError` where it is missing and there is no default."""
        return str(self._value(key, str, default))

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number of this entry; a `UsageError` where it is missing and there is no
        default, or is no whole number. Some files have one for each layer, as an array: then the
        largest."""
        found = self._value(key, (int, list), default)
        if isinstance(found, list):
            if not found or not all(type(each) is int for each in found):
                raise self._wrong(key, "whole numbers")
            return int(max(found))
        if isinstance(found, bool):
            raise self._wrong(key, "a whole number")
        return int(found)

    def real(self, key: str, default: float | None = None) -> float:
        """A number."""
        return float(self._value(key, (int, float), default))

    def flag(self, key: str, default: bool) -> bool:
        """Yes or no."""
        return bool(self._value(key, bool, default))

    def array(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """An array whose items are all of this type; empty where it is missing."""
        found = self._value(key, list, [])
        if not all(isinstance(item, kind) for item in found):
            raise self._wrong(key, "items of one type")
        return list(found)

    def _value(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """The value of a metadata entry, or the default if there is no such entry; a `UsageError`
        if both are missing, or the value is not of this type. `{arch}` in a key is the
        architecture."""
        if key != "general.architecture":
            key = key.replace("{arch}", self.architecture)
        found = self.metadata.get(key, default)
        if found is None:
            raise UsageError(f"{self.path} does not say {key}: no model can be read from it")
        if not isinstance(found, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(one.__name__ for one in kinds)
            raise self._wrong(key, f"a {names}")
        return found

    def _wrong(self, key: str, wanted: str) -> UsageError:
        return UsageError(f"{self.path}: {key} must be {wanted}")


def is_gguf(source: str | Path) -> bool:
    """Whether this names a GGUF file: by the ending of its name, or by the file's first bytes."""
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        return True
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == _MAGIC
    except (OSError, ValueError):
        return False


def read_head(path: str | Path) -> GgufHead:
    """Read the head of a GGUF file: its metadata, and where its tensors lie. A `UsageError` of one
    line for a file that is missing, damaged or none."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise UsageError(f"{path} is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).head()
    except FileNotFoundError:
        raise UsageError(f"no model at {path}: there is no such file") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


class _Described(NamedTuple):
    """A tensor as the file describes it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """The number of its type, which `_BLOCKS` may know."""
    offset: int
    """Its first byte, counted from where the tensors begin."""


class _Parser:
    """Reads a file's head from one place to the next; every length is checked before it is used."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = len(_MAGIC)
        """Of the next byte to be read."""

    def head(self) -> GgufHead:
        """Read the whole head: the version, two counts, the metadata, and the tensors' descriptions."""
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise self._damaged(f"version {version} of the format is not known")
        # `least` is how many bytes the description of a tensor, or an entry, takes at least.
        tensors = self._count("<Q", _MOST_TENSORS, "tensors", least=24)
        entries = self._count("<Q", _MOST_ENTRIES, "entries of metadata", least=13)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string(_MOST_NAME, "a key")
            if key in metadata:
                raise self._damaged(f"it says {key} twice")
            metadata[key] = self._value(key)
        described = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment % 8:
            raise self._damaged(f"an alignment of {alignment!r} is impossible")
        # The tensors' bytes begin at the next multiple of the alignment.
        start = math.ceil(self._position / alignment) * alignment
        placed = tuple(self._placed(tensor, start) for tensor in described)
        return GgufHead(self._path, metadata, placed)

    def _tensor(self) -> _Described:
        """Read the description of one tensor: its name, shape, type, and where it begins."""
        name = self._string(_MOST_NAME, "a tensor's name")
        dimensions = self._scalar("<I")
        if not 0 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"{name} has {dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))
        kind = self._scalar("<I")
        offset = self._scalar("<Q")
        return _Described(name, shape, kind, offset)

    def _placed(self, tensor: _Described, start: int) -> StoredBlocks:
        """Where a tensor's bytes lie, if the tensors begin at byte `start`; an error where they would
        end behind the file, or its type cannot store its shape."""
        unknown_type = (f"type {tensor.kind}", 1, 0)
        type_name, block_numbers, block_bytes = _BLOCKS.get(tensor.kind, unknown_type)
        if tensor.shape and tensor.shape[0] % block_numbers:
            raise self._damaged(
                f"{tensor.name} has rows of {tensor.shape[0]} numbers, which {type_name} cannot store"
            )
        size = prod(tensor.shape) // block_numbers * block_bytes
        first = start + tensor.offset
        if first + size > self._size:
            raise UsageError(
                f"{self._path} is cut short: {tensor.name} ends behind its {self._size} bytes",
                hint="download or copy it again",
            )
        return StoredBlocks(tensor.name, type_name, tensor.shape, first, size)

    def _value(self, key: str) -> Any:
        """Read the value of a metadata entry: its type's number, and then a string, a scalar, or an
        array, which is the items' type, their number, and the items."""
        kind = self._scalar("<I")
        if kind == _STRING:
            return self._string(_MOST_TEXT, key)
        if kind != _ARRAY:
            return self._scalar(self._scalar_format(kind, key))
        item_kind = self._scalar("<I")
        if item_kind == _STRING:
            # A string has at least the 8 bytes of its length.
            count = self._count("<Q", _MOST_ITEMS, f"items of {key}", least=8)
            return self._strings(count, key)
        item_format = self._scalar_format(item_kind, key)
        width = struct.calcsize(item_format)
        count = self._count("<Q", _MOST_ITEMS, f"items of {key}", least=width)
        data = self._bytes(count * width, key)
        return list(struct.unpack(f"<{count}{item_format[1]}", data))

    def _scalar_format(self, kind: int, key: str) -> str:
        """How `struct` names a scalar of this type; an error for a type that does not exist."""
        if kind not in _SCALARS:
            raise self._damaged(f"{key} is of type {kind}, which there is not")
        return _SCALARS[kind]

    def _count(self, form: str, most: int, what: str, *, least: int) -> int:
        """Read how many things follow; an error if they are more than `most`, or if the rest of the
        file cannot hold so many, with at least `least` bytes each."""
        count = int(self._scalar(form))
        if count > most:
            raise self._damaged(f"it claims {count} {what}")
        if count * least > self._size - self._position:
            raise self._cut_short(f"its head, which has {count} {what}")
        return count

    def _scalar(self, form: str) -> Any:
        """Read one number or flag in this format of `struct`."""
        (value,) = struct.unpack(form, self._bytes(struct.calcsize(form), "a number"))
        return value

    def _string(self, most: int, what: str) -> str:
        """Read a string: its length in 8 bytes, at most `most`, and its UTF-8."""
        length = self._scalar("<Q")
        if length > most:
            raise self._too_long(length, what)
        return self._bytes(length, what).decode("utf-8", errors="replace")

    def _strings(self, count: int, key: str) -> list[str]:
        """Read so many strings in a row. A vocabulary and its merges are 300,000 of them: with a call
        for each number and each text they take most of a head's time."""
        data = self._data
        read_length = _LENGTH.unpack_from
        position = self._position
        texts: list[str] = []
        for _ in range(count):
            start = position + _LENGTH.size
            if start > self._size:
                raise self._cut_short(key)
            (length,) = read_length(data, position)
            position = start + length
            if length > _MOST_TEXT:
                raise self._too_long(length, key)
            if position > self._size:
                raise self._cut_short(key)
            texts.append(data[start:position].decode("utf-8", errors="replace"))
        self._position = position
        return texts

    def _bytes(self, count: int, what: str) -> bytes:
        """Read the next `count` bytes, and go on behind them; an error where the file has fewer."""
        if count > self._size - self._position:
            raise self._cut_short(what)
        found = self._data[self._position : self._position + count]
        self._position += count
        return found

    def _too_long(self, length: int, what: str) -> UsageError:
        return self._damaged(f"it claims {length} bytes for {what}")

    def _cut_short(self, what: str) -> UsageError:
        return UsageError(f"{self._path} is cut short in {what}", hint="download or copy it again")

    def _damaged(self, why: str) -> UsageError:
        return UsageError(f"{self._path} is damaged, or no GGUF file: {why}")
