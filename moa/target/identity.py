"""Identity of a model: hashes of every byte of its weights, of its tokenizer, and of what it
computes. No torch.

A large file is hashed once: its tensors' digests are kept in the user's cache, under the file's
inode, size and times, so that a restart costs nothing. `WeightsHash` hashes beside the loading of
the same file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moa.config import TargetFacts
from moa.errors import UsageError
from moa.process.files import write_whole
from moa.process.user_folders import cache_folder

SOURCE_ID = "source-id"
"""A file with the identity of what a folder was made of: that is then the folder's own."""
SHAPES = "shapes.json"
"""A file with the tensors' shapes, in a folder whose weights are not unpacked yet."""
SCHEME = "v2-"
"""What identities of weights begin with: of every byte. Those before were 64 hex digits, of some
bytes of each tensor."""
_SHORT = 12
"""Characters of an identity that people are shown."""
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_COMPARED_BYTES = 1 << 20
"""Bytes of head and embedding by which it is told whether the two are one matrix."""
_LARGEST_HEADER = 100_000_000  # the safetensors format's own limit
_MOST_DIMENSIONS = 64
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}
"""Of one element, by the type's name in a header."""
_CHUNK = 2**22
"""Bytes that are read and hashed at once."""
_PIECE = 2**26
"""Bytes of a file that one thread hashes."""
_WHOLE = ""
"""A file's own digest, among those of its tensors."""
_THREADS = 4
_CACHED_FROM = 2**26
"""A smaller file is hashed in a tenth of a second, again at each start."""
_YOUNG_SECONDS = 2.0
"""A file that has changed so lately may change again within the grain of its times: its hash is not
kept."""
_BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that decide, with the weights, what a model computes and how it is asked."""
_LARGEST_BESIDE = 2**28


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
    other words are ignored: two files with the same hash encode text to the same ids, here, where
    padding and truncation are off wherever a tokenizer is read.
    """
    content = tokenizer_json.encode() if isinstance(tokenizer_json, str) else tokenizer_json
    key = hashlib.sha256(content).digest()
    if key not in _tokenizer_hashes:  # both models of a pair have the same one, most often
        _tokenizer_hashes[key] = _hash_of_meaning(content)
    return _tokenizer_hashes[key]


_tokenizer_hashes: dict[bytes, str] = {}
"""Those that this process has made, by the hash of the file: a large vocabulary takes seconds."""


def _hash_of_meaning(tokenizer_json: bytes) -> str:
    """Make the hash of a `tokenizer.json`."""
    content = json.loads(tokenizer_json)
    if not isinstance(content, dict):
        raise ValueError("a tokenizer.json holds one JSON object")
    for volatile in ("padding", "truncation"):
        content.pop(volatile, None)
    if isinstance(content.get("model"), dict):
        _write_merges_one_way(content["model"])
    for part in ("pre_tokenizer", "decoder", "post_processor"):
        content[part] = _without_offsets(content.get(part))
    for token in content.get("added_tokens") or []:
        if isinstance(token, dict):
            token["special"] = True  # whether decoding may leave it out: makers' files differ
    if _is_byte_level(content["decoder"]):
        content["decoder"] = dict(_BYTE_LEVEL)  # it reads none of its settings
    if _is_byte_level(content["post_processor"]):
        content["post_processor"] = None  # it moves offsets and adds nothing
    return _digest(content).hexdigest()


def _write_merges_one_way(model: dict[str, Any]) -> None:
    """Change the `model` of a tokenizer.json in place, so that two files that say the same merges
    are equal: each merge as a pair, and each setting that may be left out written down."""
    if merges := model.get("merges"):
        pairs = []
        for merge in merges:
            pairs.append(merge.split(" ") if isinstance(merge, str) else merge)
        model["merges"] = pairs
    if model.get("type") == "BPE":
        for name, unset in _UNSET.items():
            model[name] = model.get(name) or unset


def _is_byte_level(part: Any) -> bool:
    """Whether a part of a tokenizer.json is of the type ByteLevel."""
    return isinstance(part, dict) and part.get("type") == "ByteLevel"


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
    """Return a part of a `tokenizer.json`, with the setting `trim_offsets` true wherever it occurs:
    it decides how offsets are counted, and no token id depends on it."""
    if isinstance(part, list):
        return [_without_offsets(each) for each in part]
    if not isinstance(part, dict):
        return part
    changed = {name: _without_offsets(value) for name, value in part.items()}
    if "trim_offsets" in changed:
        changed["trim_offsets"] = True
    return changed


def weights_id(folder: Path, facts: TargetFacts) -> str:
    """The identity of a folder's weights: a hash of the model's dimensions, and of each tensor's
    name, type, shape and bytes.

    It does not change when the same tensors are stored in other files, and does with any bit. A
    folder that was made of a GGUF file has that file's identity.
    """
    source_id = _source_id(folder)
    if source_id is not None:
        return source_id
    return WeightsHash(folder).identity(facts)


_DIMENSIONS = (
    "family",
    "layers",
    "hidden_size",
    "vocab_size",
    "heads",
    "kv_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
    "max_positions",
    "tie_embeddings",
)
"""The facts that an identity is made of, by name: a fact that is added later must not give every
model another identity, and so turn every bundle away."""
_NOT_OF_WEIGHTS = {"tokenizer_hash": "", "weights_id": "", "eos_ids": (), "bos_id": None}
"""Facts that identities were once made of, too, at the values that they had then: without them every
model would have another identity."""


class WeightsHash:
    """The hash of a folder's weights, made in threads of its own while the model is loaded."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of the folder's weight files, which finds missing or damaged ones, and
        begin to hash the tensors in a thread."""
        self._files = {path: stored_in(path) for path in _weight_files(folder)}
        self._cancelled = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="identity")
        self._source_id = _source_id(folder)
        """The identity of what the folder was made of; then nothing is hashed."""
        self._digests = self._thread.submit(self._hash_all)

    def identity(self, facts: TargetFacts) -> str:
        """The identity of the weights of a model with these dimensions; waits for the hash."""
        digests = self._digests.result()
        self._thread.shutdown()
        if self._source_id is not None:
            return self._source_id
        dimensions = {name: getattr(facts, name) for name in _DIMENSIONS}
        digest = _digest(dimensions | _NOT_OF_WEIGHTS)
        tensors: dict[str, StoredTensor] = {}
        for in_file in self._files.values():
            tensors |= in_file
        for name, tensor in sorted(tensors.items()):
            shape = list(tensor.shape)
            digest.update(json.dumps([name, tensor.dtype, shape, digests[name]]).encode())
        return SCHEME + digest.hexdigest()

    def cancel(self) -> None:
        """End the work soon, without waiting for it: nobody needs the hash any more."""
        self._cancelled.set()
        self._thread.shutdown(wait=False)

    def _hash_all(self) -> dict[str, str]:
        """Return the digest of each tensor of all files, by its name: hashed now, or kept from an
        earlier start. Nothing is hashed in a folder that says what it was made of."""
        digests: dict[str, str] = {}
        if self._source_id is not None:
            return digests
        for path, tensors in self._files.items():
            digests |= _known_digests(path, tensors) or self._hash_file(path, tensors)
        return digests

    def _hash_file(self, path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
        """Return the digest of each tensor of one file, by its name. They are made in several
        threads and kept for the next start. A `UsageError` if the file changed in the meantime."""
        before = _state(path)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="identity") as threads:
            hexes = threads.map(self._hash_one, tensors.values())
            digests = dict(zip(tensors, hexes, strict=True))
        if _state(path) != before:
            raise UsageError(f"{path} changed while it was read", hint="start again")
        _keep_digests(path, digests)
        return digests

    def _hash_one(self, tensor: StoredTensor) -> str:
        """Return the sha256 of one tensor's bytes; of some of them once the work is cancelled."""
        digest = hashlib.sha256()
        left = tensor.end - tensor.start
        with tensor.path.open("rb", buffering=0) as file:
            file.seek(tensor.start)
            while left > 0 and not self._cancelled.is_set():
                piece = file.read(min(_CHUNK, left))
                if not piece:
                    raise UsageError(f"{tensor.path} is cut short", hint="copy it again")
                digest.update(piece)
                left -= len(piece)
        return digest.hexdigest()


def _source_id(folder: Path) -> str | None:
    """The identity of what a folder was made of (a GGUF file), which is then its own; None for a
    folder that was not made here."""
    try:
        return SCHEME + (folder / SOURCE_ID).read_text(encoding="ascii").strip()[:64]
    except FileNotFoundError:
        return None


def file_id(path: Path) -> str:
    """A hash that follows from every byte of a file: the sha256 of the hashes of its pieces, which
    are made in several threads. That of a large file is kept, and made anew only if the file's
    inode, size or times have changed."""
    known = kept_file_id(path)
    if known is not None:
        return known
    before = _state(path)
    piece_starts = range(0, before.size, _PIECE)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="identity") as threads:
        hashes = threads.map(lambda start: _hash_piece(path, start), piece_starts)
        identity = hashlib.sha256("".join(hashes).encode()).hexdigest()
    if _state(path) != before:
        raise UsageError(f"{path} changed while it was read", hint="start again")
    _keep_digests(path, {_WHOLE: identity})
    return identity


def kept_file_id(path: Path) -> str | None:
    """The identity of a large file that was hashed before and has not changed since; None if it is
    not known. Nothing is read of the file."""
    known = _known_digests(path, {_WHOLE: None})
    return None if known is None else known[_WHOLE]


def _hash_piece(path: Path, start: int) -> str:
    """Return the sha256 of the `_PIECE` bytes of a file from `start` on, or of what it has of them."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for chunk_start in range(start, start + _PIECE, _CHUNK):
            file.seek(chunk_start)
            digest.update(file.read(_CHUNK))
    return digest.hexdigest()


def computation_id(weights: str, folder: Path | None, *, dtype: str, quantize: str = "") -> str:
    """The identity of what a target computes and how it is asked: a hash of the identity of its
    `weights`, of their precision, and of every byte of the configs and the tokenizer beside them in
    the folder. Empty for a model that came from no file."""
    if folder is None or not weights:
        return ""
    beside = {}
    for name in _BESIDE_WEIGHTS:
        path = folder / name
        if path.is_file() and path.stat().st_size <= _LARGEST_BESIDE:
            beside[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return identity_of(weights, {"dtype": dtype, "quantize": quantize, "beside": beside})


def identity_of(weights: str, about: Mapping[str, Any]) -> str:
    """The identity of weights, and of what decides what is computed with them."""
    return SCHEME + _digest({"weights": weights, **about}).hexdigest()


def short_id(identity: str) -> str:
    """The beginning of an identity, for people who compare two; empty if there is none."""
    return identity.removeprefix(SCHEME)[:_SHORT]


# ---- digests that are kept


class _FileState(NamedTuple):
    """What changes with a file's content, unless somebody takes care that it does not."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def _state(path: Path) -> _FileState:
    """Return what the system says of a file now, to be compared with what it said before."""
    status = path.stat()
    return _FileState(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _digests_file(path: Path) -> Path:
    """The file in the user's cache in which the digests of a file of weights are kept."""
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache_folder("weights") / f"{name}.json"


def _known_digests(path: Path, names: Mapping[str, object]) -> dict[str, str] | None:
    """The digests that an earlier start has kept of a file, by the names of its tensors; None
    unless exactly these `names` were kept, and the file has not changed since."""
    if path.stat().st_size < _CACHED_FROM:
        return None  # it is hashed in no time, and nothing is kept of it
    try:
        kept = json.loads(_digests_file(path).read_bytes())
        state_then = kept["file"]
        digests = kept["tensors"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # nothing was kept, or the file in the cache is damaged
    if not isinstance(digests, dict) or digests.keys() != names.keys():
        return None
    if state_then != list(_state(path)):
        return None
    return digests


def _keep_digests(path: Path, digests: Mapping[str, str]) -> None:
    """Keep the digests of a file of weights in the user's cache, for the next start. Those of a
    small file are not kept, nor those of a file that was changed a moment ago: it may be changing
    still."""
    status = path.stat()
    changed_at = max(status.st_mtime, status.st_ctime)
    if status.st_size < _CACHED_FROM or changed_at > time.time() - _YOUNG_SECONDS:
        return
    kept_in = _digests_file(path)
    content = json.dumps({"path": str(path), "file": _state(path), "tensors": dict(digests)})
    with contextlib.suppress(OSError):  # without a cache the next start hashes again
        kept_in.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept_in, content.encode())


# ---- safetensors files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's safetensors files; a damaged or cut file is an error that names
    it."""
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        tensors |= stored_in(path)
    return tensors


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, whether its weights are there or only described."""
    if not (folder / SHAPES).is_file():
        return {name: tensor.shape for name, tensor in stored_tensors(folder).items()}
    listed: dict[str, list[int]] = json.loads((folder / SHAPES).read_bytes())
    return {name: tuple(shape) for name, shape in listed.items()}


WITHIN_OTHERS = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""How tensors of a language model are called in a model that takes pictures or sound, too, and how
alone: patterns, and what takes their place."""


def text_names(stored_names: Iterable[str]) -> dict[str, str]:
    """The tensors of a folder's language model: by the name that each has in a model of text alone,
    the name under which it is stored. These are all tensors of the folder, unless its model takes
    pictures or sound, too: then tensors of other parts are left out."""
    own_names = {}
    for stored_name in stored_names:
        own_name = stored_name
        for pattern, replacement in WITHIN_OTHERS.items():
            own_name = re.sub(pattern, replacement, own_name)
        own_names[stored_name] = own_name
    takes_more_than_text = any(own != stored for stored, own in own_names.items())
    found = {}
    for stored_name, own_name in own_names.items():
        # Some such models keep the LM head outside of their language model.
        is_of_text = own_name != stored_name or stored_name.startswith("lm_head.")
        if is_of_text or not takes_more_than_text:
            found[own_name] = stored_name
    return found


def text_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a folder's language model, by the names that they have in a model
    of text alone."""
    shapes = tensor_shapes(folder)
    return {own_name: shapes[stored] for own_name, stored in text_names(shapes).items()}


def repeated_weights(folder: Path) -> int:
    """Weights of an LM head that a folder stores although it is the embedding: some converters do,
    and the library makes the two one matrix when it loads them."""
    if (folder / SHAPES).is_file():
        return 0  # made of a GGUF file, which tells itself
    stored = stored_tensors(folder)
    names = text_names(stored)
    if not {_HEAD, _EMBEDDING} <= names.keys():
        return 0
    head = stored[names[_HEAD]]
    embedding = stored[names[_EMBEDDING]]
    alike = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if not alike or _beginning(head) != _beginning(embedding):
        return 0
    return math.prod(head.shape)


def _beginning(tensor: StoredTensor) -> bytes:
    """The first bytes of a tensor, as many as tell one matrix from another."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        return file.read(min(tensor.end - tensor.start, _COMPARED_BYTES))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files with the weights of a model's folder: one, or all that its index file
    names. A `UsageError` where one is missing."""
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
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file's name is no text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{index} is not an index of weight files") from error
    # Only the last part of a name is used: an index must not lead out of its folder.
    paths = [folder / Path(name).name for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UsageError(
            f"{len(missing)} of {len(paths)} weight files are missing in {folder}: {missing[0]}"
        )
    return paths


def stored_in(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, from its header; a `UsageError` if it is damaged.

    The file is the header's length in 8 bytes, the header (JSON), and the tensors' bytes.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_length,) = struct.unpack("<Q", file.read(8))
            if header_length > min(_LARGEST_HEADER, size):
                raise ValueError("header longer than the file")
            header = json.loads(file.read(header_length))
        header.pop("__metadata__", None)
        data_start = 8 + header_length
        tensors = {name: _stored(path, entry, data_start) for name, entry in header.items()}
        _check_apart(tensors)
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UsageError(f"{path} is not a safetensors file, or is damaged") from error
    last_byte = max((tensor.end for tensor in tensors.values()), default=data_start)
    if size < last_byte:
        raise UsageError(f"{path} is cut short", hint="download or copy it again")
    return tensors


def _stored(path: Path, entry: dict[str, Any], data_start: int) -> StoredTensor:
    """Return the tensor that an entry of a safetensors header describes; a `ValueError` unless its
    type, shape and bytes fit each other. The entry counts bytes from `data_start` of the file."""
    dtype = entry["dtype"]
    shape = tuple(_whole_numbers(entry["shape"]))
    start, end = _whole_numbers(entry["data_offsets"])
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    if start > end or 8 * (end - start) != math.prod(shape) * _BITS[dtype]:
        raise ValueError("a tensor's shape does not fit its bytes")
    return StoredTensor(path, dtype, shape, data_start + start, data_start + end)


def _whole_numbers(values: Any) -> Iterator[int]:
    """Yield the numbers of a list out of a header, and raise at whatever is no size or offset."""
    if not isinstance(values, list):
        raise TypeError("numbers are in a list")
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError("a size is a whole number")
        yield value


def _check_apart(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that share bytes."""
    end = 0
    for tensor in sorted(tensors.values(), key=lambda one: (one.start, one.end)):
        if tensor.start < end:
            raise ValueError("two tensors share bytes")
        end = max(end, tensor.end)


def _digest(content: Any) -> hashlib._Hash:
    """The sha256, to be continued or read, of a value as JSON in one fixed form."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
