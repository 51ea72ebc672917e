"""Training presets: same rows and steps for each, resumable, and mistakes found before the work
begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.baselines import train
from benchmarks.baselines.presets import PRESETS, build
from benchmarks.baselines.registry import load_target
from moa.errors import UsageError, run_cli
from moa.target.loading import load_model
from moa.training.data import PackedRows
from moa.training.loop import LoopSettings
from testing.tiny import save_tiny
from tests.benchmarks.pairs import WIDE, packed

SETTINGS = LoopSettings(steps=4, batch=2, warmup=1, precision="fp32", checkpoint_every=2)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, PackedRows]:
    """A target's folder and training data."""
    return str(save_tiny("llama", tmp_path / "target")), packed(tmp_path / "data")


@pytest.mark.filterwarnings("default::UserWarning")
def test_one_command_line_trains_a_list(
    pair: tuple[str, PackedRows], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, _ = pair
    names = ["moa0", "eagle2", "eagle3", "independent"]
    flags = [
        "--target",
        target,
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
        "--steps",
        "2",
    ]
    flags += [
        "--batch",
        "2",
        "--precision",
        "fp32",
        "--shape",
        "self_attention_intermediate_size=600",
    ]
    assert train.main([*names, *flags]) == 0
    summaries = [train.finished(tmp_path / "out" / name) for name in names]
    sizes = [s["parameters"] for s in summaries if s]
    assert len(sizes) == 4
    assert max(sizes) <= 1.02 * min(sizes)
    assert capsys.readouterr().out.count("tokens/s") == 8
    load_target(target, slots=1, capacity=64, drafter=tmp_path / "out" / "eagle3")
    with pytest.raises(UsageError, match="finished run with other settings"):
        train.main(["moa0", *flags, "--warmup", "3"])
    assert train.main(["moa0", *flags, "--seed", "1"]) == 0
    assert train.finished(tmp_path / "out" / "moa0-1")


@pytest.mark.parametrize("name", ["moa0", "eagle2", "eagle3", "independent"])
def test_a_resumed_run_ends_where_a_whole_one_does(
    name: str, pair: tuple[str, PackedRows], tmp_path: Path
) -> None:
    target, data = pair
    for out, stops in ((tmp_path / "whole", (None,)), (tmp_path / "parts", (2, None))):
        for stop in stops:
            summary = train.train_preset(
                name, target, data, SETTINGS, out, shape=WIDE, distill={}, stop=stop
            )
            assert summary["steps"] == (stop or SETTINGS.steps)
    whole, parts = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts"))
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_gives_a_loss_that_trains_every_parameter(
    name: str, pair: tuple[str, PackedRows]
) -> None:
    target = load_target(pair[0], slots=1, capacity=16)
    drafter, task = build(name, target.model, target.facts, WIDE, {}, 0)
    loss = task.loss(pair[1].batch(0, 0, 2), 0, 0.0)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    idle = {n for n, p in drafter.named_parameters() if p.grad is None}
    # Only what an ablation switches off may stay as it was.
    switched_off = (
        ("cross_attention.", "layer_self_attention.", "Ekv2E.") if name == "moa0-no-ca" else ()
    )
    assert all(n.startswith(switched_off) for n in idle)


def test_settings_of_training_reach_both_kinds_of_ours_where_the_preset_leaves_them_alone(
    pair: tuple[str, PackedRows],
) -> None:
    loaded = load_model(pair[0])
    for name, absent in (("states", 2.0), ("states-in-step", 0.0)):
        _, task = build(
            name, loaded.model, loaded.facts, WIDE, {"feature_weight": 3.0, "absent": 2.0}, 0
        )
        assert (task.settings.feature_weight, getattr(task.settings, "absent", None)) == (
            3.0,
            absent,
        )
    _, task = build("moa0", loaded.model, loaded.facts, WIDE, {"feature_weight": 3.0}, 0)
    assert task.settings.feature_weight == 3.0


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--target",
        "none",
        "--data",
        str(tmp_path / "none"),
        "--out",
        str(tmp_path),
        "--steps",
        "1",
    ]

    def said(*arguments: str) -> str:
        assert run_cli("train", lambda: train.main([*arguments, *flags])) == 2
        return capsys.readouterr().err

    assert "no preset 'nonsense'" in said("moa0", "nonsense")
    assert "no packed training data" in said("moa0")
    packed(tmp_path / "none", 4)
    assert "--shape takes NAME=VALUE" in said("moa0", "--shape", "wide")
