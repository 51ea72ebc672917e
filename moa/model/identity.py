"""Identity of a model: cheap, stable hashes of its weights and of its tokenizer. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moa.config import TargetFacts
from moa.errors import UsageError

_SAMPLE = 256  # bytes read at a tensor's start, middle and end: training changes all of them
_LARGEST_HEADER = 100_000_000  # the safetensors format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie in a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def tokenizer_hash(tokenizer_json: str | bytes) -> str:
    """The sha256 of the meaning of a `tokenizer.json`.

    Key order, layout, the two notations for merges, padding and truncation are ignored: two files
    with the same hash encode text to the same ids.
    """
    content = json.loads(tokenizer_json)
    if not isinstance(content, dict):
        raise ValueError("a tokenizer.json holds one JSON object")
    for volatile in ("padding", "truncation"):
        content.pop(volatile, None)
    model = content.get("model")
    if isinstance(model, dict) and (merges := model.get("merges")):
        model["merges"] = [
            merge.split(" ") if isinstance(merge, str) else merge for merge in merges
        ]
    return _digest(content).hexdigest()


def weights_id(folder: Path, facts: TargetFacts) -> str:
    """The identity of a folder's weights: dimensions, and each tensor's name, type, shape and some
    of its bytes.

    It costs milliseconds, does not change when the same tensors are stored in other files, and does
    change with further training.
    """
    dimensions = dataclasses.asdict(facts) | {
        "tokenizer_hash": "",
        "weights_id": "",
        "eos_ids": (),
        "bos_id": None,
    }
    digest = _digest(dimensions)
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        middle = (tensor.start + tensor.end) // 2
        with tensor.path.open("rb") as file:
            for at in (tensor.start, middle, max(tensor.start, tensor.end - _SAMPLE)):
                file.seek(at)
                digest.update(file.read(min(_SAMPLE, tensor.end - at)))
    return digest.hexdigest()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's safetensors files; a damaged or cut file is an error that names
    it."""
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        tensors |= _stored_in(path)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise UsageError(
            f"no weights in {folder}: {whole.name} is missing",
            hint="pickled weights are never loaded",
        )
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} is not an index of weight files") from error
    paths = [folder / Path(name).name for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UsageError(
            f"{len(missing)} of {len(paths)} weight files are missing in {folder}: {missing[0]}"
        )
    return paths


def _stored_in(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_LARGEST_HEADER, size):
                raise ValueError("header longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        data = 8 + length
        tensors = {
            name: StoredTensor(
                path,
                entry["dtype"],
                tuple(entry["shape"]),
                *(data + at for at in entry["data_offsets"]),
            )
            for name, entry in header.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a safetensors file, or is damaged") from error
    if size < max((tensor.end for tensor in tensors.values()), default=data):
        raise UsageError(f"{path} is cut short", hint="download or copy it again")
    return tensors


def _digest(content: Any) -> hashlib._Hash:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
