"""A target in torch: a model of the library, its KV cache in pages, and one of three decoders."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moa.config import WEIGHT_DTYPES, TargetFacts
from moa.errors import ConfigError, NumericalError, UnsupportedModelError, UsageError
from moa.grammar.matcher import GrammarCompiler
from moa.process.memory import give_back_free_memory
from moa.sampling import NO_LOGITS
from moa.target import contract
from moa.target.contract import (
    NO_NUMBER,
    Capabilities,
    Chooser,
    Draw,
    ExpectedLoad,
    LoadOptions,
    Machine,
    Memory,
    Node,
)
from moa.target.cuda.graphs import Graphs
from moa.target.cuda.runner import Accelerator, GraphRunner
from moa.target.cuda.sampling import choose
from moa.target.cuda.weights import can_run
from moa.target.decoder import Decoder, Forward
from moa.target.families import FAMILIES, cached_layers, chains_only, mask_plan, scaling_of
from moa.target.head import Head
from moa.target.identity import computation_id
from moa.target.library import LibraryDecoder
from moa.target.loading import load_model, load_tokenizer, prepare
from moa.target.packed import PACKED_FAMILIES, PackedDecoder
from moa.target.pages import PagePool
from moa.target.plain import refuse_unless_shown
from moa.target.products import can_pack, narrowed
from moa.target.recurrent import RecurrentPool
from moa.target.registry import registered
from moa.target.rope import settle_rope
from moa.target.rows import Row, RowBatch

__all__ = ["Committed", "Row", "Step", "Target"]

_WORTH_NARROWING = 2**26
"""Bytes of an embedding from which half of them is worth it: the model, whose module it is, serves no
other target afterwards."""
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
        """Return the states `[1, width]` of the token before these; zeros where they are unknown."""
        if self.before is not None:
            return self.before
        return self.states.new_zeros(1, self.states.shape[1])

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
        """Return the tokens `start` to `stop`, counted within this piece of committed text, as a
        piece of their own. Its tensors are views of this one's."""
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
        """Join pieces of one slot's text that follow each other into one piece; their states are
        copied."""
        if len(pieces) == 1:
            return pieces[0]
        tapped = [piece.tapped for piece in pieces if piece.tapped is not None]
        tokens: list[int] = []
        for piece in pieces:
            tokens += piece.tokens
        # The slot, the start and the token before are those of the first piece.
        return replace(
            pieces[0],
            hidden=torch.cat([piece.hidden for piece in pieces]),
            tapped=torch.cat(tapped) if tapped else None,
            tokens=tokens,
        )


