"""The recipe of the embedded pair: its plan can be read, fits the embedded drafter, and runs from
course to course."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demo import natural, train
from demo.recipe import COURSES, DRAFTER_COURSES, DRAFTER_LAYERS, DRAFTER_SHAPE, ROW
from moa.demo import paths
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import load_attention
from moa.sampling import SamplingSettings
from moa.target.loading import load_model
from moa.target.torch_target import Target
from moa.training.data import Document, pack, pieces
from moa.training.generate import PROMPT_TOKENS
from testing.speculator import GenerationSettings, Speculator

pytestmark = pytest.mark.filterwarnings("default::UserWarning")


def test_the_plan_names_every_course_and_flags_of_rows_are_refused_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "drafter", "--dry-run"])
    assert train.main() == 0
    said = capsys.readouterr().out
    for course in (*COURSES, *DRAFTER_COURSES):
        assert f"{course.name:9} {course.settings.steps} steps" in said
    monkeypatch.setattr(sys, "argv", ["train", "drafter", "--tokens", "1000"])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert "are for rows" in capsys.readouterr().err


def test_the_embedded_drafter_has_the_shape_of_the_recipe() -> None:
    loaded = load_model(paths().target)
    assert AttentionConfig.read(paths().drafter, loaded.facts) == AttentionConfig.for_target(
        loaded.facts, **DRAFTER_SHAPE
    )
    assert DRAFTER_SHAPE["layers"] == len(DRAFTER_LAYERS)


def test_each_course_goes_on_from_the_weights_of_the_one_before(tmp_path: Path) -> None:
    courses = [
        replace(course, settings=replace(course.settings, steps=steps, batch=1, warmup=1))
        for course, steps in zip(DRAFTER_COURSES[:2], (2, 1), strict=True)
    ]
    for course in courses:
        text = [Document.text(list(range(5 + n, 45 + n))) for n in range(12)]
        for work in (tmp_path, tmp_path / "other work"):
            pack(text, 64, work / course.rows.name / "data")
    loaded = load_model(paths().target)
    ends = []
    for number in (1, 2):
        train.train_drafter(
            paths().target, tmp_path / f"after {number}", tmp_path, courses[:number]
        )
        ends.append(
            load_attention(tmp_path / f"after {number}", loaded.model, loaded.facts, torch.float32)
        )
    first, second = (dict(drafter.named_parameters()) for drafter in ends)
    moved = [(first[name] - second[name]).abs().max() for name in first]
    # One step at the rate of a warm-up moves every weight a little, and none as far as a new start
    # would.
    assert 0 < max(moved) < 0.05
    # From the folder of the first, the second alone ends near to where both do: the folder is in
    # half precision.
    train.train_drafter(
        paths().target,
        tmp_path / "alone",
        tmp_path / "other work",
        courses[1:],
        tmp_path / "after 1",
    )
    alone = dict(
        load_attention(
            tmp_path / "alone", loaded.model, loaded.facts, torch.float32
        ).named_parameters()
    )
    assert max((alone[name] - second[name]).abs().max() for name in second) < 0.05


def test_rows_are_packed_for_every_course(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for course in COURSES:
        pack([Document.text(list(range(5, 45)))], 64, tmp_path / course.name / "data")
    monkeypatch.setattr(sys, "argv", ["train", "rows", "--work", str(tmp_path)])
    assert train.main() == 0
    assert capsys.readouterr().out.count(": 1 rows in ") == len(COURSES)
    monkeypatch.setattr(
        sys, "argv", ["train", "rows", "--work", str(tmp_path), "--course", "widen"]
    )
    assert train.main() == 0
    assert capsys.readouterr().out.count(": 1 rows in ") == 1


def test_own_rows_are_the_targets_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wanted is what the target says after prompts of the corpus, which are not wanted."""
    monkeypatch.setattr(
        natural, "code", lambda _: iter(["def add(a, b):\n    return a + b\n\n" * 12])
    )
    monkeypatch.setattr(natural, "english", lambda _: iter(["It rains in the garden. " * 12]))
    course = replace(COURSES[0], mix=COURSES[0].mix.of(900))
    rows = train.own_rows(paths().target, course, tmp_path, 1.0, slots=4, quiet=True)
    target = Target.load(paths().target, slots=1, capacity=2 * ROW)
    text = pieces(train.documents(target.tokenizer, course.mix, longest_chat=1), ROW)
    asked = [document.prompt(PROMPT_TOKENS) for document in text]
    lines = [
        json.loads(line)
        for line in (tmp_path / "widen-own" / "generated.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    assert [line["ids"][: line["prompt_tokens"]] for line in lines] == asked
    for number, (prompt, line) in enumerate(zip(asked, lines, strict=True)):
        sampling = SamplingSettings(temperature=1.0, seed=course.mix.seed + number // 4 * 4)
        (alone,) = Speculator(target).generate(
            [prompt], GenerationSettings(max_new_tokens=8, sampling=sampling)
        )
        assert alone.ids == line["ids"][len(prompt) :][:8]
    answered = sum(len(line["ids"]) - line["prompt_tokens"] for line in lines)
    assert rows.wanted_tokens == answered


def test_a_smaller_mix_has_the_same_shares_and_is_not_taken_for_the_whole_course() -> None:
    course = COURSES[0].of(84_000)
    mix = COURSES[0].mix.of(84_000)
    assert course.name != COURSES[0].name
    assert course.mix == mix
    assert (mix.exercises, mix.code, mix.english) == (50_000, 19_000, 15_000)
    assert (mix.more, mix.seed) == (COURSES[0].mix.more, COURSES[0].mix.seed)
