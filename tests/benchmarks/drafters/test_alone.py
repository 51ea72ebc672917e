"""Drafters that finish answers alone: what they are given, where they stop, and that a perfect one is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines.presets import moa_config
from benchmarks.baselines.registry import open_drafting, save
from benchmarks.baselines.replay import ReplayDrafting
from benchmarks.drafters import alone as drafters_offline
from demo import held_out
from demo.skills import Example
from moa.errors import UsageError
from moa.model.checkpoint import new_drafter, save_drafter
from moa.model.generate import GenerationSettings, Speculator
from moa.model.target import Target
from tests.benchmarks.pairs import body, opponent, prompts, target_for, tiny_target
from tests.tiny import save_tiny


def test_an_answer_ends_at_the_first_end_of_text() -> None:
    assert drafters_offline.finished([1, 2, 3], 2, [7, 9, 8], 10, [9]) == [1, 2, 7, 9]
    assert drafters_offline.finished([1, 2, 3], 0, [9, 1], 10, [9]) == [9]
    assert drafters_offline.finished([1, 2, 3], 1, [7, 8, 6], 3, [9]) == [1, 7, 8]


def test_a_drafter_that_is_always_right_finishes_as_the_target_does() -> None:
    target, asked = Target.from_model(tiny_target(), slots=2, capacity=256), prompts(6, 9, 5)
    settings = GenerationSettings(max_new_tokens=70, shape=None)
    answers = [one.ids for one in Speculator(target).generate(asked, settings)]
    drafter = new_drafter(moa_config(target.facts, {}), target.model).eval()
    texts = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
    drafting = ReplayDrafting(drafter, texts, 1.0, slots=2, capacity=256)
    found = drafters_offline.offline(target, drafting, asked, answers, 70)
    assert set(found) == set(drafters_offline.CUTS)
    assert all(each == answers for each in found.values())
    assert target.pool.free == 2


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "independent"])
def test_what_is_drafted_alone_is_what_would_be_drafted_for_a_round(kind: str, tmp_path: Path) -> None:
    target = target_for(kind, tiny_target(), slots=1, capacity=256)
    save(opponent(kind, target), tmp_path)
    (prompt,) = prompts(8)
    answer = prompts(20, seed=3)[0]
    alone = drafters_offline.Alone(target, open_drafting(tmp_path, target), [[*prompt, *answer]])
    alone.run_to([8])
    alone.run_to([8 + 5])
    stepwise = alone.ends([8 + 5], 12)
    alone.close()
    alone = drafters_offline.Alone(target, open_drafting(tmp_path, target), [[*prompt, *answer]])
    alone.run_to([8 + 5])
    assert alone.ends([8 + 5], 12) == stepwise
    assert len(stepwise[0]) == 12
    alone.close()


def test_every_drafter_is_told_beside_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "target")
    target = target_for("independent", tiny_target())
    save_drafter(new_drafter(moa_config(target.facts, {}), target.model), tmp_path / "drafter")
    save(body("independent", target), tmp_path / "independent")
    asked = [Example("arithmetic", f"What is {n} + 1?", str(n + 1)) for n in range(3)]
    monkeypatch.setattr(held_out, "skill_prompts", lambda *_: asked)
    monkeypatch.setattr(held_out, "encode", lambda tokenizer, example: tokenizer.encode(example.prompt))
    folders = (str(tmp_path / "drafter"), str(tmp_path / "independent"))
    how: dict[str, Any] = {"drafters": folders, "target": str(source), "tokens": 12, "batch": 2}
    result = drafters_offline.measure(drafters_offline.Options(**how))
    ways = ["target", "MoA", "MoA without records", "independent", "API client (stops)"]
    assert list(dict.fromkeys(run["way"] for run in result["runs"])) == ways
    assert "3 held-out prompts" in drafters_offline.tables(result)
    with pytest.raises(UsageError, match="do not fit in --capacity 20"):
        drafters_offline.measure(drafters_offline.Options(**how, capacity=20))
