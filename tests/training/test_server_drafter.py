"""`moa-train` as it is: its start, its options, and that the file it leaves is of this target
alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.least_squares import solve
from moa.drafters.states.model import StateDrafter
from moa.drafters.states.training import shifted, visible
from moa.errors import ConfigError
from moa.model.blocks import additive
from moa.model.borrowed import SharedWeights
from moa.target.loading import load_model
from moa.training import options
from moa.training.data import PackedRows
from moa.training.run import TrainingRun
from moa.training.teacher import Teacher
from testing.tiny import save_tiny
from tests.training.test_cli import SMALL, train


@torch.inference_mode()
def test_the_start_is_the_best_linear_map_of_states_and_token(
    target: Path, rows: PackedRows
) -> None:
    loaded = load_model(target)
    model = StateDrafter.new(
        StateDrafterConfig.for_target(loaded.facts), SharedWeights.of(loaded.model)
    )
    teacher = Teacher(loaded.model)
    teacher.tap(model.config.taps)
    solve(model, teacher, rows)
    batch = rows.rows(np.arange(len(rows)))
    ids, positions, segments = (
        torch.from_numpy(x) for x in (batch.ids, batch.positions, batch.segments)
    )
    known = teacher(batch)
    features = shifted(model.read(known.states), positions)
    mask = additive(visible(model, positions, segments)).unsqueeze(1)
    found, _ = model.step(ids, features, positions, mask, model.empty_rows(ids))
    inside = (positions > 0) & (segments > 0)
    x = torch.cat([shifted(model.normed(known.states), positions), model.embed(ids)], -1)[
        inside
    ].double()
    y = known.hidden[inside].double()
    best = (x @ torch.linalg.lstsq(x, y).solution - y).square().sum()
    assert (found[inside].double() - y).square().sum() < 1.1 * best
    again = model.feedback(known.hidden)[inside].double()
    fused = model.read(known.states)[inside].double()
    assert (again - fused).square().sum() < (fused - fused.mean(0)).square().sum(), (
        "a drafted state says something"
    )


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--tli", "1"], "--tli is for --attention"),
        (["--layers", "0"], "--layers is for --attention"),
        (["--no-final-norm"], "--final-norm is for --attention"),
        (["--spacing", "6-14"], "--spacing is for --attention"),
        (["--ca-kv-heads", "2"], "--ca-kv-heads is for --attention"),
        (["--body", "some-model"], "--body is for --attention"),
        (["--sa-kv-heads", "3"], "heads do not fit its width"),
        (["--heads", "0"], "num_attention_heads must be a whole number of at least 1, not 0"),
    ],
)
def test_options_of_the_devices_drafter_are_refused(
    target: Path,
    chats: Path,
    tmp_path: Path,
    more: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(target, chats, tmp_path / "out", *more) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "out" / "data").exists(), "time was spent before the mistake was found"


def test_a_run_leaves_a_drafter_of_this_target(
    target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--sa-intermediate", "40", "--weights", "bf16"]
    assert train(target, chats, out, *flags, "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert train(target, chats, out, *flags, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == planned["parameters"]["drafter"]
    assert 0 <= result["agree_later"] <= 1
    loaded = load_model(target)
    shared = SharedWeights.of(loaded.model)
    assert StateDrafter.load(out, loaded.facts, shared).config.intermediate_size == 40
    other = load_model(save_tiny("llama", tmp_path / "other", num_hidden_layers=3))
    with pytest.raises(ConfigError, match="made for another target"):
        StateDrafter.load(out, other.facts, SharedWeights.of(other.model))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for change, error in (
        ({"model_type": "llama"}, "that of a drafter of states is"),
        ({"intermediate_size": "40"}, "intermediate_size must be a whole number"),
        ({"num_key_value_heads": True}, "num_key_value_heads must be a whole number"),
        ({"rope_theta": "x"}, "rope_theta must be a number above 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number above 0"),
        ({"what": 1}, "what is unknown"),
        ({"intermediate_size": 10**12}, r"by its config \[64, 1000000000000\]"),
    ):
        (out / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
        with pytest.raises(ConfigError, match=error):
            StateDrafter.load(out, loaded.facts, shared)


@pytest.mark.parametrize(("words", "is_part"), [("40", True), ("0", False)])
@pytest.mark.parametrize("kind", ["--states", "--attention", "--attention --body"])
def test_a_step_compares_a_part_of_a_large_head(
    target: Path,
    chats: Path,
    rows: PackedRows,
    tmp_path: Path,
    words: str,
    is_part: bool,
    kind: str,
) -> None:
    """Also where the drafter has a head of its own, of another width."""
    flags = ["--data", str(chats), "--out", str(tmp_path), *SMALL, "--head-words", words]
    flags += kind.split()
    if kind.endswith("--body"):
        sibling = save_tiny("qwen2", tmp_path / "sibling", hidden_size=32)
        shutil.copy(target / "tokenizer.json", sibling)
        flags += [str(sibling), "--freeze-body"]
    run = TrainingRun.of(options.parse([str(target), *flags]), torch.device("cpu"))
    run.sample_the_head(rows)
    loss = run.objective.loss(rows.rows(np.array([0])), 0, 0.0)
    assert loss.total > 0
    assert (run.objective.part_of_head is not None) == is_part
    if run.objective.part_of_head is not None:
        mine, theirs = run.objective.part_of_head(rows.rows(np.array([0])), 0)
        assert len(mine.head) == len(theirs.head) < run.facts.vocab_size
        assert mine.head.shape[1] == run.drafter.shared.head.shape[1]


@pytest.mark.parametrize("kind", ["--states", "--attention"])
def test_states_on_disk_train_the_same_drafter_and_are_gone_on_with(
    target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Up to their sixteen bits; also over a part of the head."""
    for words in ("0", "60"):
        losses = {}
        for teacher in ("memory", "disk"):
            out = tmp_path / f"{teacher}-{words}"
            flags = [kind, "--teacher", teacher, "--head-words", words, "--json"]
            assert train(target, chats, out, *flags) == 0
            losses[teacher] = json.loads(capsys.readouterr().out)["loss"]
            kept = sorted((out / "data").glob("states/*.safetensors"))
            assert bool(kept) == (teacher == "disk")
        assert losses["disk"] == pytest.approx(losses["memory"], rel=0.05)


