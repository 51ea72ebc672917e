"""A draft in the making: after the log, or, while an answer is awaited, after what the answer will most likely be."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from edge_client.drafter.onnx import Drafter
from edge_client.turn.controller import Controller
from moa.sampling import SamplingSettings
from moa.tree import DraftTree, TreeShape

_A_STEP = 16
"""Tokens in a run of the drafter above which it was a piece of a prompt."""


@dataclass
class DraftAhead:
    """`step()` until it is true, then `tree` is there."""

    drafter: Drafter
    ids: list[int]
    """The log that the draft follows; it grows by the guessed bonus token of an awaited answer."""
    shape: TreeShape
    tree: DraftTree | None = None
    _work: Generator[None, None, DraftTree] = field(init=False)
    _steps: int = 0

    @classmethod
    def after(cls, drafter: Drafter, ids: Sequence[int], shape: TreeShape, sampling: SamplingSettings) -> DraftAhead:
        """A draft after the log as it is."""
        draft = cls(drafter, list(ids), shape)
        draft._work = drafter.draft(draft.ids, shape, sampling)
        return draft

    @classmethod
    def beyond(
        cls, drafter: Drafter, ids: Sequence[int], asked: DraftTree, shape: TreeShape, sampling: SamplingSettings
    ) -> DraftAhead:
        """A draft for when the target accepts the likeliest path of what was `asked`, and says what we would say."""
        draft = cls(drafter, [*ids, *likeliest_path(asked)], shape)

        def work() -> Generator[None, None, DraftTree]:
            draft.ids.append(drafter.guess(draft.ids, sampling))
            yield
            return (yield from drafter.draft(draft.ids, shape, sampling))

        draft._work = work()
        draft._steps = -1
        return draft

    def matches(self, ids: Sequence[int]) -> bool:
        """Whether this is the draft that is needed after `ids`."""
        return self.ids == ids and (self._steps >= 0 or self.tree is not None)

    def step(self, controller: Controller) -> bool:
        """Run the drafter once; true when the tree is ready."""
        if self.tree is not None:
            return True
        start = perf_counter()
        try:
            next(self._work)
        except StopIteration as end:
            self.tree = end.value
        if self.drafter.run_tokens <= _A_STEP:
            controller.drafted(self.drafter.run_tokens, perf_counter() - start)
        self._steps += 1
        return self.tree is not None


def likeliest_path(tree: DraftTree) -> list[int]:
    """Tokens from below the root to the leaf with the best score."""
    inner = set(tree.parents)
    leaves = [node for node in range(len(tree)) if node not in inner]
    node = max(leaves, key=lambda leaf: tree.scores[leaf])
    path: list[int] = []
    while node > 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]
