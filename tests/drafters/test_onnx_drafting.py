"""Drafting beside a target by an exported graph: the drafts are torch's, and the text is the
target's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moa.bundle import Bundle
from moa.drafters.attention.model import AttentionDrafter, load_attention
from moa.drafters.body_drafting import BodyDrafting
from moa.drafters.contract import DraftRequest
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.errors import FullError
from moa.graph.load import LoadedGraph
from moa.sampling import SamplingSettings
from moa.target.torch_target import Committed, Row, Target
from moa.tree import TreeShape
from tests.edge import kit
from tests.verifier import kit as verifier_kit

SHAPES = (TreeShape.chain(4, min_score=-1e9), TreeShape(3, 3, 9, min_score=-1e9))
SAMPLINGS = (SamplingSettings(), SamplingSettings(temperature=0.7, seed=11))


@pytest.fixture(scope="module", params=[0, 1], ids=["own layers", "a borrowed layer"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair without and with a layer of the target's in the drafter."""
    if not request.param:
        return kit.pair()
    folder = tmp_path_factory.mktemp("borrowed")
    kit.make_pair(folder, tli=request.param)
    return folder


def opened(folder: Path, slots: int = 1) -> tuple[Target, AttentionDrafter, OnnxDrafting]:
    target = Target.load(str(folder / "target"), slots=slots, capacity=160)
    drafter = load_attention(folder / "drafter", target.model, target.facts)
    graph = LoadedGraph.load(Bundle.open(folder / "bundle"), threads=1)
    return target, drafter, OnnxDrafting(drafter, graph, slots=slots)


def run(target: Target, slot: int, tokens: list[int]) -> Committed:
    step = target.forward([Row.chain(slot, tokens, judged="none")])
    return target.commit(step, 0, range(len(tokens)))


def test_it_drafts_what_torch_drafts_after_every_round(pair: Path) -> None:
    target, drafter, graph = opened(pair)
    torch_drafting = BodyDrafting(drafter, capacity=160)
    slot = target.cache.acquire()
    places = (graph.open(), torch_drafting.open())
    text = verifier_kit.prompt(3, 100)
    for start, stop in (
        (0, 30),
        (30, 30 + drafter.record_lag + 1),
        (39, 60),
    ):  # always so many that records are made at once
        committed = run(target, slot, text[start:stop])
        for drafting, place in zip((graph, torch_drafting), places, strict=True):
            drafting.observe(place, text[start:stop], committed)
        for shape in SHAPES:
            for sampling in SAMPLINGS:
                (ours,), (theirs,) = (
                    drafting.draft([DraftRequest(place, text[stop], shape, sampling)])
                    for drafting, place in zip((graph, torch_drafting), places, strict=True)
                )
                assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
                assert ours.scores == pytest.approx(theirs.scores, abs=1e-3)


def test_a_slot_that_is_used_again_drafts_as_a_new_one() -> None:
    target, _, graph = opened(kit.pair())
    with pytest.raises(FullError):
        [graph.open() for _ in range(2)]
    graph.close(0)
    slot = target.cache.acquire()
    place = graph.open()
    first = verifier_kit.prompt(1, 40)
    graph.observe(place, first, run(target, slot, first))
    graph.close(place)
    target.cache.release(slot)
    drafts = []
    text = verifier_kit.prompt(2, 20)
    for drafting in (graph, opened(kit.pair())[2]):
        slot = target.cache.acquire()
        place = drafting.open()
        drafting.observe(place, text, run(target, slot, text))
        drafts += drafting.draft([DraftRequest(place, 7, SHAPES[1], SAMPLINGS[0])])
        target.cache.release(slot)
    assert drafts[0] == drafts[1]


def test_records_of_the_latest_tokens_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, graph = opened(kit.pair())
    made: list[int] = []
    real = drafter.records

    def count(pieces: Sequence[Committed]) -> Any:
        made.append(sum(len(piece.hidden) for piece in pieces))
        return real(pieces)

    monkeypatch.setattr(drafter, "records", count)
    slot = target.cache.acquire()
    place = graph.open()
    text = verifier_kit.prompt(1, 60)
    for start in range(0, 60, 3):
        graph.observe(place, text[start : start + 3], run(target, slot, text[start : start + 3]))
    assert made == [9] * 6, "three rounds of three each time"
    assert list(graph.held(place)) == [(0, 54)]