@pytest.mark.parametrize("kind", ["--states", "--attention"])
def test_what_a_drafter_reads_is_kept_where_rows_are_seen_again_and_the_disk_has_room(
    target: Path, chats: Path, rows: PackedRows, tmp_path: Path, kind: str
) -> None:
    """Keys and values, too: else a large target would run in every step."""
    config = options.parse(
        [str(target), "--data", str(chats), "--out", str(tmp_path), *SMALL, kind]
    )
    run = TrainingRun.of(config, torch.device("cpu"))
    once = len(rows) // run.batch
    assert not run.keeps_states(rows, tmp_path, once)
    assert run.keeps_states(rows, tmp_path, 2 * once + 1)
    run.write_states(rows, tmp_path)
    # Beside the numbers each file has a header.
    files = sum(file.stat().st_size for file in (tmp_path / "states").iterdir())
    assert run.states_bytes(rows) < files < run.states_bytes(rows) + 1000 * len(rows)


def test_a_dry_run_of_bare_prompts_asks_the_target_for_their_answers(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{number} plus {number}?"}) for number in range(12)]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = ["--generate", "--max-new-tokens", "24", "--teacher", "disk"]
    assert train(target, prompts, tmp_path / "out", *flags, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wanted_tokens"] == 12 * 24
    assert found["seconds"]["answers"] > 0
    assert found["seconds"]["target's states"] > 0
    assert found["disk_mib"] > 0
    assert not (tmp_path / "out").exists()
