"""Recorded texts stand in for the target and for drafters beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.baselines.registry import drafting_with, save
from benchmarks.witness.__main__ import main
from benchmarks.witness.replayed import (
    Recorded,
    ReplayedDrafting,
    ReplayedTarget,
    known_chains,
    recorded,
)
from moa.drafters.contract import DraftRequest
from moa.sampling import SamplingSettings
from moa.target.torch_target import Row, Target
from moa.tree import TreeShape
from testing.speculator import GenerationSettings, Speculator
from testing.tiny import save_tiny
from tests.benchmarks.pairs import opponent


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target's folder, with recorded texts in it."""
    folder = save_tiny("llama", tmp_path_factory.mktemp("replayed") / "target")
    flags = ["--per-kind", "2", "--tokens", "12", "--length", "48"]
    assert main(["heldout", str(folder), str(folder / "texts"), *flags]) == 0
    return folder


@pytest.fixture
def texts(target: Path) -> list[Recorded]:
    """The recorded texts."""
    return recorded(target / "texts", 5)


def test_the_text_is_the_recorded_one_whoever_drafts(
    target: Path, texts: list[Recorded], tmp_path: Path
) -> None:
    assert [text.kind for text in texts] == ["chat", "code", "english", "chat", "code"]
    replayed = ReplayedTarget.load(target, slots=5, capacity=64, texts=texts)
    save(opponent("independent", replayed), tmp_path)
    drafting = ReplayedDrafting(known_chains(tmp_path, replayed, texts, 3), level_seconds=0.0)
    for shape in (None, TreeShape.chain(3)):
        settings = GenerationSettings(max_new_tokens=12, shape=shape, ignore_eos=True)
        made = Speculator(replayed, drafting).generate([text.prompt for text in texts], settings)
        assert [one.ids for one in made] == [text.answer for text in texts]
    assert all(one.drafted for one in made)


def test_states_keys_and_values_are_the_targets(target: Path, texts: list[Recorded]) -> None:
    pair = ReplayedTarget.load(target, capacity=64, texts=texts), Target.load(target, capacity=64)
    ids = texts[1].ids
    found = []
    for one in pair:
        one.tap((1, 1, 2))
        slot = one.cache.acquire()
        one.commit(one.forward([Row.chain(slot, ids[:5])]), 0, range(5))
        step = one.forward(
            [Row(slot, [ids[5], 1, ids[6]], [-1, 0, 0])]
        )  # the second node is beside the text
        found.append(one.commit(step, 0, [0, 2]))
    assert found[0].positions.tolist() == [5, 6]
    for mine, real in zip(
        (found[0].hidden, *found[0].kv), (found[1].hidden, *found[1].kv), strict=True
    ):
        torch.testing.assert_close(mine, real, atol=0.2, rtol=0.05)  # kept in 16 bits


def test_guesses_are_the_drafters(target: Path, texts: list[Recorded], tmp_path: Path) -> None:
    replayed = ReplayedTarget.load(target, capacity=64, texts=texts)
    model = opponent("independent", replayed)
    save(model, tmp_path)
    text = texts[0]
    real = drafting_with(model, slots=1, capacity=64)
    known = ReplayedDrafting(known_chains(tmp_path, replayed, texts, 3), level_seconds=0.0)
    own = replayed.cache.acquire()
    slot = real.open()
    done = 0
    assert known.open() == slot
    for stop in (len(text.prompt) - 1, len(text.prompt) + 4):
        part = text.ids[done:stop]
        committed = replayed.commit(replayed.forward([Row.chain(own, part)]), 0, range(len(part)))
        request = DraftRequest(slot, text.ids[stop], TreeShape.chain(2), SamplingSettings())
        for drafting in (real, known):
            drafting.observe(slot, part, committed)
        theirs, ours = (drafting.draft([request])[0] for drafting in (real, known))
        assert ours.tokens[:2] == theirs.tokens[:2]
        assert ours.scores[1] == pytest.approx(theirs.scores[1], abs=1e-3)
        done = stop
    known.close(slot)