class Step:
    """The results of one forward: `moa.target.contract.Step`, and its tensors."""

    def __init__(
        self, target: Target, batch: RowBatch, versions: Sequence[int], forward: Forward
    ) -> None:
        """Wrap what a decoder has computed (`forward`) for the rows of a `batch`."""
        if len(forward.hidden) != batch.starts[-1]:
            raise ValueError(f"{len(forward.hidden)} final states of {batch.starts[-1]} tokens")
        self.batch = batch
        self.versions = versions
        """The version of each row's slot when the forward began. A slot that has another one by now
        has moved on, and nothing of this step can be committed to it."""
        self._target = target
        self._forward = forward

    @property
    def sizes(self) -> Sequence[int]:
        """Tokens of each row."""
        return self.batch.sizes

    @property
    def path(self) -> str:
        """How the forward ran: the decoder's name or, on CUDA, `graph` or `eager` and the tier."""
        return self._forward.path

    @property
    def choose(self) -> Chooser | None:
        """The function that samples where the logits are; None where the host samples."""
        return self._choose if self._target.decoder.samples else None

    def _choose(self, nodes: Sequence[Node], draws: Sequence[Draw]) -> list[int]:
        return choose(self.logits_of(nodes), draws)

    def hidden(self, b: int) -> Tensor:
        """Final states `[t,hidden]` of row b, after the last norm."""
        return self._forward.hidden[self._span(b)]

    @property
    def taps(self) -> bool:
        """Whether the target taps any layer."""
        return self._forward.tapped is not None

    def tapped(self, b: int, path: Sequence[int]) -> Tensor:
        """The states that a drafter reads, the inputs of the layers it named (taps), side by side,
        at the nodes of a path in row b: `[len(path), taps * hidden]`."""
        if self._forward.tapped is None:
            raise UsageError("this target taps no layer")
        places = self._places([Node(b, node) for node in path])
        states = self._forward.tapped[places]
        if self._target.taps_final_state:
            # No layer has the final state as its input, so the decoder cannot tap it.
            states = torch.cat([states, self._forward.hidden[places]], -1)
        return states

    def logits(self, b: int, nodes: Sequence[int]) -> Tensor:
        """Logits `[len(nodes),vocab]`, float32, of nodes of row b. One call for many nodes costs
        little more than for one."""
        return self.logits_of([Node(b, node) for node in nodes])

    def logits_of(self, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """Logits `[len(nodes),vocab]`, float32, of nodes (row, node) of any rows, in one product."""
        return self._target.logits(self._forward.hidden[self._places(nodes)])

    def host_logits(self, nodes: Sequence[Node]) -> NDArray[np.float32]:
        """Logits `[len(nodes),vocab]`, float32, of nodes of any rows, as an array on the host."""
        return self.logits_of(nodes).cpu().numpy()

    def wait(self) -> None:
        """Return when the accelerator has computed it: until then a forward has only been queued."""
        if self._forward.hidden.device.type == "cuda":
            torch.cuda.synchronize(self._forward.hidden.device)

    def argmax(self, b: int) -> NDArray[np.int64]:
        """The most likely next token after each node of row b; -1 for nodes that were not judged. A
        `NumericalError` where logits of the row contain NaN or Inf."""
        choices = self._choices[self._span(b)]
        if (choices == NO_NUMBER).any():
            raise NumericalError(NO_LOGITS)
        return choices

    @cached_property
    def _choices(self) -> NDArray[np.int64]:
        """The most likely next token after each node (token) of the batch, `[nodes]`; -1 after
        nodes for which none was asked (not judged), `NO_NUMBER` where the logits are NaN or
        infinite."""
        if self._forward.choices is not None:
            return self._forward.choices  # the decoder has chosen already
        is_judged = self.batch.judged()
        choices = np.full(is_judged.shape, -1, dtype=np.int64)
        hidden = self._forward.hidden
        if not is_judged.all():
            # The LM head is a large product: it is computed for the judged nodes alone.
            judged_nodes = torch.from_numpy(np.flatnonzero(is_judged))
            hidden = hidden[judged_nodes.to(hidden.device)]
        if len(hidden):
            choices[is_judged] = self._target.most_likely(hidden).cpu().numpy()
        return choices

    def _span(self, b: int) -> slice:
        """Where the nodes of row b are in the batch."""
        return slice(int(self.batch.starts[b]), int(self.batch.starts[b + 1]))

    def _places(self, nodes: Sequence[tuple[int, int]]) -> Tensor:
        """The indices, within the batch's tokens, of nodes that are given by row and number within
        the row, as a tensor to index with. A number may count from the end: -1 is the row's
        last."""
        places = []
        for b, node in nodes:
            nodes_of_row = range(int(self.batch.starts[b]), int(self.batch.starts[b + 1]))
            places.append(nodes_of_row[node])
        return torch.tensor(places, dtype=torch.long, device=self._forward.hidden.device)


@registered(step=Step, cache=PagePool)
class Target:
    """A causal language model with a pool of slots, verifying trees of drafted tokens for many
    sequences at once: `moa.target.contract.Target`, and its tensors for drafters."""

    facts: TargetFacts
    cache: PagePool

    def __init__(
        self,
        model: PreTrainedModel,
        facts: TargetFacts,
        *,
        slots: int = 1,
        capacity: int = 2048,
        kv_tokens: int = 0,
        folder: Path | None = None,
        quantize: str = "",
        packed: bool = True,
        pack_weights: bool = False,
        exact: bool = True,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Use a model prepared by `moa.target.loading`. The capacity is limited to the model's
        positions.

        `kv_tokens` is the total of all slots (0: each can be full). `packed` uses the packed
        decoder if the family has one; `pack_weights` then stores the weights in oneDNN's layout
        instead of torch's, and beside them a float32 copy of the LM head in that layout. On an
        accelerator `exact` makes every token's bits independent of its batch, its draft and the
        pieces of its prompt, for which drafts must be chains in less than float32; `accelerator`
        replaces the device's own.
        """
        self.model = model
        self.facts = facts
        self.folder = folder
        self._quantized = quantize
        self.head_weight, self.embedding_weight = _head_and_embedding(model, facts)
        self.device = self.embedding_weight.device
        self.dtype = self.embedding_weight.dtype
        # Gemma rounds its scale to the weights' precision before it multiplies.
        scaling = scaling_of(model.config)
        self.embedding_scale = float(torch.tensor(scaling.embedding, dtype=self.dtype))
        self.logit_softcap = scaling.softcap
        self.logit_scale = scaling.logits
        if packed and can_run(model, facts):
            accelerator = accelerator or Accelerator.of(self.device, library_products=not exact)
        else:
            accelerator = None
        capacity = min(capacity, facts.max_positions)
        # Frequencies that depend on the longest text are fixed now, before any decoder reads them.
        settle_rope(model.get_decoder(), longest=capacity)
        chains = chains_only(model.config)
        self.cache = self._make_cache(
            slots=slots,
            capacity=capacity,
            tokens=kv_tokens,
            chains=chains,
            # Graphs of a fixed size write their padding to a page of no slot.
            spare=1 if accelerator is not None else 0,
        )
        self.taps_final_state = False
        self.graphs: Graphs | None = None
        """The captured graphs of an accelerator, which a drafter's own steps join; None without."""
        self._head = Head(self.head_weight, pack=packed and pack_weights)
        self.decoder = self._make_decoder(accelerator, packed=packed, head=self._head)
        self._capabilities = Capabilities(
            decoder=self.decoder.name,
            # The keys of an accepted branch lie at other columns than those of plain decoding, so
            # that sums over them run in another order: less than float32 would show it.
            trees=not chains and (accelerator is None or not exact or self.dtype == torch.float32),
            states=True,
            batch_invariant=accelerator is not None and accelerator.kernels.in_fixed_order,
        )

    def _make_cache(
        self, *, slots: int, capacity: int, tokens: int, chains: bool, spare: int
    ) -> PagePool:
        """Make the KV cache of this model, with the running states of layers that have those
        instead of keys and values (`chains`: drafts cannot branch)."""
        pool_class = RecurrentPool if chains else PagePool
        return pool_class(
            layers=self.facts.layers,
            shapes=list(cached_layers(self.model.config).values()),
            slots=slots,
            kv_heads=self.facts.kv_heads,
            capacity=capacity,
            tokens=min(tokens, slots * capacity),
            spare=spare,
            head_dim=self.facts.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _make_decoder(
        self, accelerator: Accelerator | None, *, packed: bool, head: Head
    ) -> Decoder:
        """Make the decoder, what computes the layers, that is the fastest for this model: captured
        graphs on an accelerator, the packed one for families that it knows, the library's own model
        for all others."""
        plan = mask_plan(self.model.config)
        # The kind of each layer, by which its mask and its window are found.
        kinds = ["all"] * self.facts.layers
        if plan.per_layer_type:
            kinds = self.model.config.layer_types
        if accelerator is not None:
            windows = [plan.windows[kind] for kind in kinds]
            runner = GraphRunner(self.model, self.facts, self.cache, accelerator, windows)
            self.graphs = runner.graphs
            return runner
        if packed and self.facts.family in PACKED_FAMILIES:
            return PackedDecoder(
                self.model,
                self.facts,
                self.cache,
                kinds=kinds,
                windows=plan.windows,
                pack=head.packs and can_pack(self.device, self.dtype),
                head=head,
            )
        return LibraryDecoder(self.model, self.facts, self.cache, plan=plan, head=head)

    # ---- how it is made

    @classmethod
    def open(cls, source: str, options: LoadOptions) -> Self:
        """Load a hub id or a folder, with the fastest matrix products of this machine."""
        # Settings of llama.cpp, which mean nothing here.
        options.refuse(source, "gpu_layers", "kv_type", "cpu_moe", "rpc", "threads", "library")
        device = pick_device(options.device)
        return cls.load(
            source,
            device=device,
            dtype=pick_dtype(options.dtype, device),
            quantize=options.quantize,
            slots=options.slots,
            capacity=options.capacity,
            kv_tokens=options.kv_tokens,
            pack_weights=True,
            exact=options.exact,
        )

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
        """Load a target from a hub id or a folder; `how` is passed to the constructor. A model of
        no family that is known here is compared with the library's own first."""
        loaded = load_model(source, device=device, dtype=dtype, quantize=quantize)
        made = cls(loaded.model, loaded.facts, folder=loaded.folder, quantize=quantize, **how)
        return made._compared()

    @classmethod
    def from_model(cls, model: PreTrainedModel, **how: Any) -> Self:
        """Use a model that is in memory; its attention function is replaced by this project's."""
        return cls(model, prepare(model), **how)._compared()

    def _compared(self) -> Self:
        """Return this target. If its family is none of ours, first compare what it computes with
        what the library's own model does, and raise where the two differ."""
        if self.facts.family not in FAMILIES:
            refuse_unless_shown(self, self.model)
        return self

    # ---- what it is

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

    @property
    def computes(self) -> str:
        """A hash of the weights, their precision, and the files beside them: targets with the same
        one compute the same."""
        return computation_id(
            self.facts.weights_id,
            self.folder,
            dtype=self.machine.dtype,
            quantize=self._quantized,
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether it came from a folder, which must have one."""
        return self.folder is not None

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

    @property
    def machine(self) -> Machine:
        """The device, precision and hardware with which it computes, for people."""
        if self.device.type == "cuda":
            hardware = torch.cuda.get_device_name(self.device)
        else:
            threads = torch.get_num_threads()
            unit = "thread" if threads == 1 else "threads"
            hardware = f"{platform.machine()} CPU, {threads} {unit}"
        return Machine(
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            hardware=hardware,
        )

    @property
    def memory(self) -> Memory:
        """What it takes beside its weights."""
        return Memory(
            kv_bytes_per_token=self.cache.bytes_per_token,
            kv_bytes=self.cache.nbytes,
            buffer_bytes=self.decoder.nbytes,
        )

    # ---- forwards

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Step:
        """Run every row's tokens after its slot's prefix; each node attends to the prefix and its
        own ancestors."""
        batch = RowBatch.of(rows, self.facts.vocab_size)
        self.decoder.check(batch)
        versions = self.cache.begin(batch.slots, batch.sizes)
        return Step(self, batch, versions, self.decoder.run(batch))

    @torch.inference_mode()
    def commit(self, step: Step, b: int, path: Sequence[int]) -> Committed:
        """Append the accepted nodes of row b's draft, `path`, to the text of its slot. Returns
        these tokens with their states, which drafters read.

        A row can be committed once, and only until its slot takes part in another forward.
        """
        batch = step.batch
        slot = batch.slots[b]
        if self.cache.versions[slot] != step.versions[b]:
            raise UsageError(f"slot {slot} has moved on since this forward")
        batch.check_path(b, path)
        row_start = int(batch.starts[b])
        tokens = [int(batch.ids[row_start + node]) for node in path]
        start = self.cache.lengths[slot]
        self.cache.commit(slot, path)
        if isinstance(self.cache, RecurrentPool):
            # A slot that begins with a part of this text has no running state after that part: it
            # must run these tokens again.
            self.cache.remember(slot, tokens)
        return Committed(
            pool=self.cache,
            slot=slot,
            start=start,
            hidden=_along(step.hidden(b), path),
            tapped=step.tapped(b, path) if step.taps else None,
            tokens=tokens,
        )

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers, counted from 0, in every forward, for a drafter that
        reads them; call it before the first one. The number behind the last layer's, which can only
        come last, stands for the final state."""
        self.taps_final_state = layers[-1] == self.facts.layers
        if self.taps_final_state:
            layers = layers[:-1]
        self.decoder.tap(layers)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits, float32 `[n,vocab]`, of the LM head after final states `[n,hidden]`. They are
        float32 also where weights are of lower precision: two best tokens are then seldom equal."""
        logits = self.decoder.logits(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    @torch.inference_mode()
    def most_likely(self, hidden: Tensor) -> Tensor:
        """The best token `[n]` after each of the final states `[n,hidden]`, in bounded memory;
        `NO_NUMBER` where the best logit is none."""
        at_once = max(1, _LOGITS_AT_ONCE // self.facts.vocab_size)
        return torch.cat([_best(self.logits(part)) for part in hidden.split(at_once)])

    # ---- what it makes ready

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Make kernels, graphs and copies that the first requests would wait for. Drafters that
        share the target's head must be there before: it may be given back."""
        self.decoder.prepare(load, seconds)
        is_tied = self.head_weight.data_ptr() == self.embedding_weight.data_ptr()
        if self._head.wide is None:
            return
        if not is_tied:
            self._give_back_head()
        elif isinstance(self.decoder, PackedDecoder):
            self._narrow_embedding(self.decoder)

    def _give_back_head(self) -> None:
        """Give back the memory of the LM head's weight, which nothing reads beside its copy: for
        152k tokens of 1,536 numbers 0.9 GB in float32. A drafter that shares the weight has a
        reference of its own, and keeps it."""
        head: Any = self.model.get_output_embeddings()
        head.weight = nn.Parameter(self._head.forget_weight(), requires_grad=False)
        self.head_weight = head.weight
        give_back_free_memory()

    def _narrow_embedding(self, decoder: PackedDecoder) -> None:
        """Keep the embedding, of which the head has a copy of its own, in 16 bits where that loses
        nothing: most checkpoints are stored so. For 152k tokens of 1,536 numbers it gives back
        0.5 GB."""
        if self.embedding_weight.nbytes < _WORTH_NARROWING:
            return
        narrow = narrowed(self.embedding_weight)
        if narrow is None:
            return
        decoder.embed_from(narrow)
        self.embedding_weight = nn.Parameter(narrow, requires_grad=False)
        embedding: Any = self.model.get_input_embeddings()
        embedding.weight = self.embedding_weight
        self._give_back_head()

    @property
    def unprepared(self) -> bool:
        """Whether a graph is missing."""
        return self.decoder.unprepared

    def prepare_more(self) -> None:
        """Capture one of the missing graphs."""
        self.decoder.prepare_more()


def with_states(target: contract.Target) -> Target:
    """Return the target as one of this module, whose states drafters read; a `UsageError` where it
    has none."""
    if not target.capabilities.states:
        raise UsageError(
            f"a target of {target.capabilities.decoder} gives no states, which this drafter reads",
            hint="leave the drafter out",
        )
    return cast(Target, target)  # this module's targets are the ones that say so


def _head_and_embedding(model: PreTrainedModel, facts: TargetFacts) -> tuple[Tensor, Tensor]:
    """Return the weights of the LM head and of the embedding, `[vocab, hidden]` each, which may be
    the same; an `UnsupportedModelError` where the head has a bias."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UnsupportedModelError(f"{facts.family} cannot be a target: its LM head has a bias")
    return head.weight, embedding.weight


def _along(states: Tensor, path: Sequence[int]) -> Tensor:
    """Return a row's states at the nodes of a path, `[len(path), hidden]`: a view where the nodes
    are the row's first ones."""
    count = len(path)
    # The numbers of a path's nodes rise. So if the last of n nodes is node n - 1, they are 0 to n - 1.
    if count == 0 or path[-1] == count - 1:
        return states[:count]
    return states[torch.tensor(path, device=states.device)]


def _best(logits: Tensor) -> Tensor:
    """Return the best token `[n]` of logits `[n, vocab]`; `NO_NUMBER` in rows with NaN or infinity."""
    # argmax takes NaN and infinity for the greatest of all: if a row has one, it is the best logit.
    best = logits.argmax(dim=-1, keepdim=True)
    best_logit = logits.gather(-1, best)
    return torch.where(best_logit.isfinite(), best, NO_NUMBER).squeeze(-1)


def pick_device(name: str) -> str:
    """The device that `name` stands for; `auto` is the best one here."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def pick_dtype(name: str, device: str) -> torch.dtype:
    """The precision that `name` stands for; `auto` is bfloat16 on an accelerator and float32 on a
    CPU."""
    if name == "auto":
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    if name not in WEIGHT_DTYPES:
        raise ConfigError(
            f"unknown dtype {name!r}", hint=f"one of auto, {', '.join(WEIGHT_DTYPES)}"
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype
