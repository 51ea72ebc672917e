"""What the drafter of streams takes of the machine's memory beside the target, from the heads of its
files: it is known before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from moa.bundle import Bundle
from moa.gguf.reader import read_head
from moa.llama.memory_plan import KV_TYPE, kv_bytes_per_token
from moa.manifest import KVHeads, Manifest
from moa.target.identity import stored_in, text_names
from moa.target.memory_plan import DrafterMemory

_FLOAT32_BYTES = 4
_GROWN = 1.5
"""Arrays of a graph's cache grow by a quarter, and in steps of 256 rows: from 512 tokens on they have
at most half as many rows again as are used."""


def drafter_memory(
    *,
    file: str = "",
    bundle: str = "",
    folders: Iterable[Path] = (),
    dtype: torch.dtype = torch.float32,
) -> DrafterMemory:
    """Return what drafters take together: a GGUF `file`, a `bundle` whose graph drafts, and those
    whose `folders` torch reads into `dtype`, for activation records or for drafts. A session that
    is shorter than the file's or the bundle's own limit takes less."""
    at_start = sum(_weights_bytes(folder, dtype) for folder in set(folders))
    per_token = 0
    if file:
        head = read_head(Path(file).expanduser())
        at_start += head.path.stat().st_size
        per_token += kv_bytes_per_token(head, KV_TYPE)
    if bundle:
        opened = Bundle.open(bundle)
        at_start += opened.variant().size
        per_token += _graph_bytes_per_token(opened.manifest)
    return DrafterMemory(at_start=at_start, per_token=per_token)


def _graph_bytes_per_token(manifest: Manifest) -> int:
    """Bytes of a token in a graph's cache, and of its activation record."""
    cached: list[KVHeads] = list(manifest.cache)
    if manifest.records is not None:
        cached += [manifest.records, *manifest.records.borrowed]
    numbers = sum(2 * layer.kv_heads * layer.head_dim for layer in cached)  # keys and values
    return math.ceil(numbers * _FLOAT32_BYTES * _GROWN)


def _weights_bytes(drafter: Path, dtype: torch.dtype) -> int:
    """Bytes of a drafter's weights, a folder's or a GGUF file's, as torch converts them: a drafter
    has its target's precision, whatever its own files have."""
    if drafter.is_file():
        shapes = {tensor.name: tensor.shape for tensor in read_head(drafter).tensors}
    else:
        shapes = {
            name: tensor.shape
            for path in drafter.glob("*.safetensors")
            for name, tensor in stored_in(path).items()
        }
    numbers = sum(math.prod(shapes[name]) for name in text_names(shapes).values())
    return numbers * dtype.itemsize
