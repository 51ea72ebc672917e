from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moa.errors import ConfigError
from moa.masking import MASKED
from moa.model.drafter import Drafter
from moa.training.data import Batch, PackedRows
from moa.training.distill import Distillation, DistillSettings
from moa.training.loop import Loop, LoopSettings
from moa.training.masks import AnchorRule, Spacing
from moa.training.rollout import Place, RolloutRule, rolled_out
from tests.close import assert_rounded
from tests.training.test_distill import gradients, task

COLD = AnchorRule((Spacing(2, 5, 0.4),), cold=0.6)
RULE = RolloutRule(tokens=6, share=0.7)
SETTINGS = DistillSettings(anchors=COLD, rollouts=RULE)


def drawn(batch: Batch, rule: RolloutRule = RULE, seed: int = 0, step: int = 0) -> list[Place]:
    return rule.places(batch, COLD.latest(batch, seed, step), seed, step)


@torch.no_grad()
def greedy(drafter: Drafter, ids: np.ndarray) -> list[int]:
    """What the drafter would say after each token, in one pass without activations."""
    tokens = torch.from_numpy(ids)[None]
    causal = torch.full((len(ids), len(ids)), MASKED).triu(1)[None, None]
    hidden, _ = drafter.features(tokens, torch.arange(len(ids))[None], causal, drafter.empty_rows(tokens))
    return drafter.logits(hidden)[0].argmax(-1).tolist()


@pytest.mark.parametrize("shape", [{}, {"layers": 3, "cross_attention_after": (1, 3)}, {"use_ca": False}])
def test_a_rollout_is_the_drafters_own_greedy_text(target: Path, rows: PackedRows, shape: dict[str, object]) -> None:
    learner = task(target, settings=SETTINGS, **shape)
    batch = rows.batch(0, 0, 16)
    places = drawn(batch)
    own = rolled_out(learner.module, batch, places, ())
    assert len(places) > 3
    changed = np.zeros_like(batch.wanted)
    for place in places:
        text = own.ids[place.row, place.start : place.end]
        said = greedy(learner.module, text)
        assert text[place.begin - place.start :].tolist() == said[place.begin - place.start - 1 : -1]
        assert place.end - place.begin <= RULE.tokens
        assert own.wanted[place.row, place.begin : place.end].all()
        changed[place.row, place.begin : place.end] = True
        inside = batch.segments[place.row] == batch.segments[place.row, place.start]
        assert not own.wanted[place.row, place.end :][inside[place.end :]].any()
    assert (own.ids[~changed] == batch.ids[~changed]).all()
    assert not (own.ids == batch.ids).all()


def test_it_is_written_only_in_answers_of_documents_without_activations(rows: PackedRows) -> None:
    batch = rows.batch(0, 0, 32)
    latest = COLD.latest(batch, 0, 0)
    every = drawn(batch, RolloutRule(tokens=6, share=1.0))
    chosen = drawn(batch)
    assert 0 < len(chosen) < len(every)
    for place in every:
        inside = batch.segments[place.row] == batch.segments[place.row, place.start]
        assert (latest[place.row, inside] == -1).all()
        assert batch.wanted[place.row, place.begin]
        assert inside[place.begin : place.end].all()


def test_places_depend_on_the_row_and_not_on_its_process(rows: PackedRows) -> None:
    whole, second = rows.batch(0, 3, 8), rows.batch(0, 3, 4, rank=1, world=2)
    of_second = [replace(place, row=place.row // 2) for place in drawn(whole, step=3) if place.row % 2 == 1]
    assert of_second
    assert drawn(second, step=3) == of_second
    assert drawn(whole, step=3) != drawn(whole, step=4)


def test_nothing_is_wanted_after_an_end_of_text_that_it_wrote(target: Path, rows: PackedRows) -> None:
    learner = task(target, settings=SETTINGS)
    batch = rows.batch(0, 0, 16)
    place = max(drawn(batch), key=lambda place: place.end - place.begin)
    free = rolled_out(learner.module, batch, [place], ())
    eos = int(free.ids[place.row, place.begin + 1])
    ended = rolled_out(learner.module, batch, [place], (eos,))
    length = 1 + int(free.ids[place.row, place.begin] != eos)
    assert ended.wanted[place.row, place.begin : place.end].tolist() == [
        n < length for n in range(place.end - place.begin)
    ]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_its_positions_have_a_loss_and_the_weights_their_gradient(
    target: Path, rows: PackedRows, precision: torch.dtype
) -> None:
    """The loss is that of the written text as if it had been data, and autocast still has a gradient for it."""
    batch = rows.batch(0, 0, 16)
    learner = task(target, settings=SETTINGS)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        found = gradients(learner, batch)
        as_data = rolled_out(learner.module, batch, drawn(batch), learner.teacher.eos_ids)
        learner.settings = replace(SETTINGS, rollouts=RolloutRule())
        expected, without = gradients(learner, as_data), gradients(learner, batch)
    for name, gradient in found.items():
        assert_rounded(gradient, expected[name])
    name = "self_attention.self_attn.q_proj.weight"
    assert found[name].any()
    assert not torch.equal(found[name], without[name])


def test_a_stopped_run_goes_on_exactly(target: Path, rows: PackedRows, tmp_path: Path) -> None:
    settings = LoopSettings(steps=4, batch=4, warmup=1, precision="fp32", checkpoint_every=1)

    def run(out: str, stop: int | None = None) -> list[float]:
        loop = Loop(task(target, settings=SETTINGS), rows, settings, tmp_path / out, quiet=True)
        return [entry["loss"] for entry in loop.run(stop_after=stop)]

    whole = run("whole")
    run("parts", 2)
    assert run("parts") == whole


def test_rollouts_that_cannot_be(target: Path) -> None:
    for bad in ({"tokens": -1}, {"tokens": 4, "share": 0.0}, {"tokens": 4, "share": 2.0}):
        with pytest.raises(ConfigError, match="rollouts"):
            RolloutRule(**bad)
    with pytest.raises(ConfigError, match="cold"):
        DistillSettings(rollouts=RULE)
    learner = task(target, tli=1)
    with pytest.raises(ConfigError, match="borrowed"):
        Distillation(learner.module, learner.teacher, SETTINGS)
