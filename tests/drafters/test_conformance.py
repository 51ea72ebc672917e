"""What every drafter at work promises (`moa/drafters/contract.py`), checked on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.model import serve_model
from moa.drafters.contract import Drafter, DraftRequest
from moa.errors import FullError
from moa.sampling import SamplingSettings
from moa.target.rows import Row
from moa.target.torch_target import Committed, Target
from moa.tree import DraftTree, TreeShape
from moa.wire.messages import Sampling
from testing.tiny import tiny
from tests.drafters.subjects import SUBJECTS, Subject
from tests.verifier import kit

VOCABULARY = 128
SLOTS = 3
CAPACITY = 96
FAR = -1000.0
"""A score that no guess is below: drafts are as large as their shape lets them be."""
SHAPES = [
    TreeShape.chain(1, min_score=FAR),
    TreeShape.chain(5, min_score=FAR),
    TreeShape(breadth=1, depth=5, nodes=2, min_score=FAR),
    TreeShape(breadth=3, depth=3, nodes=9, min_score=FAR),
    TreeShape(breadth=4, depth=2, nodes=3, min_score=FAR),
]
SAMPLINGS = [SamplingSettings(), SamplingSettings(temperature=0.8, seed=3)]
TEXT = np.random.default_rng(1).integers(4, 43, 40).tolist()
OTHER = np.random.default_rng(2).integers(4, 43, 40).tolist()


class Bench:
    """A drafter at work beside a target that runs its texts."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.target = Target.from_model(tiny("llama"), slots=48, capacity=CAPACITY)
        self.drafter: Drafter = subject.make(self.target, folder)
        if self.drafter.taps:
            self.target.tap(self.drafter.taps)
        self.drafting: Any = self.new()

    def new(self) -> Any:
        """The drafter at work once more, with memory of its own."""
        return self.drafter.drafting(slots=SLOTS, capacity=CAPACITY, scratch=32)

    def committed(self, ids: Sequence[int], start: int = 0) -> Committed:
        """What the target says of a text from `start` on."""
        slot = self.target.cache.acquire()
        for first, last in ((0, start), (start, len(ids))):
            if first < last:
                step = self.target.forward([Row.chain(slot, ids[first:last])])
                found = self.target.commit(step, 0, range(last - first))
        return found

    def reader(self, ids: Sequence[int], drafting: Any = None) -> int:
        """A slot that has read a text, in two pieces."""
        drafting = drafting or self.drafting
        slot: int = drafting.open()
        half = len(ids) // 2
        self.read(slot, ids[:half], 0, drafting)
        self.read(slot, ids, half, drafting)
        return slot

    def read(self, slot: int, ids: Sequence[int], start: int, drafting: Any = None) -> None:
        """Let a slot read a text from `start` on, as the engine does."""
        (drafting or self.drafting).observe(slot, ids[start:], self.committed(ids, start))

    def draft(self, slot: int, pending: int, drafting: Any = None) -> DraftTree:
        """A tree of three levels."""
        request = DraftRequest(slot, pending, SHAPES[3], SAMPLINGS[0])
        (tree,) = (drafting or self.drafting).draft([request])
        found: DraftTree = tree
        return found


@pytest.fixture(params=SUBJECTS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    found: Subject = request.param
    return found


@pytest.fixture
def bench(subject: Subject, tmp_path: Path) -> Bench:
    return Bench(subject, tmp_path / "drafter")


def check_tree(tree: DraftTree, request: DraftRequest) -> None:
    """What the target and the engine take for granted."""
    assert (tree.tokens[0], tree.parents[0]) == (request.pending, -1)
    assert len(tree.tokens) == len(tree.parents) == len(tree.scores)
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    assert all(0 <= token < VOCABULARY for token in tree.tokens)
    guesses = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(guesses)) == len(guesses), "a guess is made once after its parent"
    assert len(tree) - 1 <= request.shape.nodes
    assert max(tree.depths()) <= request.shape.depth
    children = [tree.parents.count(node) for node in range(len(tree))]
    assert max(children) <= request.shape.breadth


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_begins_with_the_pending_token_and_keeps_the_limits_of_its_shape(
    bench: Bench, shape: TreeShape, sampling: SamplingSettings
) -> None:
    """Of several texts together, one of which begins as another does."""
    texts = [TEXT[:20], TEXT[:8], OTHER[:13]]
    pending = [TEXT[20], TEXT[8], OTHER[13]]
    slots = [bench.reader(text) for text in texts]
    requests = [
        DraftRequest(slot, token, shape, sampling)
        for slot, token in zip(slots, pending, strict=True)
    ]
    trees = bench.drafting.draft(requests)
    assert len(trees) == len(requests)
    for tree, request in zip(trees, requests, strict=True):
        check_tree(tree, request)
    assert max(len(tree) for tree in trees) > 1, "it drafts"
    assert [bench.drafting.known(slot) for slot in slots] == [20, 8, 13], "a draft is not read"
    again = bench.drafting.draft(requests)
    assert [(tree.tokens, tree.parents) for tree in again] == [
        (tree.tokens, tree.parents) for tree in trees
    ]


