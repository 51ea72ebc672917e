"""Training from states on disk is training beside the teacher; rows are written once, and gone on
with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.baselines import train
from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.presets import NO_RECORDS, moa_config
from benchmarks.drafters import witness
from benchmarks.witness import rows, texts
from benchmarks.witness.__main__ import main
from benchmarks.witness.rows import write_rows
from moa.drafters.attention.model import new_attention
from moa.model.borrowed import SharedWeights
from moa.target.loading import load_model
from moa.training import teacher_files
from moa.training.data import Document
from moa.training.loop import fast_precision
from moa.training.teacher import Teacher
from moa.training.teacher_files import StoredTeacher, written
from testing.tiny import save_tiny
from tests.benchmarks.pairs import prompts


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny target, and random documents in place of the packages' text."""
    made = [Document.text(ids) for ids in prompts(*([24] * 24), seed=2)]
    monkeypatch.setattr(rows, "documents", lambda tokenizer, tokens, length: made)
    return save_tiny("llama", tmp_path / "target")


def test_stored_lessons_are_the_teachers_and_writing_goes_on_where_it_was_cut_short(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(target)
    out = tmp_path / "rows"
    writes: list[Path] = []
    real = teacher_files._write

    def cut_short(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if len(writes) == 5:
            raise KeyboardInterrupt
        real(path, tensors)
        writes.append(path)

    monkeypatch.setattr(teacher_files, "_write", cut_short)
    with pytest.raises(KeyboardInterrupt):
        write_rows(loaded, out, tokens=600, length=48)
    assert len(written(out)) == 5
    monkeypatch.setattr(
        teacher_files, "_write", lambda path, tensors: (writes.append(path), real(path, tensors))
    )
    write_rows(load_model(target), out, tokens=600, length=48)
    data = written(out)
    assert len(writes) == len(set(writes)) == len(data) == 12
    batch = data.batch(0, 0, 3)
    computed = torch.bfloat16 if fast_precision(torch.device("cpu")) == "bf16" else None
    teacher = Teacher(load_model(target).model, computed)
    reader = StoredTeacher(SharedWeights.of(loaded.model), out, loaded.model.dtype)
    assert reader(batch).tapped is None
    for one in (teacher, reader):
        one.tap((2, 2, 1, 4))
    with torch.no_grad():
        theirs = teacher(batch)
        stored = reader(batch)
    for name in ("keys", "values", "hidden", "tapped"):
        torch.testing.assert_close(
            getattr(stored, name), getattr(theirs, name).float(), atol=0.05, rtol=0.05
        )


def test_texts_are_of_every_kind_and_held_out_ones_are_others() -> None:
    found = texts.prompts(2)
    assert [kind for kind, _ in found] == [kind for kind in texts.KINDS for _ in range(2)]
    for kind in texts.KINDS:
        stream = texts.texts(kind, "train")
        some = {next(stream) for _ in range(5)}
        assert len(some) == 5
        assert not any(example.prompt in text for _, example in found for text in some)


def test_drafters_trained_on_stored_lessons_are_measured_along_the_targets_own_texts(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = tmp_path / "heldout"
    stored = tmp_path / "rows"
    made = tmp_path / "out"
    for temperature in ("0", "1"):
        flags = [
            "--temperature",
            temperature,
            "--per-kind",
            "2",
            "--tokens",
            "12",
            "--length",
            "48",
        ]
        assert main(["heldout", str(target), str(held_out), *flags]) == 0
    assert main(["rows", str(target), str(stored), "--tokens", "600", "--length", "48"]) == 0
    names = ["moa0", "eagle3", "states", "independent"]
    flags = [
        "--target",
        str(target),
        "--steps",
        "1",
        "--batch",
        "2",
        "--warmup",
        "1",
        "--head-words",
        "8",
    ]
    flags += ["--shape", "self_attention_intermediate_size=600", "--states", str(stored)]
    assert train.main([*names, *flags, "--out", str(made)]) == 0
    # A drafter of states takes nothing of the target but embedding and head.
    monkeypatch.delattr(train, "load_model")
    assert train.main(["eagle3", *flags, "--out", str(tmp_path / "again")]) == 0
    asked: dict[str, Any] = {"target": str(target), "texts": str(held_out)}
    asked["drafters"] = tuple(str(made / name) for name in names)
    result = witness.measure(witness.Options(**asked, behind=("0", "2", "none")))
    found = {
        (r["drafter"], r["behind"], r["kind"], r["temperature"]): r["won"] for r in result["runs"]
    }
    assert len(found) == 4 * 3 * 3 * 2
    assert all(1 <= won <= 7 for won in found.values())
    for (name, _, kind, temperature), won in found.items():
        if name == "independent":
            assert won == found[name, "none", kind, temperature]
    assert found["eagle3", "0", "code", 1.0] != found["eagle3", "2", "code", 1.0]
    assert "| states | none |" in witness.tables(result)
    shares = witness.measure(witness.Options(**asked, behind=("0", "none"), alone=4, cut=2))["runs"]
    assert len(shares) == 4 * 2 * 3
    assert all(0 <= run["won"] <= 1 and run["texts"] == 2 for run in shares)


def test_drafters_in_folders_of_one_name_stand_apart_in_a_table() -> None:
    found = witness.named(["/a/states", "b/states/", "c/eagle3"])
    assert [name for _, name in found] == ["a/states", "b/states", "eagle3"]


def test_the_chance_of_the_same_choice_is_how_often_it_happens() -> None:
    drawn = torch.Generator().manual_seed(3)
    mine, theirs = torch.randn(2, 12, generator=drawn) * 2
    noise = -torch.empty(200_000, 12).exponential_(generator=drawn).log()
    often = ((mine + noise).argmax(-1) == (theirs + noise).argmax(-1)).float().mean()
    assert witness.same_choice(mine, theirs) == pytest.approx(float(often), abs=0.01)
    assert witness.same_choice(theirs, theirs) == pytest.approx(1)


@torch.inference_mode()
def test_alone_it_writes_what_it_is_a_model_of(target: Path, tmp_path: Path) -> None:
    loaded = load_model(target)
    write_rows(loaded, tmp_path, tokens=600, length=48)
    batch = written(tmp_path).rows(np.array([0]))
    row = witness.Row(
        batch, StoredTeacher(SharedWeights.of(loaded.model), tmp_path, loaded.model.dtype)(batch)
    )
    config = moa_config(loaded.facts, {**NO_RECORDS, "layers": 2})
    model, head = new_attention(config, loaded.model), loaded.model.get_output_embeddings().weight
    start = 24 + 9  # in the second document
    own = witness.alone(model, row, start, witness.NONE, 6, head)
    assert own.ids[:, 24 : start + 7].equal(
        greedy(as_llama(model, 64, ()), row.ids[:, 24 : start + 1])
    )
    assert row.ids.equal(torch.from_numpy(batch.ids))
    own.ids[:, 24 : start + 7] = greedy(loaded.model, row.ids[:, 24 : start + 1])
    assert witness.as_the_target(loaded.model, own, start, 6) == 1
    own.ids[0, start + 6] = (own.ids[0, start + 6] + 1) % 64
    assert witness.as_the_target(loaded.model, own, start, 6) == pytest.approx(5 / 6)


def greedy(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The library's forward, word by word."""
    for _ in range(6):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], -1)
    return ids


def test_greedy_rounds_follow_each_other() -> None:
    assert witness.greedy_rounds(torch.tensor([3.0, 9.0, 9.0, 1.0, 2.0, 9.0])) == 6 / 3
