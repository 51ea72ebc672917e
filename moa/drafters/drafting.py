"""Drafting in torch, for any drafter: trees grown level by level, in one batch; on an accelerator
chains as captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
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

    def __init__(self, vocab_size: int, device: torch.device, words: Tensor | None = None) -> None:
        """`words`: the target's ids of a smaller vocabulary, where the model's logits are over one."""
        self.vocab_size = vocab_size
        self.device = device
        self.words = words
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
        """A tree for each request."""
        if self.captured is not None and self.captured.fit(requests):
            return self.captured.draft(requests)
        growers = [TreeGrower(request.pending, request.shape) for request in requests]
        while active := [i for i, grower in enumerate(growers) if grower.frontier]:
            level = Level(
                [requests[i] for i in active], [growers[i] for i in active], self.pool, self.device
            )
            scores = self.scores(level, self.logits(level))
            top = scores.topk(
                min(max(request.shape.breadth for request in level.requests), scores.shape[-1])
            )
            chosen = top.indices if self.words is None else self.words[top.indices]
            values = top.values.cpu().numpy()
            tokens = chosen.cpu().numpy()
            for row, grower in enumerate(level.growers):
                size = len(grower.frontier)
                grower.expand(tokens[row, :size], values[row, :size])
        return [grower.tree() for grower in growers]

    def logits(self, level: Level) -> Tensor:
        """Logits `[B, T, V]` after each frontier node."""
        raise NotImplementedError

    def scores(self, level: Level, logits: Tensor) -> Tensor:
        """Log-probabilities of the target's next token. Sampling is the argmax of logits plus
        noise, and the noise of a position is known in advance: so the drafter adds the same noise
        to guess the same token."""
        logits = logits.float()
        if not all(request.sampling.greedy for request in level.requests):
            scale = [
                1.0 if r.sampling.greedy else 1.0 / r.sampling.temperature for r in level.requests
            ]
            logits = logits * torch.tensor(scale, device=logits.device).view(
                -1, 1, 1
            ) + self._noise(level)
        return self._masked(level, logits).log_softmax(-1)

    def _masked(self, level: Level, logits: Tensor) -> Tensor:
        """The same logits, but for the tokens that a text's grammar forbids."""
        if all(request.grammar is None for request in level.requests):
            return logits
        logits = logits.clone()
        for row, (request, grower) in enumerate(zip(level.requests, level.growers, strict=True)):
            for at, node in enumerate(grower.frontier if request.grammar is not None else ()):
                bits = (
                    request.grammar.guesses(grower.path(node))
                    if request.grammar is not None
                    else None
                )
                if bits is not None:
                    allowed = self._by_word(torch.from_numpy(unpacked(bits, self.vocab_size)))
                    logits[row, at] = logits[row, at].where(allowed, MASKED)
        return logits

    def _noise(self, level: Level) -> Tensor:
        noise = np.zeros((len(level.requests), 1, self.vocab_size), dtype=np.float32)
        for row, request in enumerate(level.requests):
            if not request.sampling.greedy:
                noise[row, 0] = gumbel(
                    request.sampling.seed, level.positions_of(row) + 1, self.vocab_size
                )
        return self._by_word(torch.from_numpy(noise))

    def _by_word(self, of_target: Tensor) -> Tensor:
        """Of values for the target's vocabulary, those of the model's own."""
        placed = of_target.to(self.device)
        return placed if self.words is None else placed[..., self.words]

    def close(self, slot: int) -> None:
        """Give a slot back."""
        self.pool.release(slot)


class Level:
    """One level of several trees, padded into tensors: the model's input."""

    def __init__(
        self,
        requests: list[DraftRequest],
        growers: list[TreeGrower],
        pool: SlotPool,
        device: torch.device,
    ) -> None:
        self.requests = requests
        self.growers = growers
        self.slots = [request.slot for request in requests]
        self.lengths = [pool.lengths[slot] for slot in self.slots]
        self.sizes = [len(grower.frontier) for grower in growers]
        self.starts = [
            length + len(grower.fed) for length, grower in zip(self.lengths, growers, strict=True)
        ]
        width = max(self.sizes)
        self.view = max(self.starts)
        ids = np.zeros((len(requests), width), dtype=np.int64)
        positions = np.zeros_like(ids)
        visible = np.zeros((len(requests), 1, width, self.view + width), dtype=np.bool_)
        visible[:, 0, np.arange(width), self.view + np.arange(width)] = True  # padding sees itself
        for row, (grower, length) in enumerate(zip(growers, self.lengths, strict=True)):
            size = self.sizes[row]
            fed = len(grower.fed)
            tree = grower.mask()
            ids[row, :size] = grower.frontier_tokens
            positions[row] = self.positions_of(row)
            visible[row, 0, :size, :length] = True
            visible[row, 0, :size, length : length + fed] = tree[:, :fed]
            visible[row, 0, :size, self.view : self.view + size] = tree[:, fed:]
        self.ids = torch.from_numpy(ids).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self.mask = mask_over(visible, pool)

    def positions_of(self, row: int) -> int:
        """The position that all nodes of this level have in sequence `row`."""
        return self.lengths[row] + self.growers[row].level

    def past(self, pool: SlotPool, view: int = 0) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of a pool that the level may attend to, per layer: `[B, heads, view,
        D]`. Of one slot they are not copied."""
        only = len(self.slots) == 1
        view = view or self.view
        slots = (
            slice(self.slots[0], self.slots[0] + 1)
            if only
            else torch.tensor(self.slots, device=self.device)
        )
        return list(zip(pool.k[:, slots, :, :view], pool.v[:, slots, :, :view], strict=True))

    def keep(self, pool: SlotPool, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write the level's new keys and values after those of earlier levels."""
        for b, slot in enumerate(self.slots):
            size = self.sizes[b]
            start = self.starts[b]
            pool.begin([slot], [start - pool.lengths[slot] + size])
            for layer, (k, v) in enumerate(rows):
                pool.k[layer, slot, :, start : start + size] = k[b, :, :size]
                pool.v[layer, slot, :, start : start + size] = v[b, :, :size]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.ids.device


def mask_over(visible: np.ndarray, pool: SlotPool) -> Tensor:
    """For queries over a pool's rows: on its device, in its precision."""
    return additive(torch.from_numpy(visible).to(pool.k.device), pool.k.dtype)