def test_a_slot_knows_what_it_has_read_at_once(bench: Bench) -> None:
    drafting = bench.drafting
    slot = drafting.open()
    assert drafting.known(slot) == 0
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        bench.read(slot, TEXT[:stop], start)
        assert drafting.known(slot) == stop
    drafting.close(slot)
    for _ in range(SLOTS):
        assert drafting.known(drafting.open()) == 0


def test_a_text_may_be_read_later_with_its_records(bench: Bench) -> None:
    """Unless it takes the target's states, which are kept nowhere."""
    if bench.drafter.taps:
        pytest.skip("it follows every forward")
    drafting = bench.drafting
    slot = drafting.open()
    for start, stop in ((0, 7), (7, 20)):
        if drafting.reads_records:
            assert drafting.missing(slot, start, stop) == (start, stop)
            records = bench.drafter.records([bench.committed(TEXT[:stop], start)])
            drafting.give(slot, start, *records)
        assert drafting.missing(slot, start, stop) is None
        drafting.read(slot, TEXT[start:stop])
        assert drafting.known(slot) == stop
    drafting.read(slot, [])
    assert drafting.known(slot) == 20
    other = bench.new()
    assert (
        bench.draft(slot, 9).tokens == bench.draft(bench.reader(TEXT[:20], other), 9, other).tokens
    )


def test_slots_are_used_again_and_bring_nothing_along(subject: Subject, bench: Bench) -> None:
    drafting = bench.drafting
    for _ in range(3):
        slots = [bench.reader(OTHER[: 10 + number]) for number in range(SLOTS)]
        assert len(set(slots)) == SLOTS
        for slot in slots:
            bench.draft(slot, 9)
        if not drafting.free:
            with pytest.raises(FullError):
                drafting.open()
        for slot in slots:
            drafting.close(slot)
            assert drafting.free
    if not subject.remembers:
        fresh = bench.new()
        wanted = bench.draft(bench.reader(TEXT[:9], fresh), 9, fresh)
        found = bench.draft(bench.reader(TEXT[:9]), 9)
        assert (found.tokens, found.parents) == (wanted.tokens, wanted.parents)


def test_a_slot_is_not_changed_by_what_others_read_and_draft(
    subject: Subject, bench: Bench
) -> None:
    slot = bench.reader(TEXT[:12])
    before = bench.draft(slot, 9)
    other = bench.reader(OTHER[:15])
    bench.draft(other, 8)
    bench.drafting.close(other)
    assert bench.drafting.known(slot) == 12
    assert bench.draft(slot, 9).tokens == before.tokens


def test_a_copy_and_its_source_go_their_own_ways(bench: Bench) -> None:
    if not bench.drafter.taps:
        pytest.skip("it reads texts whenever it is asked to, and so needs no copies")
    drafting = bench.drafting
    source = bench.reader(TEXT[:12])
    before = bench.draft(source, 9)
    copy = drafting.copy(source, 8)
    assert (drafting.known(source), drafting.known(copy)) == (12, 8)
    text = [*TEXT[:8], *OTHER[:6]]
    bench.read(copy, text, 8)
    assert (drafting.known(source), drafting.known(copy)) == (12, 14)
    bench.draft(copy, 9)
    assert bench.draft(source, 9).tokens == before.tokens
    bench.read(source, TEXT[:20], 12)
    of_copy = bench.draft(copy, 9)
    drafting.close(source)
    assert drafting.known(copy) == 14
    assert bench.draft(copy, 9).tokens == of_copy.tokens


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
async def test_a_text_stays_the_targets_whatever_it_drafts(
    subject: Subject, sampling: SamplingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a verifier, twice: the second reader's text begins in a slot that was used before."""
    kit.draft_in_every_round(monkeypatch)
    settings = kit.SETTINGS
    target = Target.from_model(kit.model(), slots=settings.slots, capacity=settings.slot_capacity)
    drafter = subject.make(target, tmp_path / "drafter")
    ids = kit.prompt(0, 20)
    truth = kit.generated(ids, 24, sampling)
    drafted: list[int] = []
    running = Verifier(serve_model(target, drafter, drafter_name="d"), settings)
    real = running.engine.drafting.draft

    def draft(*of: Any, **how: Any) -> Any:
        found = real(*of, **how)
        drafted.extend(len(tokens) - 1 for tokens, _ in found)
        return found

    monkeypatch.setattr(running.engine.drafting, "draft", draft)
    async with running.open(), kit.client(running) as edge:
        for _ in range(2):
            session = await edge.start(
                ids,
                max_new_tokens=24,
                ignore_eos=True,
                sampling=Sampling(temperature=sampling.temperature, seed=sampling.seed),
            )
            await edge.stream(session)
            assert session.log[len(ids) :][: len(truth)] == truth
    assert any(drafted), "it has drafted"
