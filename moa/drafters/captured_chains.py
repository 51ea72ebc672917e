"""Chains by any drafter on an accelerator. One step for all sequences is a graph, replayed for each
token of the draft: tokens and scores stay on the device until the chains are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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
_NARROWEST_VIEW = 256
"""Columns of the narrowest graph: shorter texts gain nothing by one of their own."""


class ChainTier(NamedTuple):
    """The size of a captured step: how many chains, and how much of their texts."""

    rows: int
    view: int
    """Columns of a sequence that a step may attend to."""
    sampled: bool
    """Whether noise is added to the logits of chains that are not greedy."""

    @property
    def name(self) -> str:
        """The name of the step's graph, in metrics too: `draft 4x256`, or `draft 4x256 sampled`."""
        name = f"draft {self.rows}x{self.view}"
        return f"{name} sampled" if self.sampled else name


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
    """The slot of the chain's text."""
    scale: Tensor
    """1 / temperature; 0: greedy."""
    noise_keys: Tensor
    """`[levels, chains]`: keys of each level's sampling noise (`moa.sampling.noise_keys`)."""
    level: Tensor
    """How long the chains are."""
    tokens: Tensor
    """`[levels, chains]`: what was drafted. In float64, as scores are, so that both are copied to
    the host at once; it holds every id exactly."""
    scores: Tensor
    """`[levels, chains]`: the log-probability of each."""

    @classmethod
    def empty(cls, chains: int, device: torch.device) -> ChainBuffers:
        """Allocate the buffers for so many chains, all zero. They are never reallocated: a captured
        graph reads and writes the addresses that it was captured with."""

        def whole(*shape: int) -> Tensor:
            """Zeros as int64."""
            return torch.zeros(shape, dtype=torch.long, device=device)

        def real(*shape: int) -> Tensor:
            """Zeros as float64."""
            return torch.zeros(shape, dtype=torch.double, device=device)

        return cls(
            token=whole(chains),
            place=whole(chains),
            known=whole(chains),
            slot=whole(chains),
            scale=real(chains),
            noise_keys=whole(DEEPEST, chains),
            level=whole(1),
            # Ids as float64, which holds every one exactly, so that they are copied to the host
            # together with the scores.
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
        keys = pool.k[:, :, :, :view].index_select(1, self.slot)
        values = pool.v[:, :, :, :view].index_select(1, self.slot)
        return list(zip(keys, values, strict=True))

    def before(self, until: Tensor) -> Tensor:
        """`[rows, columns]`: which columns are before each chain's `until`."""
        return self.columns < until.unsqueeze(1)

    def mask(self, seen: Tensor) -> Tensor:
        """The additive mask of one query for each chain, which sees these columns."""
        return additive(seen, self.dtype)[:, None, None]

    def visible(self, seen: Tensor | None = None) -> Tensor:
        """The additive attention mask `[rows, 1, 1, columns + 1]` of each chain's newest token,
        over the columns of its slot's cache and, last, itself. It sees itself, and the columns
        before its own or those flagged in `seen`."""
        itself = torch.ones_like(self.place, dtype=torch.bool).unsqueeze(1)
        past = self.before(self.place) if seen is None else seen
        return self.mask(torch.cat([past, itself], 1))

    def keep(self, pool: SlotPool, rows: Sequence[Rows]) -> None:
        """Write the step's keys and values at each chain's column."""
        for layer, (keys, values) in enumerate(rows):
            pool.k[layer][self.slot, :, self.place] = keys[:, :, 0].to(pool.k.dtype)
            pool.v[layer][self.slot, :, self.place] = values[:, :, 0].to(pool.v.dtype)


class Chained(Protocol):
    """A drafting in torch whose step can be captured; `TorchDrafting` says what each part is for."""

    pool: SlotPool
    vocab_size: int
    draft_tokens: Tensor | None
    device: torch.device

    @property
    def draft_pools(self) -> list[SlotPool]: ...

    def begin_chains(self, slots: Sequence[int]) -> None: ...

    def clear_chains(self) -> None: ...

    def chain_step(self, step: ChainStep) -> Tensor: ...


class CapturedChains:
    """Drafts by graphs what `TorchDrafting.draft` drafts level by level."""

    def __init__(self, drafting: Chained, graphs: Graphs) -> None:
        """Allocate the fixed memory that the graphs will work in, for a chain in each slot."""
        self._drafting = drafting
        self._graphs = graphs
        device = drafting.device
        # Steps run at sizes that are powers of two, so that few graphs are captured.
        self._most = power_of_two(drafting.pool.slots)
        self._buffers = ChainBuffers.empty(self._most, device)
        self._columns = torch.arange(drafting.pool.capacity, device=device)
        draft_tokens = drafting.draft_tokens
        if draft_tokens is None:
            draft_tokens = torch.arange(drafting.vocab_size, device=device)
        self._noise_ids = draft_tokens
        """The target's ids of the tokens that logits are over."""

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the graphs that most drafts need: greedy ones of short texts, for each power of
        two of chains. Graphs of other sizes are captured when they are first needed."""
        view = min(_NARROWEST_VIEW, len(self._columns))
        rows = 1
        while rows <= self._most:
            tier = ChainTier(rows, view, sampled=False)
            self._graphs.add(tier.name, self._work(tier))
            rows *= 2

    def fit(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether captured graphs can draft all of these requests: each must be for a chain,
        without a grammar, and no longer than the fixed memory has room for."""
        for request in requests:
            is_chain = request.shape.breadth == 1
            if not is_chain or request.shape.depth > DEEPEST or request.grammar is not None:
                return False
        return True

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft a chain for each request, all together (`fit` says whether that is possible).

        One captured graph runs one step of all chains. It is replayed as often as the longest chain
        has tokens; each replay reads what the one before wrote into fixed memory, and the results
        are copied to the host once, at the end.
        """
        depth = max(request.shape.depth for request in requests)
        slots = [request.slot for request in requests]
        for pool in self._drafting.draft_pools:
            # The keys and values of a draft go behind each slot's text, where they are overwritten.
            pool.begin(slots, [depth] * len(slots))
        tier = self._tier(requests, depth)
        self._fill(tier, requests, depth)
        step, _ = self._graphs.get(tier.name, lambda: self._work(tier))
        for _ in range(depth):
            step()
        results = torch.stack([self._buffers.tokens[:depth], self._buffers.scores[:depth]])
        tokens, scores = results.cpu().numpy()
        return [
            _chain_as_tree(request, tokens[:, chain], scores[:, chain])
            for chain, request in enumerate(requests)
        ]

    def _tier(self, requests: Sequence[DraftRequest], depth: int) -> ChainTier:
        """The size of the graph that drafts chains of `depth` tokens for these requests. Its rows
        and its view, the columns of the cache that a step attends over, are rounded up to powers of
        two, so that few graphs are captured: what is too much is masked, or repeats a chain."""
        lengths = self._drafting.pool.lengths
        view = max(lengths[request.slot] for request in requests) + depth
        return ChainTier(
            rows=power_of_two(len(requests)),
            view=min(power_of_two(max(view, _NARROWEST_VIEW)), len(self._columns)),
            sampled=not all(request.sampling.greedy for request in requests),
        )

    def _fill(self, tier: ChainTier, requests: Sequence[DraftRequest], depth: int) -> None:
        """Put what the chains begin with into the fixed memory: their newest tokens, the columns
        and slots of the cache that they are written to, and the sampling noise of `depth` steps."""
        # A graph has a fixed number of chains. Padding repeats the first request: it computes and
        # writes the same numbers.
        padded = [*requests, *[requests[0]] * (tier.rows - len(requests))]
        # Whole numbers are uploaded at once: a row for each input, then the keys of the noise.
        inputs = (self._buffers.token, self._buffers.place, self._buffers.known, self._buffers.slot)
        numbers = np.zeros((len(inputs) + depth, tier.rows), dtype=np.int64)
        scale = np.zeros(tier.rows)
        for row, request in enumerate(padded):
            length = self._drafting.pool.lengths[request.slot]
            numbers[: len(inputs), row] = request.pending, length, length, request.slot
            if not request.sampling.greedy:
                scale[row] = 1.0 / request.sampling.temperature
                numbers[len(inputs) :, row] = _keys_of_levels(request, length, depth)
        device = self._drafting.device
        uploaded = torch.from_numpy(numbers).to(device)
        for buffer, values in zip(inputs, uploaded[: len(inputs)], strict=True):
            buffer[: tier.rows] = values
        self._buffers.noise_keys[:depth, : tier.rows] = uploaded[len(inputs) :]
        self._buffers.scale[: tier.rows] = torch.from_numpy(scale).to(device)
        self._buffers.level.zero_()
        self._drafting.begin_chains([request.slot for request in padded])

    def _work(self, tier: ChainTier) -> Work:
        """What a graph of this size runs, one step of all its chains, and how the fixed memory is
        cleared for the run that captures it, which no request asked for."""
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
            # The run writes to the last column of slot 0, which holds nothing between drafts.
            buffers.place.fill_(len(self._columns) - 1)
            for pool in self._drafting.draft_pools:
                pool.k[:, 0, :, -1].zero_()
                pool.v[:, 0, :, -1].zero_()
            self._drafting.clear_chains()

        return Work(run, clear)

    def _best(self, tier: ChainTier, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest next token of each chain and its log-probability, `[rows]` each, from
        logits `[rows, vocab]`. Chains that are not greedy get the target's sampling noise first, so
        that they guess what the target will draw."""
        buffers = self._buffers
        logits = logits.float()
        scale = buffers.scale[: tier.rows].unsqueeze(1)
        if tier.sampled:
            keys = buffers.noise_keys[:, : tier.rows].index_select(0, buffers.level)[0]
            noise = gumbel(keys.unsqueeze(1), self._noise_ids).float()
            is_greedy = scale == 0
            logits = torch.where(is_greedy, logits, logits * scale.float() + noise)
        top = logits.max(-1)
        score = top.values - logits.logsumexp(-1)
        tokens = top.indices
        if self._drafting.draft_tokens is not None:
            # Logits are over a smaller vocabulary: back to the target's ids.
            tokens = self._drafting.draft_tokens[tokens]
        return tokens, score


def _keys_of_levels(request: DraftRequest, length: int, depth: int) -> NDArray[np.int64]:
    """The keys of the sampling noise of `depth` drafted tokens behind a text of this length, whose
    pending token has the position `length`: as int64 of the same bits, for kernels that compute
    with these."""
    positions = range(length + 1, length + 1 + depth)
    return noise_keys([request.sampling.seed] * depth, positions).view(np.int64)


def _chain_as_tree(
    request: DraftRequest, tokens: NDArray[np.float64], scores: NDArray[np.float64]
) -> DraftTree:
    """The draft tree of a request, made of its chain's tokens and their log-probabilities, one for
    each depth. It ends where the request's shape ends it: at its own depth, or where the chain is
    too unlikely."""
    # The ids come as float64, in one copy from the device with the scores: they are whole numbers.
    grower = TreeGrower(request.pending, request.shape)
    while grower.frontier:
        token = tokens[grower.level]
        score = scores[grower.level]
        grower.expand(np.array([[token]], dtype=np.int64), np.array([[score]], dtype=np.float32))
    return grower.tree()
