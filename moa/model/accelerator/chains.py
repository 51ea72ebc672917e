"""Chains by the server's drafter on an accelerator. One step for all sequences is a graph, replayed
for each token of the draft: tokens and scores stay on the device until the chains are complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moa.model.accelerator.buffers import power_of_two
from moa.model.accelerator.graphs import Graphs, Work
from moa.model.accelerator.sampling import gumbel
from moa.model.blocks import additive
from moa.model.borrowed import Rows
from moa.model.drafter import Drafter
from moa.model.drafting import DraftRequest, MoaDrafting
from moa.model.slots import SlotPool
from moa.sampling import noise_keys
from moa.tree import DraftTree, TreeGrower

_DEEPEST = 32
_NARROWEST = 256
_TOKEN, _PLACE, _KNOWN, _SLOT, _SCALE, _KEYS = range(6)
"""Rows of the upload: a sequence's newest token, the column and position that it gets, how many
tokens have records, the slot, the bits of 1 / temperature (0: greedy), and what the noise of each
level begins with."""


class ChainTier(NamedTuple):
    """What a graph is for."""

    rows: int
    view: int
    """Columns of a sequence that a step may attend to."""
    sampled: bool

    @property
    def name(self) -> str:
        """As graphs and metrics have it."""
        return f"draft {self.rows}x{self.view}{' sampled' if self.sampled else ''}"


class ChainDrafting(MoaDrafting):
    """`MoaDrafting` whose chains run as graphs; trees and drafts under a grammar run as there."""

    def __init__(
        self, drafter: Drafter, graphs: Graphs, *, slots: int, capacity: int, scratch: int
    ) -> None:
        super().__init__(drafter, slots=slots, capacity=capacity, scratch=scratch)
        self._graphs = graphs
        most = power_of_two(slots)
        self._inputs = torch.zeros(_KEYS + _DEEPEST, most, dtype=torch.long, device=self.device)
        self._level = torch.zeros(1, dtype=torch.long, device=self.device)
        self._columns = torch.arange(capacity + scratch, device=self.device)
        self._tokens = torch.zeros(_DEEPEST, most, dtype=torch.double, device=self.device)
        self._scores = torch.zeros_like(self._tokens)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the graphs of greedy drafts for short texts."""
        rows = 1
        while rows <= self._inputs.shape[1]:
            tier = ChainTier(rows, min(_NARROWEST, len(self._columns)), False)
            self._graphs.add(tier.name, self._work(tier))
            rows *= 2

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each request."""
        depth = max(request.shape.depth for request in requests)
        if depth > _DEEPEST or any(
            one.shape.breadth > 1 or one.grammar is not None for one in requests
        ):
            return super().draft(requests)
        slots = [request.slot for request in requests]
        for pool in (self.pool, self.borrowed):
            if pool is not None:
                pool.begin(slots, [depth] * len(slots))
        view = max(self.pool.lengths[slot] for slot in slots) + depth
        tier = ChainTier(
            power_of_two(len(slots)),
            min(power_of_two(max(view, _NARROWEST)), len(self._columns)),
            not all(request.sampling.greedy for request in requests),
        )
        self._fill(tier, requests, depth)
        step, _ = self._graphs.get(tier.name, lambda: self._work(tier))
        for _ in range(depth):
            step()
        tokens, scores = torch.stack([self._tokens[:depth], self._scores[:depth]]).cpu().numpy()
        trees = []
        for row, request in enumerate(requests):
            grower = TreeGrower(request.pending, request.shape)
            while grower.frontier:
                at = slice(grower.level, grower.level + 1), slice(row, row + 1)
                grower.expand(tokens[at].astype(np.int64), scores[at].astype(np.float32))
            trees.append(grower.tree())
        return trees

    def _fill(self, tier: ChainTier, requests: Sequence[DraftRequest], depth: int) -> None:
        inputs = np.zeros((_KEYS + depth, tier.rows), dtype=np.int64)
        for row in range(tier.rows):
            request = requests[
                row if row < len(requests) else 0
            ]  # padding repeats the first, and writes the same
            length = self.pool.lengths[request.slot]
            sampling = request.sampling
            inputs[:_SCALE, row] = request.pending, length, length, request.slot
            if not sampling.greedy:
                inputs[_SCALE, row] = np.float64(1.0 / sampling.temperature).view(np.int64)
                positions = range(length + 1, length + 1 + depth)
                inputs[_KEYS:, row] = noise_keys([sampling.seed] * depth, positions).view(np.int64)
        self._inputs[: len(inputs), : tier.rows] = torch.from_numpy(inputs).to(self.device)
        self._level.zero_()

    def _work(self, tier: ChainTier) -> Work:
        inputs = self._inputs[:, : tier.rows]
        token, place, known, slot = inputs[:_SCALE]
        columns = self._columns[: tier.view]

        def seen(until: Tensor) -> Tensor:
            return columns < until.unsqueeze(1)

        def mask(visible: Tensor) -> Tensor:
            return additive(visible, self.pool.k.dtype)[:, None, None]

        def rows_of(pool: SlotPool) -> list[Rows]:
            chosen = (half[:, :, :, : tier.view].index_select(1, slot) for half in (pool.k, pool.v))
            return list(zip(*chosen, strict=True))

        def run() -> None:
            own = torch.ones_like(place, dtype=torch.bool).unsqueeze(1)
            past = rows_of(self.pool) + (
                rows_of(self.borrowed) if self.borrowed is not None else []
            )
            records = (
                (*rows_of(self.records)[0], mask(seen(known))) if self.records is not None else ()
            )
            visible = mask(torch.cat([seen(place), own], 1))
            hidden, new = self.drafter.features(
                token.unsqueeze(1), place.unsqueeze(1), visible, past, *records
            )
            layers = self.drafter.config.layers
            _keep(self.pool, slot, place, new[:layers])
            if self.borrowed is not None:
                _keep(self.borrowed, slot, place, new[layers:])
            best, score = self._best(tier, hidden)
            self._tokens[:, : tier.rows].index_copy_(0, self._level, best.double().unsqueeze(0))
            self._scores[:, : tier.rows].index_copy_(0, self._level, score.double().unsqueeze(0))
            token.copy_(best)
            place.add_(1)
            self._level.add_(1)

        def clear() -> None:
            self._inputs.zero_()
            self._inputs[_PLACE] = len(self._columns) - 1
            self._level.zero_()
            for pool in (self.pool, self.borrowed):
                if pool is not None:  # the last column holds nothing between drafts
                    pool.k[:, 0, :, -1].zero_()
                    pool.v[:, 0, :, -1].zero_()

        return Work(run, clear)

    def _best(self, tier: ChainTier, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row and its log-probability; `LevelDrafting.scores` says why
        noise is added."""
        logits = self.drafter.logits(hidden)[:, 0, : self.vocab_size].float()
        scale = self._inputs[_SCALE, : tier.rows].view(torch.double).unsqueeze(1)
        greedy = scale == 0
        if tier.sampled:
            keys = self._inputs[_KEYS:, : tier.rows].index_select(0, self._level)[0].unsqueeze(1)
            noise = gumbel(keys, torch.arange(self.vocab_size, device=self.device)).float()
            logits = torch.where(greedy, logits, logits * scale.float() + noise)
        top = logits.max(-1)
        score = top.values - logits.logsumexp(-1)
        return top.indices, score


def _keep(pool: SlotPool, slot: Tensor, place: Tensor, rows: Sequence[Rows]) -> None:
    """Write the step's keys and values at each sequence's next column."""
    for layer, (k, v) in enumerate(rows):
        pool.k[layer][slot, :, place] = k[:, :, 0].to(pool.k.dtype)
        pool.v[layer][slot, :, place] = v[:, :, 0].to(pool.v.dtype)
