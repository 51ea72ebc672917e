"""The measurements: their arithmetic, their check of the text, and small runs on a tiny pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines.presets import moa_config
from benchmarks.baselines.registry import save
from benchmarks.drafters import acceptance
from benchmarks.kit.exactness import count_ties
from demo import held_out
from demo.skills import Example
from moa.drafters.attention.model import new_attention
from moa.errors import MoaError
from moa.model.checkpoint import save_drafter
from moa.sampling import SamplingSettings
from moa.target.torch_target import Target
from testing.speculator import Generation, GenerationSettings, Speculator
from testing.tiny import save_tiny
from tests.benchmarks.pairs import body, prompts, target_for, tiny_target


def test_acceptance_length_weighs_rounds() -> None:
    found = acceptance.acceptance_length([Generation(won=[1, 3]), Generation(won=[5, 5, 1])])
    assert found["tau"] == pytest.approx(15 / 5)
    assert found["se"] == pytest.approx((2 * ((4 - 6) ** 2 + (11 - 9) ** 2)) ** 0.5 / 5)


def test_acceptance_by_position_is_conditional_and_leaves_out_the_last_round() -> None:
    assert acceptance.by_position([Generation(won=[1, 2, 3, 9]), Generation(won=[3, 1])], 3) == [
        0.75,
        2 / 3,
        0.0,
    ]


def test_a_changed_text_is_a_loud_failure() -> None:
    target = Target.from_model(tiny_target(), capacity=64)
    asked = prompts(4)
    text = (
        Speculator(target).generate(asked, GenerationSettings(max_new_tokens=6, shape=None))[0].ids
    )
    for sampling in (SamplingSettings(), SamplingSettings(temperature=1.0)):
        assert count_ties(target, asked, [text], [text], sampling) == 0
        with pytest.raises(MoaError, match="speculation changed the text of prompt 0 at token 2"):
            count_ties(
                target, asked, [text], [[*text[:2], (text[2] + 1) % 128, *text[3:]]], sampling
            )
    with pytest.raises(MoaError, match="speculation changed"):
        count_ties(target, asked, [text], [text[:-1]], SamplingSettings())


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target, a MoA drafter and an independent one on disk; prompts that the tiny tokenizer can
    spell."""
    save_tiny("llama", tmp_path / "target")
    target = target_for("independent", tiny_target())
    save_drafter(new_attention(moa_config(target.facts, {}), target.model), tmp_path / "moa0")
    save(body(target), tmp_path / "independent")
    asked = [Example("arithmetic", f"What is {n} + 1?", str(n + 1)) for n in range(3)]
    monkeypatch.setattr(held_out, "skill_prompts", lambda *_: asked)
    monkeypatch.setattr(held_out, "code_prompts", lambda *_: [Example("code", "def f(", "")])
    kinds = [
        ("code", Example("code", "def f(", "")),
        *(("exercises", example) for example in asked),
    ]
    monkeypatch.setattr(held_out, "by_kind", lambda *_: kinds)
    monkeypatch.setattr(
        held_out, "encode", lambda tokenizer, example: tokenizer.encode(example.prompt)
    )
    return tmp_path


def test_acceptance_of_every_drafter_shape_and_temperature(pair: Path) -> None:
    drafters = str(pair / "moa0"), str(pair / "independent")
    how: dict[str, Any] = {"tokens": 6, "batch": 2, "shapes": ("chain", "tree")}
    result = acceptance.measure(
        acceptance.Options(drafters=drafters, target=str(pair / "target"), **how)
    )
    assert len(result["runs"]) == 8
    assert set(result["runs"][0]["categories"]) == {"arithmetic", "code"}
    assert "All 32 texts equal plain decoding" in acceptance.tables(result)
