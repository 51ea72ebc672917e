"""Chains by any drafter on an accelerator. One step for all sequences is a graph, replayed for each
token of the draft: tokens and scores stay on the device until the chains are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from moa.drafters.contract import DraftRequest
from moa.model.blocks import additive
from moa.model.borrowed import Rows
from moa.model.slots import SlotPool
from moa.sampling import noise_keys
from moa.target.cuda.buffers import power_of_two
from moa.target.cuda.graphs import Graphs, Work
from moa.target.cuda.sampling import gumbel
from moa.tree import DraftTree, TreeGrower

DEEPEST = 32
"""Tokens of the longest chain: keys of the noise and results have fixed memory."""
_NARROWEST = 256
"""Columns of the narrowest graph: shorter texts gain nothing by one of their own."""


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


@dataclass(frozen=True)
class ChainBuffers:
    """The fixed memory that all graphs read and write, a column for each chain."""

    token: Tensor
    """The newest token of the chain."""
    place: Tensor
    """The column, and position, that it gets."""
    known: Tensor
    """How many tokens of the text had been read when the chain began."""
    slot: Tensor
    scale: Tensor
    """1 / temperature; 0: greedy."""
    noise_keys: Tensor
    """`[levels, chains]`: what the noise of each level begins with."""
    level: Tensor
    """How long the chains are."""
    tokens: Tensor
    """`[levels, chains]`: what was drafted."""
    scores: Tensor

    @classmethod
    def empty(cls, chains: int, device: torch.device) -> ChainBuffers:
        """For so many chains."""

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        def real(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.double, device=device)

        return cls(
            token=whole(chains),
            place=whole(chains),
            known=whole(chains),
            slot=whole(chains),
            scale=real(chains),
            noise_keys=whole(DEEPEST, chains),
            level=whole(1),
            tokens=real(DEEPEST, chains),
            scores=real(DEEPEST, chains),
        )


@dataclass(frozen=True)
class ChainStep:
    """One step of `rows` chains, as a drafter sees it: kernels over fixed memory."""

    token: Tensor
    place: Tensor
    known: Tensor
    slot: Tensor
    columns: Tensor
    """The columns of a pool that a step may attend to, counted from 0."""
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """How many chains."""
        return len(self.token)

    def past(self, pool: SlotPool) -> list[Rows]:
        """A pool's keys and values of the chains' slots, by layer."""
        view = len(self.columns)
        keys, values = (
            half[:, :, :, :view].index_select(1, self.slot) for half in (pool.k, pool.v)
        )
        return list(zip(keys, values, strict=True))

    def before(self, until: Tensor) -> Tensor:
        """`[rows, columns]`: which columns are before each chain's `until`."""
        return self.columns < until.unsqueeze(1)

    def mask(self, seen: Tensor) -> Tensor:
        """An additive mask for a query a chain."""
        return additive(seen, self.dtype)[:, None, None]

    def visible(self, seen: Tensor | None = None) -> Tensor:
        """The mask of each chain's newest token: the columns before its own, or those `seen`, and
        itself."""
        itself = torch.ones_like(self.place, dtype=torch.bool).unsqueeze(1)
        past = self.before(self.place) if seen is None else seen
        return self.mask(torch.cat([past, itself], 1))

    def keep(self, pool: SlotPool, rows: Sequence[Rows]) -> None:
        """Write the step's keys and values at each chain's column."""
        for layer, (k, v) in enumerate(rows):
            pool.k[layer][self.slot, :, self.place] = k[:, :, 0].to(pool.k.dtype)
            pool.v[layer][self.slot, :, self.place] = v[:, :, 0].to(pool.v.dtype)


class Chained(Protocol):
    """A drafting in torch whose step can be captured; `TorchDrafting` says what each part is for."""

    pool: SlotPool
    vocab_size: int
    words: Tensor | None
    device: torch.device

    @property
    def draft_pools(self) -> list[SlotPool]: ...

    def begin_chains(self, slots: Sequence[int]) -> None: ...

    def clear_chains(self) -> None: ...

    def chain_step(self, step: ChainStep) -> Tensor: ...


