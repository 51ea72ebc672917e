"""A small language model as a drafter, with its own embedding and head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from moa.config import TargetFacts
from moa.drafters.body_drafting import BodyModel
from moa.drafters.contract import Drafting
from moa.drafters.graph import GraphSpec
from moa.drafters.sibling.config import SiblingConfig
from moa.drafters.sibling.drafting import MixedDrafting
from moa.drafters.sibling.graph import SiblingGraph
from moa.errors import UsageError
from moa.manifest import KVHeads
from moa.model.borrowed import BesideStates, Rows, SharedWeights, Sibling
from moa.target.families import per_layer_width
from moa.target.loading import load_model
from moa.tree import MASKED

if TYPE_CHECKING:
    from moa.target.cuda.graphs import Graphs


class SiblingDrafter(BodyModel):
    """Token ids -> embedding -> layers -> norm -> head, all of the model."""

    name = "sibling"
    config: SiblingConfig

    def __init__(self, config: SiblingConfig, body: Sibling, target_vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.body = body
        self.vocab_size = min(target_vocab_size, config.vocab_size)
        """Tokens that both know: their tables may be padded differently."""

    @classmethod
    def load(
        cls, folder: Path, facts: TargetFacts, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Load the model in `folder` as the drafter of a target with these facts; a `UsageError`
        unless both have the same tokenizer."""
        loaded = load_model(folder, device=device, dtype=dtype)
        refuse_another_tokenizer(folder, loaded.facts, facts)
        body = Sibling(loaded.model)
        width = per_layer_width(loaded.model.config)
        config = SiblingConfig.of(loaded.facts, body.memory, width)
        return cls(config, body, facts.vocab_size).eval()

    @property
    def shared(self) -> SharedWeights:  # type: ignore[override]
        """The model's own embedding and head."""
        return self.body.shared

    def features(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        *records: Tensor,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """The final states `[B, T, hidden]` of tokens, which the head reads, and their keys and
        values by layer. `past` holds those of the tokens before; there are no `records`, for it
        reads nothing of the target."""
        inputs = self.shared.inputs(ids, self.weight.dtype)
        x, rows, _ = self.states(
            inputs["x"],
            positions,
            mask,
            past,
            per_layer=inputs.get("per_layer"),
            queries=queries,
        )
        return x, rows

    def states(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        *,
        per_layer: Tensor | None = None,
        queries: Tensor | None = None,
        running: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Rows], list[Tensor]]:
        """Run all layers over embedded tokens `x` `[B, T, hidden]`.

        `past` holds the keys and values of each layer that keeps them, `running` the states of each
        layer that keeps some, both in the order of the layers; `per_layer` are the tokens' rows of
        the table of per-layer inputs. Returns the final states, of the `queries` alone if given
        (indices into the tokens), and the new ones of both.
        """
        beside = BesideStates()
        if self.body.per_layer is not None:
            assert per_layer is not None
            beside.per_layer = self.body.per_layer(x, per_layer)
        new_rows: list[Rows] = []
        new_running: list[Tensor] = []
        next_past = iter(past)
        next_running = iter(running)
        decoder = self.body.decoder
        memory = self.body.memory
        masks = self._window_masks(mask, positions)
        for index in range(self.config.layers):
            if queries is not None and index == self.config.first_reader:
                # From here on no layer keeps anything: only the states that were asked for matter.
                x = x.index_select(1, queries)
                positions = positions.index_select(1, queries)
                masks = {window: seen.index_select(2, queries) for window, seen in masks.items()}
                beside.select(queries)
                queries = None
            mask = masks[self.body.windows.get(index, 0)]  # 0: a layer that sees all of the text
            if index in memory.cached:
                x, rows = decoder.layer(index, x, positions, mask, next(next_past), beside)
                new_rows.append(rows)
            elif index in memory.running:
                before = tuple(next(next_running) for _ in memory.running[index])
                x, after = decoder.running_layer(index, x, positions, before)
                new_running += after
            else:  # it reads what an earlier layer keeps
                x = decoder.reading_layer(index, x, positions, mask, beside)
        if queries is not None:
            x = x.index_select(1, queries)
        return decoder.norm(x), new_rows, new_running

    def _window_masks(self, mask: Tensor, positions: Tensor) -> dict[int, Tensor]:
        """The additive attention masks of layers by the size of their sliding window: at 0 the
        given `mask`, of layers that see all of the text; else without what has left the window.

        A row of the cache lies in the column of its position, but for those of a draft, which lie
        further right: a draft is shorter than a window, so none of them has left it. The step's own
        tokens are the last columns, wherever the cache ends.
        """
        masks = {0: mask}
        cached = torch.arange(mask.shape[-1] - positions.shape[1], device=mask.device)
        column_positions = torch.cat([cached.expand(positions.shape[0], -1), positions], dim=1)
        for window in {*self.body.windows.values()}:
            outside = column_positions[:, None, None] <= positions[:, None, :, None] - window
            masks[window] = mask.masked_fill(outside, MASKED)
        return masks

    def extend(
        self, ids: Tensor, positions: Tensor, mask: Tensor, past: Sequence[Rows]
    ) -> list[Rows]:
        """The keys and values by layer of tokens that need no logits; the final norm is computed for
        the last of them alone."""
        last = torch.tensor([ids.shape[1] - 1], device=ids.device)
        return self.features(ids, positions, mask, past, queries=last)[1]

    @property
    def graph_spec(self) -> GraphSpec:
        """Inputs and outputs of its graph: keys and values, or running states, of each layer that
        keeps something, and no records."""
        config = self.config
        return GraphSpec(
            config.hidden_size,
            tuple(KVHeads(kv_heads=heads, head_dim=width) for _, (heads, width) in config.cached),
            records=None,
            states=config.states,
            per_layer=config.per_layer,
        )

    def drafting(
        self, *, slots: int, capacity: int, scratch: int = 256, graphs: Graphs | None = None
    ) -> Drafting:
        """The sibling at work in torch, with memory for `slots` texts. Captured graphs are used
        only where every layer keeps keys and values of one shape."""
        if self.config.alike:
            return super().drafting(slots=slots, capacity=capacity, scratch=scratch, graphs=graphs)
        return MixedDrafting(self, slots=slots, capacity=capacity, scratch=scratch)

    @property
    def bundle_kind(self) -> Any:
        """It is independent of its target."""
        return "independent"

    def graph_module(self) -> nn.Module:
        """All layers, and the norm."""
        return SiblingGraph(self)


def refuse_another_tokenizer(folder: Path, own: TargetFacts, target: TargetFacts) -> None:
    """Raise if a model's tokenizer is not the target's."""
    if own.tokenizer_hash != target.tokenizer_hash:
        raise UsageError(
            f"the model in {folder} has another tokenizer than the target",
            hint="a drafter's body must share the target's tokenizer",
        )
