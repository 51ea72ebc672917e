"""The target: one tree-masked forward over rows of any lengths, and the commit of accepted nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moa.config import TargetFacts
from moa.errors import NumericalError, UnsupportedModelError, UsageError
from moa.grammar.matcher import GrammarCompiler
from moa.model.accelerator.buffers import check_nodes
from moa.model.accelerator.runner import Accelerator, GraphRunner
from moa.model.accelerator.sampling import NO_NUMBER
from moa.model.accelerator.weights import can_run
from moa.model.families import embedding_scale, mask_plan
from moa.model.layout import Layout, Row, RowBatch
from moa.model.library import LibraryDecoder
from moa.model.loading import load_model, load_tokenizer, prepare
from moa.model.packed import PACKED_FAMILIES, PackedDecoder
from moa.model.pages import PagePool
from moa.model.products import Product, can_pack, widened
from moa.sampling import NO_LOGITS

__all__ = ["Committed", "Row", "Step", "Target"]

_LOGITS_AT_ONCE = 2**25  # numbers; bounds the memory of the LM head to 128 MiB whatever the batch


@dataclass(frozen=True, slots=True)
class Committed:
    """Accepted tokens: their final states `[n,hidden]`, their first position, and where their keys
    and values are."""

    pool: PagePool
    slot: int
    start: int
    hidden: Tensor
    """A view into the states of the whole forward, unless pieces were joined."""
    tapped: Tensor | None = None
    """The states of the target's taps, side by side, where it has any."""
    tokens: Sequence[int] = ()
    before: Tensor | None = None
    """The states `[1, *]` of the token before them, where they are known."""

    def before_it(self) -> Tensor:
        """`before`, or zeros."""
        return (
            self.states.new_zeros(1, self.states.shape[1]) if self.before is None else self.before
        )

    @property
    def states(self) -> Tensor:
        """What a drafter of features reads: the tapped states, or else the final ones."""
        return self.hidden if self.tapped is None else self.tapped

    @property
    def stop(self) -> int:
        """The position after them."""
        return self.start + self.hidden.shape[0]

    @property
    def positions(self) -> Tensor:
        """Their positions `[n]`."""
        return torch.arange(self.start, self.stop, device=self.hidden.device)

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        """Rotated keys and values `[layers,n,Hkv,D]`; views into the pool if they can be: copy them
        before the slot is released."""
        return self.pool.read(self.slot, self.start, self.stop)

    def part(self, start: int, stop: int) -> Committed:
        """Tokens start..stop of these."""
        return Committed(
            self.pool,
            self.slot,
            self.start + start,
            self.hidden[start:stop],
            tapped=None if self.tapped is None else self.tapped[start:stop],
            tokens=self.tokens[start:stop],
            before=self.states[start - 1 : start] if start else self.before,
        )

    @classmethod
    def joined(cls, pieces: Sequence[Committed]) -> Committed:
        """Join consecutive pieces of a slot."""
        if len(pieces) == 1:
            return pieces[0]
        tapped = [piece.tapped for piece in pieces if piece.tapped is not None]
        return replace(
            pieces[0],
            hidden=torch.cat([piece.hidden for piece in pieces]),
            tapped=torch.cat(tapped) if tapped else None,
            tokens=[token for piece in pieces for token in piece.tokens],
        )


