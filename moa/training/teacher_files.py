"""The target's results on packed rows, kept on disk: written once, so that every later look at the
data needs no forward of the target, and training no target in memory.

`states/ROW.safetensors` is one row in 16 bits: the final states, and the low, middle and high states
that drafters of states read; with `caches` also the keys and values of all layers. Every file
appears whole: an interrupted run goes on where it was, and a trainer may read while rows are still
added.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moa.errors import UsageError
from moa.model.borrowed import SharedWeights
from moa.training.data import Batch, PackedRows
from moa.training.teacher import Teacher, TeacherOutput

AT_ONCE = 4
"""Rows of one forward."""
TAPS = 3
"""Low, middle and high: what is stored of the states between layers."""
_STATES = "states"
_BYTES = 2
"""Of a number in 16 bits."""

Tell = Callable[[int, int, float], None]
"""Rows that are done, rows that were missing, and tokens a second."""


def write_outputs(
    teacher: Teacher,
    rows: PackedRows,
    out: Path,
    *,
    caches: bool,
    tell: Tell = lambda done, missing, rate: None,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Write what is not there yet of this process's share of the rows."""
    (out / _STATES).mkdir(parents=True, exist_ok=True)
    missing = [row for row in range(rank, len(rows), world) if not _file(out, row).exists()]
    began = time.monotonic()
    tokens = 0
    for at in range(0, len(missing), AT_ONCE):
        batch = rows.rows(np.array(missing[at : at + AT_ONCE]))
        known = teacher(batch)
        for place, row in enumerate(batch.rows):
            _write(_file(out, int(row)), _of_row(known, place, caches=caches))
        tokens += int((batch.segments > 0).sum())
        rate = tokens / (time.monotonic() - began)
        tell(at + len(batch.rows), len(missing), rate)


def bytes_per_token(hidden_size: int) -> int:
    """What a token takes on disk, without caches."""
    return _BYTES * hidden_size * (TAPS + 1)


class StoredTeacher:
    """The target's results from disk, with its embedding and head: logits are made anew from the
    final states."""

    def __init__(
        self, shared: SharedWeights, folder: Path, dtype: torch.dtype | None = None
    ) -> None:
        """In the precision of `shared`, unless another is given."""
        self.shared = shared
        self.folder = folder
        self._dtype = dtype or shared.head.dtype
        self._taps = 0

    def tap(self, layers: Sequence[int]) -> None:
        """Give the low, middle and high states, and the final ones where a fourth layer is asked
        for."""
        self._taps = len(layers)

    def __call__(self, batch: Batch) -> TeacherOutput:
        """The results for a batch."""
        device = self.shared.head.device
        parts = [read_output(self.folder, int(row)) for row in batch.rows]
        found = {
            name: torch.stack([part[name] for part in parts]).to(device, self._dtype)
            for name in parts[0]
        }
        none = found["hidden"].new_zeros(0)
        keys, values = (
            found[name].transpose(0, 1) if name in found else none for name in ("keys", "values")
        )
        tapped = found.get("tapped") if self._taps else None
        if tapped is not None and self._taps > TAPS:
            tapped = torch.cat([tapped, found["hidden"]], -1)
        return TeacherOutput(keys=keys, values=values, hidden=found["hidden"], tapped=tapped)


def written(folder: Path) -> PackedRows:
    """The rows whose results are there, from the first on without a gap."""
    rows = PackedRows(folder)
    count = next((row for row in range(len(rows)) if not _file(folder, row).exists()), len(rows))
    if not count:
        raise UsageError(f"{folder} holds no results of a target yet")
    return rows.first(count)


def read_output(folder: Path, row: int) -> dict[str, Tensor]:
    """What was written of a row: hidden and tapped states `[L, ...]`, and, if it was, keys and
    values `[layers, L, kv_heads, D]`."""
    found: dict[str, Tensor] = load_file(_file(folder, row))
    return found


def _file(folder: Path, row: int) -> Path:
    return folder / _STATES / f"{row:06d}.safetensors"


def _of_row(known: TeacherOutput, place: int, *, caches: bool) -> dict[str, Tensor]:
    rows = {"hidden": known.hidden[place]}
    if known.tapped is not None:
        width = TAPS * known.hidden.shape[-1]
        rows["tapped"] = known.tapped[place][:, :width]
    if caches:
        rows |= {"keys": known.keys[:, place], "values": known.values[:, place]}
    return {name: row.to(torch.bfloat16).contiguous() for name, row in rows.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    fresh = path.with_suffix(".part")
    save_file(tensors, fresh)
    os.replace(fresh, path)