class CapturedChains:
    """Drafts by graphs what `TorchDrafting.draft` drafts level by level."""

    def __init__(self, drafting: Chained, graphs: Graphs) -> None:
        self._drafting = drafting
        self._graphs = graphs
        device = drafting.device
        self._most = power_of_two(drafting.pool.slots)
        self._buffers = ChainBuffers.empty(self._most, device)
        self._columns = torch.arange(drafting.pool.capacity, device=device)
        size = drafting.vocab_size
        words = drafting.words
        self._noise_ids = torch.arange(size, device=device) if words is None else words
        """The target's ids of the words that logits are over."""

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the graphs of greedy drafts for short texts."""
        rows = 1
        while rows <= self._most:
            tier = ChainTier(rows, min(_NARROWEST, len(self._columns)), False)
            self._graphs.add(tier.name, self._work(tier))
            rows *= 2

    def fit(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether they are chains, free of grammars, and no longer than the memory."""
        return all(
            one.shape.breadth == 1 and one.shape.depth <= DEEPEST and one.grammar is None
            for one in requests
        )

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A chain for each request."""
        depth = max(request.shape.depth for request in requests)
        slots = [request.slot for request in requests]
        lengths = self._drafting.pool.lengths
        for pool in self._drafting.draft_pools:
            pool.begin(slots, [depth] * len(slots))
        view = max(lengths[slot] for slot in slots) + depth
        tier = ChainTier(
            rows=power_of_two(len(slots)),
            view=min(power_of_two(max(view, _NARROWEST)), len(self._columns)),
            sampled=not all(request.sampling.greedy for request in requests),
        )
        self._fill(tier, requests, depth)
        step, _ = self._graphs.get(tier.name, lambda: self._work(tier))
        for _ in range(depth):
            step()
        buffers = self._buffers
        found = torch.stack([buffers.tokens[:depth], buffers.scores[:depth]])
        tokens, scores = found.cpu().numpy()
        trees = []
        for row, request in enumerate(requests):
            grower = TreeGrower(request.pending, request.shape)
            while grower.frontier:
                at = slice(grower.level, grower.level + 1), slice(row, row + 1)
                grower.expand(tokens[at].astype(np.int64), scores[at].astype(np.float32))
            trees.append(grower.tree())
        return trees

    def _fill(self, tier: ChainTier, requests: Sequence[DraftRequest], depth: int) -> None:
        # Padding repeats the first request, and writes the same.
        padded = [*requests, *[requests[0]] * (tier.rows - len(requests))]
        lengths = [self._drafting.pool.lengths[request.slot] for request in padded]
        buffers = self._buffers
        whole = np.zeros((4 + depth, tier.rows), dtype=np.int64)
        scale = np.zeros(tier.rows)
        for row, (request, length) in enumerate(zip(padded, lengths, strict=True)):
            whole[:4, row] = request.pending, length, length, request.slot
            sampling = request.sampling
            if not sampling.greedy:
                scale[row] = 1.0 / sampling.temperature
                positions = range(length + 1, length + 1 + depth)
                whole[4:, row] = noise_keys([sampling.seed] * depth, positions).view(np.int64)
        device = self._drafting.device
        uploaded = torch.from_numpy(whole).to(device)
        inputs = (buffers.token, buffers.place, buffers.known, buffers.slot)
        for buffer, values in zip(inputs, uploaded[:4], strict=True):
            buffer[: tier.rows] = values
        buffers.noise_keys[:depth, : tier.rows] = uploaded[4:]
        buffers.scale[: tier.rows] = torch.from_numpy(scale).to(device)
        buffers.level.zero_()
        self._drafting.begin_chains([request.slot for request in padded])

    def _work(self, tier: ChainTier) -> Work:
        buffers = self._buffers
        step = ChainStep(
            token=buffers.token[: tier.rows],
            place=buffers.place[: tier.rows],
            known=buffers.known[: tier.rows],
            slot=buffers.slot[: tier.rows],
            columns=self._columns[: tier.view],
            dtype=self._drafting.pool.k.dtype,
        )
        tokens = buffers.tokens[:, : tier.rows]
        scores = buffers.scores[:, : tier.rows]

        def run() -> None:
            best, score = self._best(tier, self._drafting.chain_step(step))
            tokens.index_copy_(0, buffers.level, best.double().unsqueeze(0))
            scores.index_copy_(0, buffers.level, score.double().unsqueeze(0))
            step.token.copy_(best)
            step.place.add_(1)
            buffers.level.add_(1)

        def clear() -> None:
            for buffer in (buffers.token, buffers.known, buffers.slot, buffers.scale):
                buffer.zero_()
            buffers.noise_keys.zero_()
            buffers.level.zero_()
            # The last column holds nothing between drafts.
            buffers.place.fill_(len(self._columns) - 1)
            for pool in self._drafting.draft_pools:
                pool.k[:, 0, :, -1].zero_()
                pool.v[:, 0, :, -1].zero_()
            self._drafting.clear_chains()

        return Work(run, clear)

    def _best(self, tier: ChainTier, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row and its log-probability; `TorchDrafting.scores` says why
        noise is added."""
        buffers = self._buffers
        logits = logits.float()
        scale = buffers.scale[: tier.rows].unsqueeze(1)
        if tier.sampled:
            keys = buffers.noise_keys[:, : tier.rows].index_select(0, buffers.level)[0]
            noise = gumbel(keys.unsqueeze(1), self._noise_ids).float()
            logits = torch.where(scale == 0, logits, logits * scale.float() + noise)
        top = logits.max(-1)
        score = top.values - logits.logsumexp(-1)
        words = self._drafting.words
        return top.indices if words is None else words[top.indices], score
