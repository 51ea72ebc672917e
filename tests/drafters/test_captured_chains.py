"""Chains as captured graphs, of every kind of drafter, are what is drafted level by level, and wait
for the device once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moa.drafters.contract import Drafter, DraftRequest
from moa.sampling import SamplingSettings
from moa.target.cuda.graphs import Graphs, Rerun
from moa.target.rows import Row
from moa.target.torch_target import Target
from moa.tree import TreeShape
from testing.tiny import tiny
from tests.drafters.subjects import ATTENTION, attention, drafter_of
from tests.target.cuda.test_decoder import Ordered

CAPACITY = 96
GREEDY = SamplingSettings()


class Recorder:
    """Replays what it captured, and lets no step wait."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Rerun) -> Rerun:
        def replay() -> None:
            self.replays += 1
            with Ordered(allocates=True):
                run()

        return replay


def target_of() -> Target:
    return Target.from_model(tiny("llama"), slots=8, capacity=CAPACITY)


def both(target: Target, drafter: Drafter, lengths: list[int]) -> tuple[Any, Any, Recorder, Graphs]:
    """Two drafters that have observed the same texts."""
    graphs = Graphs(recorder := Recorder())
    plain = drafter.drafting(slots=8, capacity=CAPACITY, scratch=24)
    chains = drafter.drafting(slots=8, capacity=CAPACITY, scratch=24, graphs=graphs)
    if drafter.taps:
        target.tap(drafter.taps)
    for number, length in enumerate(lengths):
        slot = target.cache.acquire()
        ids = [(7 * number + 3 * place) % 120 + 4 for place in range(length)]
        committed = target.commit(target.forward([Row.chain(slot, ids)]), 0, range(length))
        for drafting in (plain, chains):
            drafting.observe(drafting.open(), ids, committed)
    return plain, chains, recorder, graphs


def requests_of(
    lengths: list[int], sampling: list[SamplingSettings], depth: int
) -> list[DraftRequest]:
    shape = TreeShape.chain(depth)
    return [
        DraftRequest(slot, 20 + slot, shape, sampling[slot % len(sampling)])
        for slot in range(len(lengths))
    ]


@pytest.mark.parametrize("kind", [*ATTENTION, "states", "eagle3", "sibling"])
@pytest.mark.parametrize("lengths", [[5], [40, 2, 17, 3, 50]], ids=str)
def test_a_chain_is_the_one_that_is_drafted_without_graphs(
    kind: str, lengths: list[int], tmp_path: Path
) -> None:
    target = target_of()
    drafter = drafter_of(kind, target, tmp_path / "published")
    plain, chains, recorder, graphs = both(target, drafter, lengths)
    kinds = [
        GREEDY,
        SamplingSettings(temperature=0.8, seed=3),
        SamplingSettings(temperature=1.3, seed=5),
    ]
    for sampling in ([GREEDY], kinds):
        requests = requests_of(lengths, sampling, 5)
        wanted = plain.draft(requests)
        eager = chains.draft(requests)
        while graphs.unprepared:
            graphs.prepare()
        before = recorder.replays
        found = chains.draft(requests)
        assert recorder.replays == before + 5, "a graph for each token of the chain"
        for one, two, three in zip(wanted, found, eager, strict=True):
            assert one.tokens == two.tokens == three.tokens
            assert one.parents == two.parents
            assert one.scores == pytest.approx(two.scores, abs=2e-4)
            assert two.scores == three.scores


def test_chains_end_where_each_should_and_trees_are_drafted_without_graphs() -> None:
    target = target_of()
    plain, chains, recorder, graphs = both(target, attention(target), [6, 20])
    shapes = [TreeShape.chain(2), TreeShape.chain(6, min_score=-3.0)]
    requests = [DraftRequest(slot, 9, shape, GREEDY) for slot, shape in enumerate(shapes)]
    for one, two in zip(plain.draft(requests), chains.draft(requests), strict=True):
        assert one.tokens == two.tokens
        assert len(two) <= 7
    missing = graphs.unprepared
    replays = recorder.replays
    tree = [DraftRequest(0, 9, TreeShape(3, 3, 9), GREEDY)]
    assert chains.draft(tree)[0].tokens == plain.draft(tree)[0].tokens
    assert (graphs.unprepared, recorder.replays) == (missing, replays)


def test_a_slot_that_is_given_back_holds_nothing_of_a_chain() -> None:
    target = target_of()
    _, chains, _, graphs = both(target, attention(target, tli=1), [6, 3])
    requests = requests_of([6, 3], [GREEDY], 5)
    chains.draft(requests)
    graphs.prepare()
    chains.draft(requests)
    for slot in (0, 1):
        chains.close(slot)
    for pool in (chains.pool, chains.borrowed, chains.records):
        assert pool is not None
        assert not pool.k.any()
        assert not pool.v.any()
