"""Drafting on features, EAGLE's way: the input is token p with the target's state at p - 1, the
newest one.

After the last verified token the inputs are the drafter's own predicted features. Row p of its
cache belongs to token p, so that positions, masks and sampling noise are those of every other
drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moa.drafters.captured_chains import ChainStep
from moa.drafters.contract import Drafter
from moa.drafters.drafting import Level, TorchDrafting
from moa.model.blocks import Block, masked, rotate
from moa.model.borrowed import Rows
from moa.model.slots import SlotPool
from moa.target.cuda.buffers import power_of_two
from moa.target.torch_target import Committed

if TYPE_CHECKING:
    from moa.target.cuda.graphs import Graphs


class FeatureModel(Drafter):
    """A drafter of one decoder layer, which reads tokens and features."""

    reads_first = True
    """Whether the first token, which has no feature before it, has a row, made of zeros."""
    draft_tokens: Tensor | None = None
    """The target's ids of its own vocabulary, where it has one."""
    layer: Block

    @property
    def weight(self) -> Tensor:
        """A weight, to read dtype and device from."""
        return self.layer.mlp.down_proj.weight

    @property
    def feature_size(self) -> int:
        """Width of a feature."""
        return self.layer.mlp.down_proj.out_features

    def empty_rows(self, ids: Tensor) -> Rows:
        """The keys and values of an empty past."""
        attention = self.layer.self_attn
        empty = self.weight.new_zeros(len(ids), attention.kv_heads, 0, attention.head_dim)
        return empty, empty

    def pool(self, slots: int, capacity: int) -> SlotPool:
        """Memory for the keys and values of `slots` sequences."""
        attention = self.layer.self_attn
        like = self.weight
        return SlotPool(
            layers=1,
            slots=slots,
            kv_heads=attention.kv_heads,
            capacity=capacity,
            head_dim=attention.head_dim,
            dtype=like.dtype,
            device=like.device,
        )

    def drafting(
        self, *, slots: int, capacity: int, scratch: int = 256, graphs: Graphs | None = None
    ) -> FeatureDrafting:
        """The drafter at work in torch, where it takes the states of every forward."""
        return FeatureDrafting(self, slots=slots, capacity=capacity, scratch=scratch, graphs=graphs)

    def read(self, features: Tensor) -> Tensor:
        """The features of the target's states."""
        raise NotImplementedError

    def feedback(self, hidden: Tensor) -> Tensor:
        """The features of tokens that were only drafted, made of what `step` predicted at them: here
        that is the prediction itself."""
        return hidden

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits; one layer, so they depend on nothing but their
        own input."""
        raise NotImplementedError

    def step(
        self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The predicted feature at each token, and the cache rows."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over `draft_tokens`, or the whole vocabulary, after a predicted feature."""
        return self.shared.logits(hidden)


