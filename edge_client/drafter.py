"""The drafter on the device: a cache that follows the ids it is given, and trees drafted after them.

The caller always passes all ids so far; what the cache already holds is found by comparing. Rolling back after a
verdict, keeping what was accepted and re-feeding the rest are one rule: keep the longest common prefix, first of the
committed rows, then along the nodes of the latest tree.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_client.cache import MASKED, RecordBuffer, Rows
from edge_client.graph import StepGraph
from moa.sampling import SamplingSettings, gumbel
from moa.tree import DraftTree, TreeGrower, TreeShape

Steps = Generator[None, None, DraftTree]
"""Yields between two runs of the graph, so that the caller can look at the network, or give up; returns the tree."""

_CHUNK = 128
"""Prompt tokens fed in one run: bounds the time until the caller may look up."""


class Drafter(Protocol):
    """What the decode loop needs of a drafter."""

    records: RecordBuffer | None

    @property
    def run_seconds(self) -> float:
        """Time spent so far in running the model, and nothing else."""
        ...

    def feed(self, ids: Sequence[int]) -> Generator[None, None, None]:
        """Bring the cache up to all but the last of `ids`."""
        ...

    def draft(self, ids: Sequence[int], shape: TreeShape, sampling: SamplingSettings) -> Steps:
        """A tree of guesses after `ids`, whose last is the tree's root."""
        ...

    def guess(self, ids: Sequence[int], sampling: SamplingSettings) -> int:
        """The most likely token after `ids`."""
        ...


class OnnxDrafter:
    """`Drafter` over the exported step graph."""

    def __init__(self, graph: StepGraph, *, draft_tokens: NDArray[np.int64] | None = None, vocab_size: int) -> None:
        """`draft_tokens` are the target ids of a reduced draft vocabulary."""
        self.graph = graph
        self.records = RecordBuffer(graph.records) if graph.records else None
        self.ids: list[int] = []
        """Tokens whose rows are committed: row r is position r."""
        self._rows = Rows(graph.cache, 2 * graph.layers)
        self._nodes: dict[tuple[int, int], int] = {}
        """(parent's row, token) -> row, for rows after the committed ones; -1 is the last committed row."""
        self._noise_ids = vocab_size if draft_tokens is None else draft_tokens
        self._silence = np.zeros((1, 1, 1), np.float32)
        self._noise: dict[tuple[int, int], NDArray[np.float32]] = {}

    @property
    def run_seconds(self) -> float:
        """Time spent so far in ONNX Runtime."""
        return self.graph.run_seconds

    def feed(self, ids: Sequence[int]) -> Generator[None, None, None]:
        """Bring the cache up to all but the last of `ids`."""
        known = self._keep(ids[:-1])
        while known < len(ids) - 1:
            chunk = list(ids[known : min(known + _CHUNK, len(ids) - 1)])
            causal = np.tril(np.ones((len(chunk), len(chunk)), np.bool_))
            self._step(chunk, np.arange(known, known + len(chunk)), causal, known, SamplingSettings(), last_only=True)
            self.ids += chunk
            known += len(chunk)
            yield

    def draft(self, ids: Sequence[int], shape: TreeShape, sampling: SamplingSettings) -> Steps:
        """A tree of guesses after `ids`, whose last is the tree's root."""
        yield from self.feed(ids)
        grower = TreeGrower(ids[-1], shape)
        first_row, base = len(self.ids), len(ids) - 1
        row_of: dict[int, int] = {-1: -1}
        while grower.frontier:
            position = base + grower.level
            nodes, tokens = list(grower.frontier), grower.frontier_tokens
            at = first_row + len(grower.fed)
            logp, top = self._step(tokens, np.full(len(tokens), position), grower.mask(), at, sampling)
            for row, (node, token) in enumerate(zip(nodes, tokens, strict=True), at):
                row_of[node] = row
                self._nodes[row_of[grower.parents[node]], token] = row
            grower.expand(top, logp)
            if grower.frontier:
                yield
        return grower.tree()

    def guess(self, ids: Sequence[int], sampling: SamplingSettings) -> int:
        """The most likely token after `ids`."""
        for _ in self.feed(ids):
            pass
        at = len(self.ids)
        _, top = self._step([ids[-1]], np.array([at]), np.ones((1, 1), np.bool_), at, sampling)
        self._nodes[-1, ids[-1]] = at
        return int(top[0, 0])

    def _keep(self, ids: Sequence[int]) -> int:
        """Cut the committed rows to what agrees with `ids`, join the tree's rows that go on from there."""
        ids = list(ids)
        same = len(self.ids)
        if self.ids != ids[:same]:
            pairs = enumerate(zip(self.ids, ids, strict=False))
            same = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(self.ids), len(ids)))
            self._nodes.clear()
        path: list[int] = []
        row = -1
        while same + len(path) < len(ids) and (row := self._nodes.get((row, ids[same + len(path)]), -2)) >= 0:
            path.append(row)
        self._rows.gather(path, same)
        self._nodes.clear()
        self.ids = ids[: same + len(path)]
        return len(self.ids)

    def _step(
        self,
        tokens: Sequence[int],
        positions: NDArray[np.int64],
        visible: NDArray[np.bool_],
        at: int,
        sampling: SamplingSettings,
        *,
        last_only: bool = False,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Run tokens that see the committed rows, and of what follows (rows up to `at`, and themselves) `visible`."""
        count, committed = len(tokens), len(self.ids)
        self._rows.reserve(at + count)
        size = self._rows.size
        mask = np.full((1, 1, count, size + count), MASKED, np.float32)
        mask[..., :committed] = 0
        earlier = at - committed
        mask[0, 0, :, committed:at][visible[:, :earlier]] = 0
        mask[0, 0, :, size:][visible[:, earlier:]] = 0
        feeds: dict[str, NDArray[Any]] = {
            "ids": np.array([tokens], np.int64),
            "positions": positions.astype(np.int64)[None],
            "queries": np.arange(count - 1 if last_only else 0, count),
            "mask": mask,
            "scale": np.array([1.0 if sampling.greedy else 1.0 / sampling.temperature], np.float32),
            "noise": self._silence if sampling.greedy else self._noise_at(sampling.seed, int(positions[-1]) + 1),
            **dict(zip(self.graph.cache_inputs, self._rows.arrays, strict=True)),
        }
        if self.records is not None:
            feeds |= self.records.feeds()
        logp, top, rows = self.graph.run(feeds)
        self._rows.write(at, rows)
        return logp, top

    def _noise_at(self, seed: int, position: int) -> NDArray[np.float32]:
        """The noise that decides the token at `position`; kept, since a position is drafted several times."""
        if (seed, position) not in self._noise:
            if len(self._noise) > 64:
                self._noise.clear()
            noise = gumbel(seed, position, self._noise_ids).astype(np.float32)
            self._noise[seed, position] = noise[None, None]
        return self._noise[seed, position]