class Step:
    """The results of one forward, in the order of its rows."""

    def __init__(
        self,
        target: Target,
        batch: RowBatch,
        versions: Sequence[int],
        hidden: Tensor,
        choices: npt.NDArray[np.int64] | None = None,
        path: str = "library",
        tapped: Tensor | None = None,
    ):
        if len(hidden) != batch.starts[-1]:
            raise ValueError(f"{len(hidden)} final states of {batch.starts[-1]} tokens")
        self.batch = batch
        self.versions = versions
        self.path = path
        """How the forward ran: `library`, or `graph` or `eager` and the accelerator's tier."""
        self._target = target
        self._hidden = hidden
        self._known = choices
        self._tapped = tapped

    @property
    def samples_on_device(self) -> bool:
        """Whether tokens are sampled where the logits are: on a CPU the host's own walk reads fewer
        of them."""
        return self._target.runner is not None or self._hidden.device.type != "cpu"

    def hidden(self, b: int) -> Tensor:
        """Final states `[t,hidden]` of row b, after the last norm."""
        return self._hidden[int(self.batch.starts[b]) : int(self.batch.starts[b + 1])]

    @property
    def taps(self) -> bool:
        """Whether the target taps any layer."""
        return self._tapped is not None

    def tapped(self, b: int, path: Sequence[int]) -> Tensor:
        """The tapped states, side by side, at nodes of row b: `[len(path), taps * hidden]`."""
        if self._tapped is None:
            raise UsageError("this target taps no layer")
        places = torch.tensor(
            [int(self.batch.starts[b]) + node for node in path], device=self._tapped.device
        )
        found = self._tapped[places.long()]
        return (
            torch.cat([found, self._hidden[places.long()]], -1)
            if self._target.taps_final_state
            else found
        )

    def logits(self, b: int, nodes: Sequence[int]) -> Tensor:
        """Logits `[len(nodes),vocab]`, float32, of row b. One call for many nodes costs little more
        than for one."""
        return self.logits_of([(b, node) for node in nodes])

    def logits_of(self, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """Logits `[len(nodes),vocab]`, float32, of nodes (row, node) of any rows, in one product."""
        places = [int(self.batch.starts[b]) + range(self.batch.sizes[b])[node] for b, node in nodes]
        return self._target.logits(
            self._hidden[torch.tensor(places, dtype=torch.long, device=self._hidden.device)]
        )

    def wait(self) -> None:
        """Return when the accelerator has computed it: until then a forward has only been queued."""
        if self._hidden.device.type == "cuda":
            torch.cuda.synchronize(self._hidden.device)

    def argmax(self, b: int) -> npt.NDArray[np.int64]:
        """The most likely next token after each node of row b; -1 for nodes that were not judged. A
        `NumericalError` where logits of the row contain NaN or Inf."""
        choices = self._choices[self.batch.starts[b] : self.batch.starts[b + 1]]
        if (choices == NO_NUMBER).any():
            raise NumericalError(NO_LOGITS)
        return choices

    @cached_property
    def _choices(self) -> npt.NDArray[np.int64]:
        if self._known is not None:
            return self._known
        judged = self.batch.judged()
        choices = np.full(judged.shape, -1, dtype=np.int64)
        hidden = self._hidden
        if not judged.all():
            hidden = hidden[torch.from_numpy(np.flatnonzero(judged)).to(hidden.device)]
        if len(hidden):
            choices[judged] = self._target.most_likely(hidden).cpu().numpy()
        return choices


class Target:
    """A causal language model with a pool of slots, verifying trees of drafted tokens for many
    sequences at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        facts: TargetFacts,
        *,
        slots: int = 1,
        capacity: int = 2048,
        kv_tokens: int = 0,
        folder: Path | None = None,
        packed: bool = True,
        pack_weights: bool = False,
        exact: bool = True,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Use a model prepared by `moa.model.loading`. The capacity is limited to the model's
        positions.

        `kv_tokens` is the total of all slots (0: each can be full). `packed` uses the packed
        decoder if the family has one; `pack_weights` then stores the weights in oneDNN's layout
        instead of torch's, and beside them a float32 copy of the LM head in that layout: to widen
        it in every forward takes as long as eight layers. On an accelerator `exact` makes every
        token's bits independent of its batch, its draft and the pieces of its prompt, for which
        drafts must be chains in less than float32; `accelerator` replaces the device's own.
        """
        head: Any = model.get_output_embeddings()
        embedding: Any = model.get_input_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UnsupportedModelError(
                f"{facts.family} cannot be a target: its LM head has a bias"
            )
        self.model = model
        self.facts = facts
        self.folder = folder
        self.head_weight: Tensor = head.weight
        self.embedding_weight: Tensor = embedding.weight
        self.device = self.embedding_weight.device
        self.dtype = self.embedding_weight.dtype
        # Gemma rounds its scale to the weights' precision before it multiplies.
        self.embedding_scale = float(torch.tensor(embedding_scale(model.config), dtype=self.dtype))
        self.logit_softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        capacity = min(capacity, facts.max_positions)
        if packed and can_run(model, facts):
            accelerator = accelerator or Accelerator.of(self.device, library_products=not exact)
        else:
            accelerator = None
        self.pool = PagePool(
            layers=facts.layers,
            slots=slots,
            kv_heads=facts.kv_heads,
            capacity=capacity,
            tokens=min(kv_tokens, slots * capacity),
            spare=int(accelerator is not None),
            head_dim=facts.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        plan = mask_plan(model.config)
        self._windows = plan.windows
        kinds = model.config.layer_types if plan.per_layer_type else ["all"] * facts.layers
        self.runner: GraphRunner | None = None
        """The accelerator's decoder, in place of the others."""
        self.taps_final_state = False
        self._decoder: PackedDecoder | LibraryDecoder
        if accelerator is not None:
            windows = [plan.windows[kind] for kind in kinds]
            self.runner = GraphRunner(model, facts, self.pool, accelerator, windows)
        elif packed and facts.family in PACKED_FAMILIES:
            pack = pack_weights and can_pack(self.device, self.dtype)
            self._decoder = PackedDecoder(
                model, facts, capacity=self.pool.capacity, kinds=kinds, pack=pack
            )
        else:
            self._decoder = LibraryDecoder(model, plan)
        self._pack_head = pack_weights and packed
        self.trees = self.runner is None or not exact or self.dtype == torch.float32
        """Whether drafts may branch. The keys of an accepted branch lie at other columns than those
        of plain decoding, so that sums over them run in another order: less than float32 would show
        it."""

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        quantize: str = "",
        **how: Any,
    ) -> Self:
        """Load from a hub id or a folder; `how` is passed to the constructor."""
        loaded = load_model(source, device=device, dtype=dtype, quantize=quantize)
        return cls(loaded.model, loaded.facts, folder=loaded.folder, **how)

    @classmethod
    def from_model(cls, model: PreTrainedModel, **how: Any) -> Self:
        """Use a model that is in memory; its attention function is replaced by this project's."""
        return cls(model, prepare(model), **how)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded on first use."""
        if self.folder is None:
            raise UsageError("this target was made in memory, without a tokenizer")
        return load_tokenizer(self.folder)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles what answers must match."""
        return GrammarCompiler(
            lambda: str(self.tokenizer.backend_tokenizer.to_str()),
            size=self.facts.vocab_size,
            eos_ids=self.facts.eos_ids,
        )

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Step:
        """Run every row's tokens after its slot's prefix; each node attends to the prefix and its
        own ancestors."""
        if self.runner is not None:
            batch = RowBatch.of(rows, self.facts.vocab_size)
            check_nodes(batch)
            begun = self.pool.begin(batch.slots, batch.sizes)
            found = self.runner(batch)
            return Step(
                self, batch, begun, *found, path=self.runner.path, tapped=self.runner.tapped
            )
        batch, versions, layout, ids = self._laid_out(rows)
        hidden = self._decoder(ids, layout, self.pool.layers)
        return Step(self, batch, versions, hidden, tapped=self._decoder.tapped)

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers, counted from 0, in every step; before the first forward.
        The number behind the last layer's, which can only come last, stands for the final state."""
        self.taps_final_state = layers[-1] == self.facts.layers
        (self._decoder if self.runner is None else self.runner).tap(
            layers[: len(layers) - self.taps_final_state]
        )

    @property
    def packed(self) -> bool:
        """Whether the packed decoder runs forwards."""
        return self.runner is None and isinstance(self._decoder, PackedDecoder)

    @torch.inference_mode()
    def run_first_layer(self, rows: Sequence[Row]) -> None:
        """Have kernels made for so many tokens: those of one layer serve all."""
        if self.runner is None and isinstance(self._decoder, PackedDecoder):
            _, _, layout, ids = self._laid_out(rows)
            self._decoder.run_first_layer(ids, layout, self.pool.layers)

    def _laid_out(self, rows: Sequence[Row]) -> tuple[RowBatch, Sequence[int], Layout, Tensor]:
        batch = RowBatch.of(rows, self.facts.vocab_size)
        versions = self.pool.begin(batch.slots, batch.sizes)
        layout = Layout(
            batch,
            self.pool,
            windows=self._windows,
            repeats=self.facts.heads // self.facts.kv_heads,
            together=isinstance(self._decoder, LibraryDecoder),
        )
        return batch, versions, layout, torch.from_numpy(batch.ids).to(self.device)

    @torch.inference_mode()
    def commit(self, step: Step, b: int, path: Sequence[int]) -> Committed:
        """Append `path`, a chain of row b's nodes, to its slot's prefix.

        A row can be committed once, and only until its slot takes part in another forward.
        """
        slot = step.batch.slots[b]
        size = step.batch.sizes[b]
        parents = step.batch.parents[step.batch.starts[b] : step.batch.starts[b + 1]]
        if self.pool.versions[slot] != step.versions[b]:
            raise UsageError(f"slot {slot} has moved on since this forward")
        before = -1
        for node in path:
            if not 0 <= node < size or parents[node] != before:
                raise UsageError(f"slot {slot}: node {node} does not continue the path")
            before = node
        start = self.pool.lengths[slot]
        self.pool.commit(slot, path)
        straight = len(path) == 0 or path[-1] == len(path) - 1
        hidden = step.hidden(b)
        return Committed(
            pool=self.pool,
            slot=slot,
            start=start,
            hidden=hidden[: len(path)]
            if straight
            else hidden[torch.tensor(path, device=self.device)],
            tapped=step.tapped(b, path) if step.taps else None,
            tokens=[int(step.batch.ids[step.batch.starts[b] + node]) for node in path],
        )

    @cached_property
    def wide_head(self) -> Product | None:
        """The LM head in float32, made when it is first asked for."""
        return widened(self.head_weight) if self._pack_head else None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head over final states `[n,hidden]`: float32 `[n,vocab]`, also of lower-precision
        weights, which makes ties rarer."""
        weight = self.head_weight
        if self.runner is not None:
            logits = self.runner.logits(hidden)
        elif self.wide_head is not None:
            logits = self.wide_head(hidden)
        elif weight.dtype == torch.float32:
            logits = linear(hidden, weight)
        elif weight.device.type == "cuda":
            logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        else:
            logits = _linear_in_fp32(hidden, weight)
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    @torch.inference_mode()
    def most_likely(self, hidden: Tensor) -> Tensor:
        """The best token `[n]` after each of the final states `[n,hidden]`, in bounded memory;
        `NO_NUMBER` where the best logit is none."""
        at_once = max(1, _LOGITS_AT_ONCE // self.facts.vocab_size)
        return torch.cat([_best(self.logits(part)) for part in hidden.split(at_once)])


def _best(logits: Tensor) -> Tensor:
    # To argmax what is no number is the greatest of all, and so is infinity: the best logit shows
    # that there is one.
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.where(logits.gather(-1, best).isfinite(), best, NO_NUMBER).squeeze(-1)


def _linear_in_fp32(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden @ weight.T` in float32; the weight is converted in pieces, so no float32 copy of it
    is kept."""
    out = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    wide = hidden.float()
    rows = 1024
    for start in range(0, len(weight), rows):
        out[:, start : start + rows] = wide @ weight[start : start + rows].float().T
    return out
