"""Rows of text with all that drafters train on, written once: a run then needs no forward of the
target.

`tokens.npy` and `marks.npy` are the packed rows; `states/ROW.safetensors` the teacher's lesson of
one row in 16 bits: keys and values of all layers, the final state, and the low, middle and high
states that EAGLE-3 reads. For Gemma 3 270M that is 24 kB a token. Every row is its own file and
appears whole: an interrupted run goes on where it was, and a trainer may read while rows are still
added.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.kit.progress import say
from benchmarks.kit.speculator import GenerationSettings, Speculator
from benchmarks.witness.texts import documents, prompts
from demo.held_out import encode
from demo.skills import Example
from moa.drafters.taps import authors_taps
from moa.errors import UsageError
from moa.model.loading import LoadedModel, load_model, load_tokenizer
from moa.model.target import Target
from moa.sampling import SamplingSettings
from moa.training.data import Batch, Document, PackedRows, pack
from moa.training.loop import fast_precision
from moa.training.teacher import Lesson, Teacher

AT_ONCE = 4
"""Rows of one forward."""
_STATES = "states"
_TAPS = 3


def write_heldout(
    target: Path, out: Path, *, temperature: float, per_kind: int, tokens: int, length: int
) -> None:
    """The target's own continuations of held-out beginnings, and their lessons: a folder for each
    kind of text."""
    asked: dict[str, list[Example]] = {}
    for kind, example in prompts(per_kind):
        asked.setdefault(kind, []).append(example)
    writer = Speculator(Target.load(target, slots=17, capacity=length))
    sampling = SamplingSettings(temperature=temperature)
    settings = GenerationSettings(
        max_new_tokens=tokens, sampling=sampling, shape=None, ignore_eos=True
    )
    loaded = load_model(target)
    for kind, examples in asked.items():
        folder = out / f"{kind}-{temperature:g}"
        found = [encode(load_tokenizer(target), example)[: length - tokens] for example in examples]
        made = [
            g.ids
            for at in range(0, len(found), 17)
            for g in writer.generate(found[at : at + 17], settings)
        ]
        if not (folder / "tokens.npy").exists():
            pack((Document.answer(a, b) for a, b in zip(found, made, strict=True)), length, folder)
        write_lessons(loaded, folder)


def heldout_folders(out: Path) -> list[tuple[str, float, Path]]:
    """Kind, temperature and place of the texts."""
    parts = [(path.name.rpartition("-"), path) for path in sorted(out.iterdir())]
    return [(kind, float(temperature), path) for (kind, _, temperature), path in parts]


def write_rows(loaded: LoadedModel, out: Path, *, tokens: int, length: int) -> None:
    """Pack so many tokens, and write the lessons that are not there yet."""
    if not (out / "tokens.npy").exists():
        pack(documents(load_tokenizer(loaded.folder), tokens, length), length, out)
    write_lessons(loaded, out)


def write_lessons(loaded: LoadedModel, out: Path) -> None:
    """The lessons of packed rows that are not there yet."""
    rows = PackedRows(out)
    device = loaded.model.device
    teacher = Teacher(loaded.model, torch.bfloat16 if fast_precision(device) == "bf16" else None)
    teacher.tap(authors_taps(loaded.facts.layers))
    (out / _STATES).mkdir(exist_ok=True)
    missing = [row for row in range(len(rows)) if not _file(out, row).exists()]
    began = time.monotonic()
    done = 0
    for at in range(0, len(missing), AT_ONCE):
        batch = rows.rows(np.array(missing[at : at + AT_ONCE]))
        lesson = teacher(batch)
        for place, row in enumerate(batch.rows):
            _write(_file(out, int(row)), _of_row(lesson, place))
        done += int((batch.segments > 0).sum())
        say(
            f"{at + len(batch.rows)}/{len(missing)} rows, {done / (time.monotonic() - began):.0f} tokens/s"
        )


class StoredTeacher(Teacher):
    """Lessons from disk. The model gives embedding and head only, and logits are made anew from the
    final state."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        super().__init__(model)
        self.folder = folder

        self._tapped = 0

    def tap(self, layers: Sequence[int]) -> None:
        """Give the low, middle and high states, and the final ones where a fourth layer is asked
        for."""
        self._tapped = len(layers)

    def __call__(self, batch: Batch) -> Lesson:
        device = self.model.device
        dtype = self.model.dtype
        parts = [read_lesson(self.folder, int(row)) for row in batch.rows]
        found = {
            name: torch.stack([part[name] for part in parts]).to(device, dtype) for name in parts[0]
        }
        keys, values = (found.pop(name).transpose(0, 1) for name in ("keys", "values"))
        tapped = found.pop("tapped") if self._tapped else None
        if tapped is not None and self._tapped > _TAPS:
            tapped = torch.cat([tapped, found["hidden"]], -1)
        return Lesson(keys=keys, values=values, hidden=found["hidden"], tapped=tapped)


def written(folder: Path) -> PackedRows:
    """The rows whose lessons are there, from the first on without a gap."""
    rows = PackedRows(folder)
    count = next((row for row in range(len(rows)) if not _file(folder, row).exists()), len(rows))
    if not count:
        raise UsageError(f"{folder} has no lessons yet", hint="python -m benchmarks.witness rows")
    return rows.first(count)


def _file(folder: Path, row: int) -> Path:
    return folder / _STATES / f"{row:06d}.safetensors"


def _of_row(lesson: Lesson, place: int) -> dict[str, Tensor]:
    parts = {f.name: getattr(lesson, f.name) for f in fields(lesson)}
    rows = {name: part[:, place] if part.ndim == 5 else part[place] for name, part in parts.items()}
    return {name: row.to(torch.bfloat16).contiguous() for name, row in rows.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    fresh = path.with_suffix(".part")
    save_file(tensors, fresh)
    os.replace(fresh, path)


def read_lesson(folder: Path, row: int) -> dict[str, Tensor]:
    """What was written of a row: keys and values `[layers, L, kv_heads, D]`, hidden and tapped
    states `[L, ...]`."""
    found: dict[str, Tensor] = load_file(_file(folder, row))
    return found
