"""Drafting in torch, for any drafter: trees grown level by level, in one batch; on an accelerator
chains as captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moa.drafters.captured_chains import CapturedChains, ChainStep
from moa.drafters.contract import DraftRequest
from moa.grammar.matcher import unpacked
from moa.model.blocks import additive
from moa.model.slots import SlotPool
from moa.sampling import gumbel
from moa.tree import MASKED, DraftTree, TreeGrower

if TYPE_CHECKING:
    from moa.target.cuda.graphs import Graphs


class TorchDrafting:
    """What all drafters in torch share.

    A pool holds a sequence's observed tokens and, after them, the nodes of the current draft, which
    are dropped because the length does not include them. Subclasses run the model.
    """

    pool: SlotPool

    def __init__(
        self, vocab_size: int, device: torch.device, draft_tokens: Tensor | None = None
    ) -> None:
        """`draft_tokens` are the target's ids of a smaller vocabulary, where the model's logits are
        over one."""
        self.vocab_size = vocab_size
        self.device = device
        self.draft_tokens = draft_tokens
        self.captured: CapturedChains | None = None

    def capture(self, graphs: Graphs | None) -> None:
        """Draft chains as graphs from now on, where there are any; called when all memory is there."""
        if graphs is not None:
            self.captured = CapturedChains(self, graphs)
            self.captured.prepare()

    @property
    def free(self) -> bool:
        """Whether there is an empty slot."""
        return bool(self.pool.free)

    def known(self, slot: int) -> int:
        """How many tokens of its text a slot has read."""
        return self.pool.lengths[slot]

    @property
    def draft_pools(self) -> list[SlotPool]:
        """The pools into which drafted tokens are written."""
        return [self.pool]

    def begin_chains(self, slots: Sequence[int]) -> None:
        """Chains of these slots begin: put what their first step reads into fixed memory."""

    def clear_chains(self) -> None:
        """Make that memory harmless, for a run that nobody asked for."""

    def chain_step(self, step: ChainStep) -> Tensor:
        """Logits `[rows, V]` after the newest token of each chain, and its keys and values into the
        pools. Only kernels over fixed memory: it is captured."""
        raise NotImplementedError

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft a tree of likely continuations for each request. All trees grow together: one run
        of the model scores the newest level of each. On an accelerator chains, trees without
        branches, are drafted by captured graphs instead."""
        if self.captured is not None and self.captured.fit(requests):
            return self.captured.draft(requests)
        growers = [TreeGrower(request.pending, request.shape) for request in requests]
        while True:
            # A tree's frontier are the nodes to expand next; it is empty when the tree is complete.
            growing = [index for index, grower in enumerate(growers) if grower.frontier]
            if not growing:
                return [grower.tree() for grower in growers]
            level = Level(
                [requests[index] for index in growing],
                [growers[index] for index in growing],
                self.pool,
                self.device,
            )
            self._grow(level)

    def _grow(self, level: Level) -> None:
        """Run the model on a level, the newest nodes of several trees, and expand each tree by the
        likeliest tokens after its nodes."""
        scores = self.scores(level, self.logits(level))
        breadth = max(request.shape.breadth for request in level.requests)
        top = scores.topk(min(breadth, scores.shape[-1]))
        tokens = top.indices
        if self.draft_tokens is not None:
            # The model's vocabulary is a part of the target's: back to the target's ids.
            tokens = self.draft_tokens[tokens]
        top_tokens = tokens.cpu().numpy()
        top_scores = top.values.cpu().numpy()
        for row, grower in enumerate(level.growers):
            size = len(grower.frontier)  # the rest is padding
            grower.expand(top_tokens[row, :size], top_scores[row, :size])

    def logits(self, level: Level) -> Tensor:
        """Logits `[B, T, V]` after each frontier node."""
        raise NotImplementedError

    def scores(self, level: Level, logits: Tensor) -> Tensor:
        """Scores `[B, T, V]`, log-probabilities that a token is the target's next one. The target
        samples by the argmax of logits plus noise, and the noise of a position is known in advance:
        so the drafter adds the same noise to guess the same token."""
        logits = logits.float()
        settings = [request.sampling for request in level.requests]
        if not all(sampling.greedy for sampling in settings):
            scales = []
            for sampling in settings:
                scales.append(1.0 if sampling.greedy else 1.0 / sampling.temperature)
            scale = torch.tensor(scales, device=logits.device).view(-1, 1, 1)
            logits = logits * scale + self._noise(level)
        return self._masked(level, logits).log_softmax(-1)

    def _masked(self, level: Level, logits: Tensor) -> Tensor:
        """The logits `[B, T, V]`, with `MASKED`, a very low number, at the tokens that a text's
        grammar forbids after each node of its tree."""
        if all(request.grammar is None for request in level.requests):
            return logits
        logits = logits.clone()  # the caller's stay as they are
        for row, (request, grower) in enumerate(zip(level.requests, level.growers, strict=True)):
            if request.grammar is None:
                continue
            for column, node in enumerate(grower.frontier):
                bits = request.grammar.guesses(grower.path(node))
                if bits is None:
                    continue  # behind the grammar's end
                allowed = torch.from_numpy(unpacked(bits, self.vocab_size))
                logits[row, column] = logits[row, column].where(
                    self._of_draft_tokens(allowed), MASKED
                )
        return logits

    def _noise(self, level: Level) -> Tensor:
        """The noise that the target will add to its logits at each text's next position, `[B, 1,
        V]`; zeros for texts that are decoded greedily."""
        noise = np.zeros((len(level.requests), 1, self.vocab_size), dtype=np.float32)
        for row, request in enumerate(level.requests):
            if not request.sampling.greedy:
                next_position = level.positions_of(row) + 1
                noise[row, 0] = gumbel(request.sampling.seed, next_position, self.vocab_size)
        return self._of_draft_tokens(torch.from_numpy(noise))

    def _of_draft_tokens(self, values: Tensor) -> Tensor:
        """Pick those of the values `[..., V]`, one for each token of the target, whose tokens the
        model's smaller vocabulary has; all of them if it has the target's own."""
        values = values.to(self.device)
        if self.draft_tokens is None:
            return values
        return values[..., self.draft_tokens]

    def close(self, slot: int) -> None:
        """Give a slot back."""
        self.pool.release(slot)

    def piece_of_text(self, tokens: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Tokens of a text from position `start` on as the model takes them: ids and positions,
        `[1, n]` each."""
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(start, start + len(tokens), device=self.device)
        return ids, positions.unsqueeze(0)


class Level:
    """One level of several trees, the nodes of one depth in each, padded into tensors: the input of
    one run of the model. A node's keys and values go to the columns of its slot's cache behind the
    text and behind the nodes of earlier levels."""

    def __init__(
        self,
        requests: list[DraftRequest],
        growers: list[TreeGrower],
        pool: SlotPool,
        device: torch.device,
    ) -> None:
        """Lay out the frontier of each tree, the nodes that the model runs next, as one padded
        batch: their tokens, positions, and the mask of what each sees. A node sees its text, its
        ancestors in the tree, and itself; `pool` is the cache in which text and earlier nodes
        lie."""
        self.requests = requests
        self.growers = growers
        self.slots = [request.slot for request in requests]
        self.lengths = [pool.lengths[slot] for slot in self.slots]
        """Tokens of each text that are observed."""
        self.sizes = [len(grower.frontier) for grower in growers]
        """Nodes of each tree in this level."""
        self.starts = [
            length + len(grower.fed) for length, grower in zip(self.lengths, growers, strict=True)
        ]
        """The column of the pool at which each tree's new rows begin."""
        self.view = max(self.starts)
        """Columns of the pool that the level looks at. Its own rows come behind them."""
        ids, positions, visible = self._laid_out()
        self.ids = torch.from_numpy(ids).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self.mask = mask_over(visible, pool)

    def _laid_out(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Lay out the level's nodes, padded to the same number for each tree: their tokens and
        positions, `[trees, nodes]` each, and what each sees, `[trees, 1, nodes, view + nodes]`."""
        width = max(self.sizes)
        ids = np.zeros((len(self.sizes), width), dtype=np.int64)
        positions = np.zeros_like(ids)
        visible = np.zeros((len(self.sizes), 1, width, self.view + width), dtype=np.bool_)
        # All tokens see themselves, padding too: else its row of the mask would be empty.
        visible[:, 0, np.arange(width), self.view + np.arange(width)] = True
        for row, (grower, length) in enumerate(zip(self.growers, self.lengths, strict=True)):
            size = self.sizes[row]
            fed = len(grower.fed)
            tree = grower.mask()  # over the nodes of earlier levels, then of this one
            ids[row, :size] = grower.frontier_tokens
            positions[row] = self.positions_of(row)
            visible[row, 0, :size, :length] = True
            visible[row, 0, :size, length : length + fed] = tree[:, :fed]
            visible[row, 0, :size, self.view : self.view + size] = tree[:, fed:]
        return ids, positions, visible

    def positions_of(self, row: int) -> int:
        """The position that all nodes of this level have in sequence `row`."""
        return self.lengths[row] + self.growers[row].level

    def past(self, pool: SlotPool, view: int = 0) -> list[tuple[Tensor, Tensor]]:
        """The cached keys and values that the level's nodes may attend to, `[B, heads, view, D]`
        for each layer of a pool: the first `view` columns of each slot, or with 0 the text and all
        nodes of earlier levels. Nothing is copied for a single slot."""
        if view == 0:
            view = self.view
        slots: slice | Tensor
        if len(self.slots) == 1:
            slots = slice(self.slots[0], self.slots[0] + 1)  # a view
        else:
            slots = torch.tensor(self.slots, device=self.device)
        keys = pool.k[:, slots, :, :view]
        values = pool.v[:, slots, :, :view]
        return list(zip(keys, values, strict=True))

    def keep(self, pool: SlotPool, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write the level's new keys and values, by layer, into a pool after those of earlier
        levels. They are scratch: no slot's length includes them."""
        for row, slot in enumerate(self.slots):
            start = self.starts[row]
            size = self.sizes[row]
            stop = start + size
            pool.begin([slot], [stop - pool.lengths[slot]])
            for layer, (keys, values) in enumerate(rows):
                pool.k[layer, slot, :, start:stop] = keys[row, :, :size]
                pool.v[layer, slot, :, start:stop] = values[row, :, :size]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.ids.device


def mask_over(visible: np.ndarray, pool: SlotPool) -> Tensor:
    """The additive mask of what is visible of a pool's rows, on its device and in its precision."""
    return additive(torch.from_numpy(visible).to(pool.k.device), pool.k.dtype)


def causal_over(count: int, pool: SlotPool, start: int) -> Tensor:
    """The additive mask of `count` tokens behind `start` rows of a pool: each sees all of these
    rows, and of the tokens itself and those before it."""
    return mask_over(np.tril(np.ones((1, 1, count, start + count), np.bool_), start), pool)
