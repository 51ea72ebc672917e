"""Drafting in the same process as the target: the interface of such a drafter, and the MoA
drafter's implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moa.grammar.matcher import TextMask, unpacked
from moa.model.blocks import additive
from moa.model.drafter import Drafter
from moa.model.slots import SlotPool
from moa.model.target import Committed
from moa.sampling import SamplingSettings, gumbel
from moa.tree import MASKED, DraftTree, TreeGrower, TreeShape


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for a tree after a sequence's `pending` token."""

    slot: int
    pending: int
    shape: TreeShape
    sampling: SamplingSettings
    grammar: TextMask | None = None
    """What may follow the text up to and including the pending token."""


class Drafting(Protocol):
    """A drafter with its own memory, one slot per sequence."""

    def open(self) -> int:
        """Take an empty slot."""

    def close(self, slot: int) -> None:
        """Give a slot back."""

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """The target has run `tokens`, in order, with these keys, values and states."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each request, all drafted together."""


class LevelDrafting:
    """The part that all kinds of drafters share: growing trees level by level, in one batch.

    A pool holds a sequence's observed tokens and, after them, the nodes of the current draft, which
    are dropped because the length does not include them. Subclasses run the model.
    """

    pool: SlotPool

    def __init__(self, vocab_size: int, device: torch.device, words: Tensor | None = None) -> None:
        """`words`: the target's ids of a smaller vocabulary, where the model's logits are over one."""
        self.vocab_size = vocab_size
        self.device = device
        self.words = words

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each request."""
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
        self.mask = _mask(visible, pool)

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


def _mask(visible: np.ndarray, pool: SlotPool) -> Tensor:
    """For queries over a pool's rows: on its device, in its precision."""
    return additive(torch.from_numpy(visible).to(pool.k.device), pool.k.dtype)


class MoaDrafting(LevelDrafting):
    """The MoA drafter in the same process as its target: every activation is available at once."""

    def __init__(
        self, drafter: Drafter, *, slots: int = 1, capacity: int = 2048, scratch: int = 256
    ) -> None:
        """`scratch` columns are for the nodes of a draft, on top of the sequence's `capacity`."""
        config = drafter.config
        weight = drafter.weight
        # A body with its own head may have a different vocabulary padding than the target.
        super().__init__(min(config.vocab_size, len(drafter.shared.head)), weight.device)
        self.drafter = drafter

        def pool(layers: int, kv_heads: int, head_dim: int) -> SlotPool:
            return SlotPool(
                layers=layers,
                slots=slots,
                kv_heads=kv_heads,
                capacity=capacity + scratch,
                head_dim=head_dim,
                dtype=weight.dtype,
                device=weight.device,
            )

        self.pool = pool(config.layers, *drafter.cache_heads)
        self.records = pool(1, config.record_heads, config.head_dim) if config.use_ca else None
        target_head_dim = config.kv_hidden_size // (2 * config.target_kv_heads)
        self.borrowed = (
            pool(config.tli, config.target_kv_heads, target_head_dim) if config.tli else None
        )
        self._pools = [p for p in (self.pool, self.records, self.borrowed) if p is not None]

    @property
    def free(self) -> bool:
        """Whether there is an empty slot."""
        return bool(self.pool.free)

    def known(self, slot: int) -> int:
        """How many tokens of its sequence a slot has read."""
        return self.pool.lengths[slot]

    def open(self) -> int:
        """Take an empty slot."""
        slots = [pool.acquire() for pool in self._pools]
        return slots[0]

    def close(self, slot: int) -> None:
        """Give a slot back."""
        for pool in self._pools:
            pool.release(slot)

    @torch.inference_mode()
    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Store the records of these tokens, and the body's keys and values."""
        if self.records is not None:
            key, value = self.drafter.project(*committed.kv, committed.hidden, committed.positions)
            self.records.append(
                slot, key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
            )
        if self.borrowed is not None:
            count = self.drafter.config.tli
            self.borrowed.append(slot, *(half[-count:].transpose(1, 2) for half in committed.kv))
        self.read(slot, tokens)

    @torch.inference_mode()
    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Compute the body's keys and values of tokens whose records, if any, are in the slot
        already."""
        start = self.pool.lengths[slot]
        count = len(tokens)
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(start, start + count, device=self.device).unsqueeze(0)
        layers = zip(self.pool.k, self.pool.v, strict=True)
        past = [(k[slot : slot + 1, :, :start], v[slot : slot + 1, :, :start]) for k, v in layers]
        causal = np.tril(np.ones((1, 1, count, start + count), np.bool_), start)
        rows = self.drafter.extend(ids, positions, _mask(causal, self.pool), past)
        self.pool.append(slot, *(torch.cat(half) for half in zip(*rows, strict=True)))

    def logits(self, level: Level) -> Tensor:
        """One step of the drafter over the frontier of every tree."""
        past = level.past(self.pool)
        records = list[Tensor]()
        if self.borrowed is not None:
            past += level.past(self.borrowed)
        if self.records is not None:
            known = max(1, *level.lengths)
            visible = np.arange(known) < np.array(level.lengths)[:, None]
            records = [
                *level.past(self.records, known)[0],
                _mask(visible[:, None, None], self.pool),
            ]
        hidden, rows = self.drafter.features(level.ids, level.positions, level.mask, past, *records)
        layers = self.drafter.config.layers
        level.keep(self.pool, rows[:layers])
        if self.borrowed is not None:
            level.keep(self.borrowed, rows[layers:])
        return self.drafter.logits(hidden)[..., : self.vocab_size]
