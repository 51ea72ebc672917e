from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa.drafters.attention import training as distill
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.drafters.attention.training import PAPER, Distillation, DistillSettings
from moa.target.loading import load_model
from moa.training.data import Batch, Document, PackedRows, pack
from moa.training.masks import AnchorRule, Spacing
from moa.training.teacher import Teacher
from testing.close import assert_rounded
from testing.tiny import FAMILIES, tiny


def task(
    target: Path,
    settings: DistillSettings | None = None,
    *,
    checkpointing: bool = False,
    **shape: Any,
) -> Distillation:
    loaded = load_model(target)
    torch.manual_seed(0)
    drafter = new_attention(AttentionConfig.for_target(loaded.facts, **shape), loaded.model)
    settings = settings or DistillSettings()
    return Distillation(
        drafter, Teacher(loaded.model), settings, gradient_checkpointing=checkpointing
    )


def gradients(task: Distillation, batch: Batch) -> dict[str, torch.Tensor]:
    task.module.zero_grad()
    loss = task.loss(batch, 0, 0.0)
    (loss.total / loss.weight).backward()
    return {n: p.grad.clone() for n, p in task.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_says_of_packed_rows_what_the_model_says_of_each_document(
    family: str, batch: Batch
) -> None:
    model = tiny(family)
    known = Teacher(model)(batch)
    segments = batch.segments[0]
    for segment in range(1, segments.max() + 1):
        inside = segments == segment
        ids = torch.from_numpy(batch.ids[0][inside])[None]
        alone = model.get_decoder()(input_ids=ids).last_hidden_state[0]
        torch.testing.assert_close(
            known.hidden[0][torch.from_numpy(inside)], alone, atol=2e-4, rtol=1e-3
        )


def test_a_half_precision_teacher_is_a_copy(target: Path, batch: Batch) -> None:
    model = load_model(target).model
    teacher = Teacher(model, torch.bfloat16)
    assert model.dtype == torch.float32
    assert teacher(batch).hidden.dtype == torch.bfloat16
    off = (teacher(batch).hidden.float() - Teacher(model)(batch).hidden).abs().mean()
    assert off < 0.05


def test_a_document_does_not_depend_on_its_row(target: Path, tmp_path: Path) -> None:
    first, second = (Document.answer([5, 6, 7], [8, 9, 10, n, 12]) for n in (11, 13))
    learner = task(target, DistillSettings(anchors=AnchorRule(())))
    together = pack([first, second], 32, tmp_path / "one")
    apart = pack([first, second], 8, tmp_path / "two")
    losses = [learner.loss(rows.rows(np.arange(len(rows))), 0, 0.0) for rows in (together, apart)]
    torch.testing.assert_close(losses[0].total, losses[1].total)
    assert losses[0].weight == losses[1].weight == 10  # the five answer tokens of each


def test_strict_anchors_never_let_a_query_see_its_own_activation(
    target: Path, rows: PackedRows
) -> None:
    """With no activation of its own, changing the target's state of a token cannot change the draft
    at that token."""
    batch = rows.batch(0, 0, 2)
    for strict, moves in ((True, False), (False, True)):
        learner = task(target, DistillSettings(anchors=AnchorRule(strict=strict)), final_state=True)
        known = learner.teacher(batch)
        learner.module.eval()
        at = int(np.argmax(batch.positions[0] == 2))  # inside the first document
        learner.settings = replace(
            learner.settings, anchors=AnchorRule((Spacing(1, 1, 1.0),), strict)
        )
        latest = learner.settings.anchors.latest(batch, 0, 0)
        with torch.no_grad():
            before = learner._draft(batch, known, latest, 0, 0.0)
            known.hidden[0, at] += 1.0
            after = learner._draft(batch, known, latest, 0, 0.0)
        assert bool((before[0, at] != after[0, at]).any()) is moves
        assert (before[0, :at] == after[0, :at]).all()


@pytest.mark.parametrize("shape", [{"tli": 1}, {"final_state": True}, {"use_lsa": False}])
def test_gradient_checkpointing_changes_no_gradient(
    target: Path, batch: Batch, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "TOKENS_AT_ONCE", 17)
    plain = gradients(task(target, **shape), batch)
    again = gradients(task(target, checkpointing=True, **shape), batch)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert_rounded(again[name], gradient)


def test_activations_that_nobody_reads_are_not_computed_but_to_fill_up_a_shape(
    target: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's bf16 kernels keep memory for every shape: a run grew by 18 MiB a step. What fills up
    changes nothing."""
    monkeypatch.setattr(distill, "TOKENS_STEP", 8)
    learner = task(target)
    seen: list[int] = []
    project = learner.module.project
    learner.module.project = lambda *inputs: (seen.append(len(inputs[2])), project(*inputs))[1]  # type: ignore[method-assign]
    rounded = gradients(learner, batch)
    monkeypatch.setattr(distill, "TOKENS_STEP", 1)
    for name, gradient in gradients(learner, batch).items():
        torch.testing.assert_close(rounded[name], gradient, atol=1e-5, rtol=1e-4)
    assert rounded["Ekv2E.weight"].abs().sum() > 0
    learner.settings = DistillSettings(anchors=AnchorRule(()))
    gradients(learner, batch)
    assert seen[2] < seen[1] <= seen[0] < batch.ids.size
    assert seen[0] % 8 == 0


def test_without_ca_the_target_is_never_read(target: Path, batch: Batch) -> None:
    found = gradients(task(target, use_ca=False), batch)
    assert not found.get("Ekv2E.weight", torch.zeros(1)).any()
    assert found["self_attention.self_attn.q_proj.weight"].any()


def test_the_papers_loss_is_a_tenth_of_kl_and_the_features(target: Path, batch: Batch) -> None:
    parts = {
        "kl": DistillSettings(anchors=PAPER.anchors),
        "features": DistillSettings(anchors=PAPER.anchors, loss_weight=0.0, feature_weight=1.0),
        "paper": replace(PAPER, staircase=False),
    }
    found = {
        name: task(target, settings).loss(batch, 0, 0.0).total for name, settings in parts.items()
    }
    torch.testing.assert_close(found["paper"], 0.1 * found["kl"] + found["features"])


def test_the_staircase_is_left_after_half_of_the_run(target: Path, batch: Batch) -> None:
    stairs, none = (task(target, DistillSettings(staircase=on)) for on in (True, False))
    assert stairs.loss(batch, 0, 0.0).total != none.loss(batch, 0, 0.0).total
    assert stairs.loss(batch, 0, 0.5).total == none.loss(batch, 0, 0.5).total