class FeatureDrafting(TorchDrafting):
    """Grows trees with a feature model: the input of a node is its parent's predicted feature."""

    def __init__(
        self,
        model: FeatureModel,
        *,
        slots: int = 1,
        capacity: int = 2048,
        scratch: int = 256,
        graphs: Graphs | None = None,
    ) -> None:
        """Allocate memory for `slots` texts of `capacity` tokens each, and `scratch` columns more
        for the tokens of a draft. With `graphs`, chains are drafted by captured graphs."""
        super().__init__(model.vocab_size, model.weight.device, model.draft_tokens)
        self.model = model
        self.pool = model.pool(slots, capacity + scratch)
        self._newest = model.weight.new_zeros(slots, model.feature_size)
        """The feature of each slot's last observed token."""
        self._drafted: dict[int, Tensor] = {}
        """By slot, the features that were predicted at the nodes of its draft tree that the model
        has run so far, in the order in which it ran them (`TreeGrower.fed`)."""
        self._chained = model.weight.new_zeros(power_of_two(slots), model.feature_size)
        """The feature that the next step of each chain reads. Steps run at sizes that are powers of
        two, so that few of them are captured as graphs."""
        self.capture(graphs)  # last: the graphs read and write the memory above

    def open(self) -> int:
        """Take an empty slot."""
        return self.pool.acquire()

    @torch.inference_mode()
    def copy(self, source: int, tokens: int) -> int:
        """Take an empty slot, and copy the cache of the first `tokens` of another slot into it. The
        feature of the last token is not known there: the next token reads zeros in its place."""
        slot = self.open()
        keys = self.pool.k[:, source, :, :tokens]
        values = self.pool.v[:, source, :, :tokens]
        self.pool.append(slot, keys, values)
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        super().close(slot)
        self._newest[slot].zero_()
        self._drafted.pop(slot, None)

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Read the states of tokens that the target has run."""
        self.take(slot, tokens, committed.states)

    @torch.inference_mode()
    def take(self, slot: int, tokens: Sequence[int], states: Tensor) -> None:
        """Read more tokens of a slot's text, which the target has run: their keys and values are
        made of the target's states `[n, *]`, and overwrite those of a draft."""
        start = self.pool.lengths[slot]
        features = self.model.read(states.to(self.model.weight.dtype))
        # A token reads the feature of the token before it.
        features_before = torch.cat([self._newest[slot].unsqueeze(0), features[:-1]])
        ids, positions = self.piece_of_text(tokens, start)
        self.pool.append(slot, *self.model.rows(ids, features_before.unsqueeze(0), positions))
        self._newest[slot] = features[-1]

    def logits(self, level: Level) -> Tensor:
        """Logits `[B, T, V]` after each node of a level, the newest nodes of B trees, by one step
        of the model. What it predicts at the nodes is kept, for their children to read."""
        features = self._features_before(level)
        if not self.model.reads_first and level.view:
            # The first token of a text has no feature before it, and so no row to attend to.
            level.mask[..., 0] = masked(level.mask.dtype)
        hidden, rows = self.model.step(
            level.ids, features, level.positions, level.mask, level.past(self.pool)[0]
        )
        level.keep(self.pool, [rows])
        for row, (slot, size) in enumerate(zip(level.slots, level.sizes, strict=True)):
            features = self.model.feedback(hidden[row, :size])
            is_first_level = not level.growers[row].fed
            if not is_first_level:
                features = torch.cat([self._drafted[slot], features])
            self._drafted[slot] = features
        return self.model.logits(hidden)

    # ---- chains as graphs

    def begin_chains(self, slots: Sequence[int]) -> None:
        """Let the first step of each chain read the feature of its last observed token."""
        self._chained[: len(slots)] = self._newest[torch.tensor(slots, device=self.device)]

    def clear_chains(self) -> None:
        """Leave no chain a feature."""
        self._chained.zero_()

    def chain_step(self, step: ChainStep) -> Tensor:
        """Logits `[rows, V]` after the newest token of each chain, one drafted sequence. What the
        model predicts there is left in fixed memory, as the feature that the next step reads."""
        features = self._chained[: step.rows]
        seen = step.before(step.place)
        if not self.model.reads_first:
            # The first token of a text has no feature before it, and so no row to attend to.
            seen = seen & (step.columns > 0)
        hidden, rows = self.model.step(
            step.token.unsqueeze(1),
            features.unsqueeze(1),
            step.place.unsqueeze(1),
            step.visible(seen),
            step.past(self.pool)[0],
        )
        step.keep(self.pool, [rows])
        features.copy_(self.model.feedback(hidden)[:, 0])
        return self.model.logits(hidden)[:, 0]

    def _features_before(self, level: Level) -> Tensor:
        """The feature that each node of a level reads, `[B, T, width]`: the one predicted at its
        parent; for the root of a tree that of the last token which the target has run."""
        features = self.model.weight.new_zeros(*level.ids.shape, self.model.feature_size)
        for row, (slot, grower) in enumerate(zip(level.slots, level.growers, strict=True)):
            if not grower.fed:  # the model has run no node: this level is the root
                features[row, 0] = self._newest[slot]
                continue
            fed_index = {node: index for index, node in enumerate(grower.fed)}
            parents = [fed_index[grower.parents[node]] for node in grower.frontier]
            parent_index = torch.tensor(parents, device=self.device)
            features[row, : len(parents)] = self._drafted[slot][parent_index]
        return features


def normed(norms: nn.ModuleList, states: Tensor) -> Tensor:
    """States side by side, each by its own norm."""
    parts = states.chunk(len(norms), dim=-1)
    return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)


def self_rows(block: Block, normed: Tensor, cos: Tensor, sin: Tensor) -> Rows:
    """The rotated keys, and the values, of a layer's input."""
    key = rotate(block.self_attn.key(normed), cos, sin)
    return key, block.self_attn.value(normed)


def run_layer(
    block: Block,
    residual: Tensor,
    normed: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    past: Rows,
) -> tuple[Tensor, Rows]:
    """Run one decoder layer: attention over `past` and the `normed` input, added to `residual`,
    then the feed-forward block. Returns its output, and the keys and values of the input."""
    key, value = self_rows(block, normed, cos, sin)
    query = rotate(block.self_attn.query(normed), cos, sin)
    past_keys, past_values = past
    keys = torch.cat([past_keys.to(key), key], dim=-2)
    values = torch.cat([past_values.to(value), value], dim=-2)
    attended = block.self_attn.attend(query, keys, values, mask)
    return block.feed_forward(residual + attended), (key, value)
