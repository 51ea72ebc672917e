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

from moa.config import TargetFacts
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
    """Run the target over rows, and write its results, a file for each row; those that are there
    already are left. Process `rank` of `world` has every `world`-th row. With `caches` keys and
    values are written, too; `tell` is called after each forward."""
    (out / _STATES).mkdir(parents=True, exist_ok=True)
    missing = [row for row in range(rank, len(rows), world) if not _file(out, row).exists()]
    started = time.monotonic()
    tokens = 0
    for first in range(0, len(missing), AT_ONCE):
        batch = rows.rows(np.array(missing[first : first + AT_ONCE]))
        known = teacher(batch)
        for place, row in enumerate(batch.rows):
            _write(_file(out, int(row)), _of_row(known, place, caches=caches))
        tokens += int((batch.segments > 0).sum())
        rate = tokens / (time.monotonic() - started)
        tell(first + len(batch.rows), len(missing), rate)


def bytes_per_token(facts: TargetFacts, *, taps: bool, caches: bool) -> int:
    """Bytes that a token takes on disk: of its final state, with `taps` of the states between
    layers, with `caches` of the keys and values of all layers."""
    numbers = facts.hidden_size
    if taps:
        numbers += TAPS * facts.hidden_size
    if caches:
        numbers += 2 * facts.layers * facts.kv_heads * facts.head_dim
    return _BYTES * numbers


class StoredTeacher:
    """The target's results from disk, with its embedding and head: logits are made anew from the
    final states."""

    def __init__(
        self, shared: SharedWeights, folder: Path, dtype: torch.dtype | None = None
    ) -> None:
        """Results are in the precision of `shared`, unless another is given."""
        self.shared = shared
        self.folder = folder
        self._dtype = dtype or shared.head.dtype
        self._taps = 0

    def tap(self, layers: Sequence[int]) -> None:
        """Give the low, middle and high states, and the final ones where a fourth layer is asked
        for."""
        self._taps = len(layers)

    def __call__(self, batch: Batch) -> TeacherOutput:
        """The target's results for a batch, read from the files of its rows, in the form in which
        the target itself would return them."""
        device = self.shared.head.device
        rows = [read_output(self.folder, int(row)) for row in batch.rows]
        stacked = {}
        for name in rows[0]:
            stacked[name] = torch.stack([row[name] for row in rows]).to(device, self._dtype)
        hidden = stacked["hidden"]
        keys = hidden.new_zeros(0)
        values = hidden.new_zeros(0)
        if "keys" in stacked:
            # The layers first, as a teacher has them.
            keys = stacked["keys"].transpose(0, 1)
            values = stacked["values"].transpose(0, 1)
        tapped = None
        if self._taps:
            tapped = stacked.get("tapped")
        if tapped is not None and self._taps > TAPS:
            # The fourth layer that is asked for is the last one: its states are the final ones.
            tapped = torch.cat([tapped, hidden], -1)
        return TeacherOutput(keys=keys, values=values, hidden=hidden, tapped=tapped)


def written(folder: Path) -> PackedRows:
    """The rows whose results are there, from the first on without a gap."""
    rows = PackedRows(folder)
    count = 0
    while count < len(rows) and _file(folder, count).exists():
        count += 1
    if not count:
        raise UsageError(f"{folder} holds no results of a target yet")
    return rows.first(count)


def read_output(folder: Path, row: int) -> dict[str, Tensor]:
    """What was written of a row: hidden and tapped states `[L, ...]`, and, if it was, keys and
    values `[layers, L, kv_heads, D]`."""
    tensors: dict[str, Tensor] = load_file(_file(folder, row))
    return tensors


def _file(folder: Path, row: int) -> Path:
    return folder / _STATES / f"{row:06d}.safetensors"


def _of_row(known: TeacherOutput, place: int, *, caches: bool) -> dict[str, Tensor]:
    """The tensors that are written of one row of a batch, the one at `place`, in 16 bits."""
    tensors = {"hidden": known.hidden[place]}
    if known.tapped is not None:
        # The final state, which may be tapped too, is there already.
        width = TAPS * known.hidden.shape[-1]
        tensors["tapped"] = known.tapped[place][:, :width]
    if caches:
        tensors["keys"] = known.keys[:, place]
        tensors["values"] = known.values[:, place]
    return {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a row's file; it appears whole."""
    fresh = path.with_suffix(".part")
    save_file(tensors, fresh)
    os.replace(fresh, path)
