"""A drafter that is wrong costs speed and nothing else: not a token of the text changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cloud_verifier.engine.draft import FlatTree, check_draft
from cloud_verifier.engine.job import Job
from moa.errors import DraftError
from tests.verifier import kit

IDS = kit.prompt(3, 20)
COUNT = 12
OTHER = 5
"""A token that is neither the pending one nor out of the vocabulary."""
BAD: dict[str, Callable[[int], FlatTree]] = {
    "without the pending token": lambda pending: ([(pending + 1) % kit.VOCAB, OTHER], [-1, 0]),
    "nothing at all": lambda _: ([], []),
    "a parent too few": lambda pending: ([pending, OTHER], [-1]),
    "two roots": lambda pending: ([pending, OTHER], [-1, -1]),
    "a root with a parent": lambda pending: ([pending, OTHER], [0, 0]),
    "a child before its parent": lambda pending: ([pending, OTHER, OTHER], [-1, 2, 0]),
    "its own parent": lambda pending: ([pending, OTHER], [-1, 1]),
    "outside of the vocabulary": lambda pending: ([pending, kit.VOCAB], [-1, 0]),
    "below the vocabulary": lambda pending: ([pending, -2], [-1, 0]),
    "more than there is room": lambda pending: ([pending] + [OTHER] * 999, list(range(-1, 999))),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
async def test_the_text_stays_the_targets(bad: Callable[[int], FlatTree]) -> None:
    asked = 0

    def draft(jobs: Sequence[Job], beside: int = 0) -> list[FlatTree]:
        nonlocal asked
        asked += 1
        return [bad(job.ids[-1]) for job in jobs]

    async with kit.verifier() as running, kit.client(running) as edge:
        running.engine.drafting.draft = draft  # type: ignore[method-assign]
        session = await edge.start(IDS, max_new_tokens=COUNT, ignore_eos=True)
        await edge.stream(session)
        truth = kit.generated(IDS, COUNT)
        assert session.log[len(IDS) :][: len(truth)] == truth
        assert asked
        assert kit.metric(running, 'moa_engine_faults_total{where="drafting"}') == asked


def test_a_tree_and_a_lone_pending_token_are_drafts() -> None:
    check_draft(([7, 1, 2, 3], [-1, 0, 0, 2]), pending=7, vocabulary=8, room=3)
    check_draft(([7], [-1]), pending=7, vocabulary=8, room=-1)
    with pytest.raises(DraftError, match="4 nodes where 3 have room"):
        check_draft(([7, 1, 2, 3, 4], [-1, 0, 1, 2, 3]), pending=7, vocabulary=8, room=3)
