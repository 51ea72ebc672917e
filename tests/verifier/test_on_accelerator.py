"""The verifier's own tests of rounds, streams, sampling, cuts and resumes once more, on the
accelerator's decoder: with reference kernels, and a recorder in place of graphs. And what is
different there: drafts are chains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from moa.speculation.guess_tree import GuessTree
from moa.target.cuda.runner import Accelerator
from moa.target.pages import PAGE
from moa.wire.messages import Foresee, StreamTokens
from tests.target.cuda.reference import ReferenceKernels
from tests.verifier import kit, test_exact
from tests.verifier.test_engine import *  # noqa: F403
from tests.verifier.test_foresee import *  # noqa: F403
from tests.verifier.test_logprobs import *  # noqa: F403
from tests.verifier.test_service import *  # noqa: F403


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target that the kit makes."""
    monkeypatch.setitem(
        kit.target_options, "accelerator", Accelerator(ReferenceKernels(), lambda run: run)
    )


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("llama", test_exact.SAMPLED), ("qwen3", test_exact.GREEDY), ("mistral", test_exact.SAMPLED)],
    ids=lambda one: one if isinstance(one, str) else "",
)
async def test_sessions_in_a_crowd_are_told_what_the_library_says(
    family: str, sampling: Any
) -> None:
    await test_exact.test_sessions_alone_and_together_are_told_what_the_library_says(
        family, sampling
    )


def low_precision() -> Any:
    return copy.deepcopy(kit.model()).to(torch.bfloat16)


async def test_guesses_that_branch_are_verified_only_where_the_text_stays_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def verified() -> int:
        """Of three guesses, of which two are at one place."""
        async with (
            kit.verifier(own=low_precision() if low else None, drafter=False) as running,
            kit.client(running) as edge,
        ):
            session = await edge.start([5, 6, 7], max_new_tokens=8)
            await edge.send(session.stream(waits=True))
            await edge.send(session.foresee([7, 8, 9, 10], [-1, 0, 0, 1], [0] * 4))
            answer = await edge.receive()
            assert isinstance(answer, StreamTokens)
            return answer.foreseen

    low = True
    assert await verified() == 2, "a chain"
    low = False
    assert await verified() == 3, "in float32"
    low = True
    monkeypatch.setitem(kit.target_options, "exact", False)
    assert await verified() == 3, "where exactness is waived"


async def test_streams_draft_chains_in_low_precision_and_count_the_paths_of_forwards() -> None:
    """The server's own drafts, and what it picks out of a tree of guesses."""
    async with kit.verifier(own=low_precision()) as running, kit.client(running) as edge:
        target = running.engine.target
        branched = []
        drafted = []
        forward = target.forward

        def watched(rows: Any) -> Any:
            branched.extend(
                row for row in rows if list(row.parents) != list(range(-1, len(row.parents) - 1))
            )
            drafted.extend(len(row.tokens) for row in rows)
            return forward(rows)

        target.forward = watched  # type: ignore[method-assign]
        session = await edge.start(kit.prompt(0, 12), max_new_tokens=24)
        stream = session.stream()
        await edge.send(stream)
        tree = [session.log[-1], *range(10, 20)]
        parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 6]
        await edge.send(Foresee(session.id, stream.round, stream.base, tree, parents, [0] * 11))
        while not session.finish:
            message = await edge.receive()
            if isinstance(message, StreamTokens):
                session.receive(message)
        assert not branched
        assert max(drafted) > 1
        page = running.metrics.page().decode()
        assert 'moa_forwards_total{path="eager",tier="1x8"}' in page
        assert 'path="library"' not in page


def test_a_chain_is_picked_out_of_guesses_by_the_likeliest_child_of_each() -> None:
    held = GuessTree()
    held.add([1], 0, [1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 2], [0, 9, 1, 0, 8, 2])
    assert held.pick(5, 0.0, branches=False)[:2] == ([1, 3, 6], [-1, 0, 1])
    assert held.pick(1, 0.0, branches=False)[:2] == ([1, 3], [-1, 0])


def test_the_spare_page_holds_nothing_but_padding() -> None:
    target = kit.served(drafter=False).target
    slot = target.cache.acquire()
    target.forward([kit.Row.chain(slot, [5, 6, 7])])
    target.cache.release(slot)
    assert not target.cache.k[:, :-PAGE].any()
    assert target.cache.k[:, -PAGE:].any()
    assert not target.cache.k[:, -PAGE + 1 :].any()
