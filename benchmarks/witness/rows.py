"""The witness's rows: its text and its own continuations, with the target's results on them, as
`moa.training.teacher_files` keeps them."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.kit.progress import say
from benchmarks.witness.texts import documents, prompts
from demo.held_out import encode
from demo.skills import Example
from moa.drafters.taps import authors_taps
from moa.sampling import SamplingSettings
from moa.target.loading import LoadedModel, load_model, load_tokenizer
from moa.target.torch_target import Target
from moa.training.data import Document, PackedRows, pack
from moa.training.loop import fast_precision
from moa.training.teacher import Teacher
from moa.training.teacher_files import write_outputs
from testing.speculator import GenerationSettings, Speculator


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
    """The target's results on packed rows that are not there yet, with keys and values: every
    drafter of the comparison trains on them."""
    precision = fast_precision(loaded.model.device)
    teacher = Teacher(loaded.model, torch.bfloat16 if precision == "bf16" else None)
    teacher.tap(authors_taps(loaded.facts.layers))
    write_outputs(
        teacher,
        PackedRows(out),
        out,
        caches=True,
        tell=lambda done, missing, rate: say(f"{done}/{missing} rows, {rate:.0f} tokens/s"),
    )
