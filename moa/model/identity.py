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

SOURCE_ID = "source-id"
"""A file with the identity of what a folder was made of: that is then the folder's own."""
SHAPES = "shapes.json"
"""A file with the tensors' shapes, in a folder whose weights are not unpacked yet."""
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

    Key order, layout, the two notations for merges, padding, truncation, and what says the same in
    other words are ignored: two files with the same hash encode text to the same ids.
    """
    content = json.loads(tokenizer_json)
    if not isinstance(content, dict):
        raise ValueError("a tokenizer.json holds one JSON object")
    for volatile in ("padding", "truncation"):
        content.pop(volatile, None)
    model = content.get("model")
    if isinstance(model, dict):
        if merges := model.get("merges"):
            model["merges"] = [
                merge.split(" ") if isinstance(merge, str) else merge for merge in merges
            ]
        if model.get("type") == "BPE":
            for name, unset in _UNSET.items():
                model[name] = model.get(name) or unset
    for part in ("pre_tokenizer", "decoder", "post_processor"):
        content[part] = _without_offsets(content.get(part))
    for token in content.get("added_tokens") or []:
        if isinstance(token, dict):
            token["special"] = True  # whether decoding may leave it out: makers' files differ
    if isinstance(content["decoder"], dict) and content["decoder"].get("type") == "ByteLevel":
        content["decoder"] = dict(_BYTE_LEVEL)  # it reads none of its settings
    if isinstance(after := content["post_processor"], dict) and after.get("type") == "ByteLevel":
        content["post_processor"] = None  # it moves offsets and adds nothing
    return _digest(content).hexdigest()


_UNSET: dict[str, Any] = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
"""Settings of a model of merges that a file may leave out, or set to nothing."""
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


def _without_offsets(part: Any) -> Any:
    """A part of a tokenizer, with one value for how offsets are counted: no id depends on it."""
    if isinstance(part, list):
        return [_without_offsets(each) for each in part]
    if not isinstance(part, dict):
        return part
    changed = {"trim_offsets": True} if "trim_offsets" in part else {}
    return {name: _without_offsets(value) for name, value in part.items()} | changed


def weights_id(folder: Path, facts: TargetFacts) -> str:
    """The identity of a folder's weights: dimensions, and each tensor's name, type, shape and some
    of its bytes.

    It costs milliseconds, does not change when the same tensors are stored in other files, and does
    change with further training.
    """
    if (made_of := folder / SOURCE_ID).is_file():
        return made_of.read_text(encoding="ascii").strip()[:64]
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


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, whether its weights are there or only described."""
    if not (folder / SHAPES).is_file():
        return {name: tensor.shape for name, tensor in stored_tensors(folder).items()}
    listed: dict[str, list[int]] = json.loads((folder / SHAPES).read_bytes())
    return {name: tuple(shape) for name, shape in listed.items()}


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
