"""A target in a GGUF file, which llama.cpp's library runs in this process.

**The same bits in every batch.** llama.cpp picks its kernels by how many tokens it gets, and they
add in different orders. So the same token gets other numbers in another batch, and now and then
another token is chosen. Here every token of a dense model on a CPU runs through one and the same
kernels, because calls have as many tokens as `moa/llama/same_bits.py` says; what is missing is
filled up with tokens that nobody looks at, and that are forgotten with the draft. As many of a
call's tokens get logits. A sequence has cells of its own, in the order of its tokens.
`Capabilities.batch_invariant` says whether this holds; where it does not (a mixture's experts see
other tokens of the batch, a card has kernels of its own), the numbers depend a little on the batch,
as they do in llama.cpp.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moa.config import TargetFacts
from moa.errors import NumericalError, UsageError
from moa.gguf.reader import GgufHead, read_head
from moa.gguf.tokenizer import GgufTokenizer, tokenizer_of
from moa.grammar.matcher import GrammarCompiler
from moa.llama.calls import Calls, Pieces
from moa.llama.library import Library, find, load
from moa.llama.memory_plan import (
    KV_TYPE,
    PADDING,
    LlamaPlan,
    capacity_of,
    is_mixture,
    layers_with_states,
    most_sequences,
    plan_of,
    session_bytes,
)
from moa.llama.runtime import EXPERTS, Run, Runtime, Shape, check_kv_type
from moa.llama.same_bits import BATCH, EIGHTS, CallSizes, few_tokens
from moa.llama.sequences import Sequences
from moa.sampling import NO_LOGITS
from moa.target.contract import (
    Capabilities,
    Chooser,
    CommittedTokens,
    ExpectedLoad,
    LoadOptions,
    Machine,
    Memory,
    Node,
)
from moa.target.identity import SCHEME, file_id, identity_of, tokenizer_hash
from moa.target.registry import registered
from moa.target.rows import Row, RowBatch

_BATCH_ON_CARD = 512
"""Most tokens of a call; on a processor they are `same_bits.BATCH`."""
_VALUES = "bf16"
"""What values are kept in beside keys in float16, where every call is to have the same bits."""
_WORKSPACE = 2**30
"""Bytes of a card that are left for the work of a forward."""


class LlamaStep:
    """The results of one forward."""

    path = "llama.cpp"

    def __init__(self, target: LlamaTarget, batch: RowBatch, versions: Sequence[int]) -> None:
        self.batch = batch
        self.versions = versions
        self._target = target
        self._logits: dict[Node, NDArray[np.float32]] = {}

    @property
    def sizes(self) -> Sequence[int]:
        """Tokens of each row."""
        return self.batch.sizes

    @property
    def choose(self) -> Chooser | None:
        """The host's walk chooses: logits are in its memory."""
        return None

    def wait(self) -> None:
        """A forward has ended when it returns."""

    def keep(self, logits: dict[Node, NDArray[np.float32]]) -> None:
        """Hold the logits of these nodes."""
        self._logits |= logits

    def argmax(self, b: int) -> NDArray[np.int64]:
        """The likeliest token after each node (token) of row b, `[nodes]`; -1 after nodes for which
        none was asked (not judged). A `NumericalError` where logits are NaN or infinite."""
        tokens = np.full(self.sizes[b], -1, dtype=np.int64)
        is_judged = self.batch.judged()[self.batch.starts[b] : self.batch.starts[b + 1]]
        for node in np.flatnonzero(is_judged).tolist():
            logits = self._logits[Node(b, node)]
            # argmax takes NaN and infinity for the greatest of all.
            best = int(logits.argmax())
            if not np.isfinite(logits[best]):
                raise NumericalError(NO_LOGITS)
            tokens[node] = best
        return tokens

    def host_logits(self, nodes: Sequence[Node]) -> NDArray[np.float32]:
        """Logits `[len(nodes), vocab]` after these nodes, tokens of any rows of the forward. A row
        is run again if logits after some of them were not computed in the forward."""
        wanted = []
        for b, node in nodes:
            from_start = range(self.sizes[b])[node]  # a node may count from the end of its row
            wanted.append(Node(b, from_start))
        for b in {node.row for node in wanted if node not in self._logits}:
            self._target.run_again(self, b)
        if not wanted:
            return np.empty((0, self._target.facts.vocab_size), dtype=np.float32)
        return np.stack([self._logits[node] for node in wanted])


@registered(step=LlamaStep, cache=Sequences)
class LlamaTarget:
    """A GGUF file in llama.cpp: `moa.target.contract.Target`."""

    facts: TargetFacts
    cache: Sequences

    def __init__(self, path: Path, library: Library, options: LoadOptions) -> None:
        """Load a GGUF file into llama.cpp; errors are one clear line, those of a damaged file
        before it is loaded."""
        self._head = read_head(path)
        self._words = tokenizer_of(self._head)
        if options.rpc:
            library.add_servers(options.rpc)
        capacity = capacity_of(self._head, options)
        shape, sizes = _shape(self._head, library, options, capacity)
        self.runtime = Runtime(library, path, shape)
        self.facts = _facts(self._head, self._words, self.runtime)
        self.cache = Sequences(self.runtime, slots=options.slots, capacity=capacity)
        exact = sizes is not None and not self.runtime.recurrent
        if sizes is None or not exact:
            sizes = CallSizes(unit=1, longest=shape.batch, batch=shape.batch, worth_a_call=8)
        self._calls = Calls(
            unit=sizes.unit,
            longest=sizes.longest,
            batch=sizes.batch,
            block=shape.block,
            worth_a_call=sizes.worth_a_call,
        )
        self._capabilities = Capabilities(
            decoder="llama.cpp", trees=False, states=False, batch_invariant=exact
        )

    @classmethod
    def open(cls, source: str, options: LoadOptions) -> Self:
        """Load a GGUF file; errors are one clear line."""
        _check(source, options)
        return cls(Path(source), load(find(options.library)), options)

    # ---- what it is

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

    @cached_property
    def computes(self) -> str:
        """A hash of the file and of all that decides how llama.cpp adds: its build, the processor's
        instructions, what is on a card, and how calls are cut. Targets with the same one compute the
        same."""
        about = self.runtime.adds_by | {"unit": self._calls.unit, "longest": self._calls.longest}
        if not self._capabilities.batch_invariant:
            # Attention of one token is cut into as many pieces as there are threads.
            about["threads"] = self.runtime.shape.threads
        return identity_of(self.facts.weights_id, about)

    @property
    def has_tokenizer(self) -> bool:
        """A file has one, or is refused."""
        return True

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The file's own tokenizer and chat template, made on first use."""
        words = self._words
        named = {
            "bos_token": words.begin,
            "eos_token": words.end,
            "pad_token": words.padding,
            "unk_token": words.unknown,
        }
        special = {name: token for name, token in named.items() if token is not None}
        make: Any = PreTrainedTokenizerFast
        tokenizer: PreTrainedTokenizerFast = make(
            tokenizer_object=words.core, clean_up_tokenization_spaces=False, **special
        )
        tokenizer.chat_template = words.chat_template
        return tokenizer

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles what answers must match."""
        return GrammarCompiler(
            lambda: self._words.json, size=self.facts.vocab_size, eos_ids=self.facts.eos_ids
        )

    @property
    def machine(self) -> Machine:
        """Where it computes."""
        threads = self.runtime.shape.threads
        unit = "thread" if threads == 1 else "threads"
        devices = ", ".join(self.runtime.devices()) or platform.machine()
        return Machine(
            device="cpu" if self.runtime.on_cpu else "auto",
            dtype=f"{_most_common_kind(self._head)}, {_kept(self.runtime.shape)}",
            hardware=f"{devices}, {threads} {unit}",
            weights_on_disk=self.runtime.shape.mapped,
        )

    @property
    def memory(self) -> Memory:
        """What it takes beside its weights."""
        shape = self.runtime.shape
        session = session_bytes(self._head, shape.kv_type, self.runtime.cells)
        per_token = -(-session // self.runtime.cells)  # rounded up; states are divided, too
        return Memory(
            kv_bytes_per_token=per_token,
            kv_bytes=per_token * self.runtime.cells * shape.sequences,
            buffer_bytes=4 * self.runtime.vocab_size * shape.batch,
        )

    # ---- forwards

    def forward(self, rows: Sequence[Row]) -> LlamaStep:
        """Run the tokens of every row, each a chain without branches, behind the committed ones of
        its slot, and keep the logits after those of which they are wanted."""
        batch = RowBatch.of(rows, self.facts.vocab_size)
        for b, slot in enumerate(batch.slots):
            if not batch.chain(b):
                raise UsageError(f"slot {slot}: this target verifies chains only, not trees")
        self.cache.check_room(batch.slots, batch.sizes)
        step = LlamaStep(self, batch, self.cache.begin(batch.slots))
        is_judged = batch.judged()
        nodes_with_logits = {}
        for b, row in enumerate(rows):
            if row.judged == "read":
                # Some will be read, and nobody knows yet which: llama.cpp computes logits in the
                # forward or not at all.
                nodes_with_logits[b] = list(range(batch.sizes[b]))
            else:
                of_row = is_judged[batch.starts[b] : batch.starts[b + 1]]
                nodes_with_logits[b] = np.flatnonzero(of_row).tolist()
        self._run(step, nodes_with_logits)
        return step

    def run_again(self, step: LlamaStep, b: int) -> None:
        """Run row b once more, for the logits after all of its nodes; a `UsageError` where its slot
        has moved on since."""
        self._check_same_slot(step, b)
        self._run(step, {b: list(range(step.sizes[b]))})

    def _check_same_slot(self, step: LlamaStep, b: int) -> None:
        """A `UsageError` unless the slot of row b is as this step's forward left it."""
        slot = step.batch.slots[b]
        if self.cache.versions[slot] != step.versions[b]:
            raise UsageError(f"slot {slot} has moved on since this forward")

    def _run(self, step: LlamaStep, nodes_with_logits: dict[int, list[int]]) -> None:
        """Run rows of a step's batch in calls of llama.cpp, and keep in the step the logits after
        the nodes (tokens) that `nodes_with_logits` names for each row."""
        slots = step.batch.slots
        pieces = [self._piece(step.batch, b, nodes) for b, nodes in nodes_with_logits.items()]
        for call in self._calls.of(pieces):
            runs = [Run(part.sequence, part.start, part.tokens, part.judged) for part in call]
            for part in call:
                self.cache.ran(slots[part.row], part.start + len(part.tokens))
            logits_of_parts = self.runtime.run(runs, unit=self._calls.unit)
            for part, logits in zip(call, logits_of_parts, strict=True):
                nodes_of_part = [Node(part.row, part.first + place) for place in part.judged]
                step.keep(dict(zip(nodes_of_part, logits, strict=True)))

    def _piece(self, batch: RowBatch, b: int, nodes: list[int]) -> Pieces:
        """The tokens of row b that llama.cpp is to run, and the nodes that get logits. Its slot is
        taken back to what is committed."""
        slot = batch.slots[b]
        # A draft of an earlier forward may be in the way; committed tokens may go with it.
        forgotten = self.cache.rewind(slot)
        tokens = batch.ids[batch.starts[b] : batch.starts[b + 1]].tolist()
        if self.runtime.recurrent and len(tokens) > 1:
            # A part of these tokens may be rejected, and a running state cannot be cut.
            self.cache.keep_state(slot)
        return Pieces(
            row=b,
            sequence=self.cache.sequence(slot),
            start=self.cache.held(slot),
            tokens=[*forgotten, *tokens],
            skipped=len(forgotten),
            judged=nodes,
        )

    def commit(self, step: Any, b: int, path: Sequence[int]) -> CommittedTokens:
        """Append `path`, the accepted nodes of row b's draft, to the text of its slot. They must be
        the row's first ones in order, as the draft is a chain; a `UsageError` otherwise, or if the
        slot has moved on since the forward."""
        self._check_same_slot(step, b)
        slot = step.batch.slots[b]
        if list(path) != list(range(len(path))) or len(path) > step.sizes[b]:
            raise UsageError(f"slot {slot}: {list(path)} is no chain of nodes from its end on")
        start = self.cache.lengths[slot]
        first = int(step.batch.starts[b])
        tokens = step.batch.ids[first : first + len(path)].tolist()
        self.cache.commit(slot, tokens)
        return CommittedTokens(start, tokens)

    # ---- costs

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Nothing is made ready: llama.cpp has no kernels to compile."""
        del load, seconds

    @property
    def unprepared(self) -> bool:
        """Nothing is left for later."""
        return False

    def prepare_more(self) -> None:
        """Nothing is left for later."""

    def close(self) -> None:
        """Free its memory."""
        self.runtime.close()


def plan_memory(source: str, options: LoadOptions) -> LlamaPlan | None:
    """What a GGUF file will take of this machine's memory, before its weights are read. None where
    a card computes, which has memory of its own. What cannot be loaded is refused as by `open`."""
    head = _check(source, options)
    if _on_card(load(find(options.library)), options):
        most_sequences(options, capacity_of(head, options))  # raises where it is none
        return None
    return plan_of(head, options)


def _check(source: str, options: LoadOptions) -> GgufHead:
    """The head of a file; a `UsageError` where it is damaged, whether llama.cpp is installed or not,
    or where the options do not go with it."""
    # A file says itself what its weights are stored in.
    options.refuse(source, "dtype", "quantize")
    if options.device not in ("auto", "cpu"):
        raise UsageError(
            f"--device {options.device} does not go with a GGUF file",
            hint="cpu, or leave it out: --gpu-layers says how much is on a card",
        )
    head = read_head(Path(source))
    check_kv_type(options.kv_type or KV_TYPE)  # before anything is computed from it
    return head


def _on_card(library: Library, options: LoadOptions) -> bool:
    """Whether layers go to a graphics card."""
    return options.device != "cpu" and options.gpu_layers != 0 and library.has_card


def _shape(
    head: GgufHead, library: Library, options: LoadOptions, capacity: int
) -> tuple[Shape, CallSizes | None]:
    """How the model of a file is laid out in memory for sessions of `capacity` tokens: how many
    there are at once, what is kept in which precision, and with a graphics card how many layers are
    on it. And how many tokens a call has, so that each gets the same bits in all of them; None
    where no such sizes are known, or they are not asked for."""
    kv_type = options.kv_type or KV_TYPE
    cells = capacity + PADDING
    threads = options.threads or _threads()
    if not _on_card(library, options):
        plan = plan_of(head, options)
        value_type, sizes = _in_one_order(head, library, options, threads)
        shape = Shape(
            sequences=plan.sequences,
            capacity=cells,
            batch=BATCH if sizes is None else sizes.batch,
            kv_type=kv_type,
            value_type=value_type,
            gpu_layers=0,
            threads=threads,
            experts_on_host=options.cpu_moe,
            mapped=plan.mapped,
            block_size=plan.block,
            sequence_bytes=plan.sequence,
        )
        return shape, sizes
    # A card's memory is for this alone: all of it is taken, and one call runs all sessions.
    sequences = most_sequences(options, capacity)
    gpu_layers = options.gpu_layers
    if gpu_layers < 0:
        gpu_layers = layers_that_fit(
            head,
            library.card_memory(),
            session_bytes(head, kv_type, capacity) * sequences,
            experts_on_host=options.cpu_moe,
        )
    shape = Shape(
        sequences=sequences,
        capacity=cells,
        batch=_BATCH_ON_CARD,
        kv_type=kv_type,
        gpu_layers=gpu_layers,
        threads=threads,
        experts_on_host=options.cpu_moe,
        mapped=False,
        block_size=0,
        sequence_bytes=0,
    )
    # A card has kernels that add in other orders.
    return shape, None


def _in_one_order(
    head: GgufHead, library: Library, options: LoadOptions, threads: int
) -> tuple[str, CallSizes | None]:
    """What values are kept in on a processor, and how many tokens a call has, so that each gets the
    same bits in all of them; None where no such sizes are known, or they are not asked for."""
    kv_type = options.kv_type or KV_TYPE
    # A mixture's experts see other tokens of the batch, and a running state has kernels of its own.
    if not options.exact or is_mixture(head) or layers_with_states(head):
        return kv_type, None
    value_type = options.kv_type or _values_of(head)
    sizes = few_tokens(
        head, library.instructions, kv_type=kv_type, value_type=value_type, threads=threads
    )
    if sizes is None:
        return kv_type, EIGHTS
    return value_type, sizes


def _values_of(head: GgufHead) -> str:
    """What values are kept in beside keys in float16. Latent attention has one cache for both, and
    llama.cpp refuses different types."""
    return KV_TYPE if head.has("{arch}.attention.kv_lora_rank") else _VALUES


def _threads() -> int:
    """The number of threads for forwards: `OMP_NUM_THREADS`, or as many as this process has cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kept(shape: Shape) -> str:
    """What keys and values are kept in, for people."""
    if shape.kept_values == shape.kv_type:
        return f"keys and values {shape.kv_type}"
    return f"keys {shape.kv_type}, values {shape.kept_values}"


def _most_common_kind(head: GgufHead) -> str:
    """The type in which most bytes of a file's tensors are stored, `Q4_K` for example."""
    sizes: dict[str, int] = {}
    for tensor in head.tensors:
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.size
    return max(sizes, key=sizes.__getitem__, default="F32")


def layers_that_fit(
    head: GgufHead, free: int, kv_bytes: int, *, experts_on_host: bool = False
) -> int:
    """How many of a file's layers fit onto a graphics card with so many `free` bytes, each with its
    share of the `kv_bytes` of keys and values. If all do, it is one more than there are layers: in
    llama.cpp's count that one is the LM head."""
    experts = re.compile(EXPERTS)
    layers = head.number("{arch}.block_count")
    layer_bytes = [0] * layers
    other_bytes = 0  # of embedding and head
    for tensor in head.tensors:
        if experts_on_host and experts.search(tensor.name):
            continue  # it stays in the machine's memory
        number = _layer_of(tensor.name)
        if number is not None and number < layers:
            layer_bytes[number] += tensor.size
        else:
            other_bytes += tensor.size
    room = free - _WORKSPACE - other_bytes
    # llama.cpp gives the last layers to the card.
    for fitting, size in enumerate(reversed(layer_bytes)):
        room -= size + kv_bytes // layers
        if room < 0:
            return fitting
    return layers + 1


def _layer_of(name: str) -> int | None:
    """The layer that a tensor of a GGUF file belongs to, by its name (`blk.7.attn_q.weight`); None
    for a tensor of no layer."""
    parts = name.split(".")
    if parts[0] != "blk" or not parts[1].isdecimal():
        return None
    return int(parts[1])


def _facts(head: GgufHead, words: GgufTokenizer, runtime: Runtime) -> TargetFacts:
    """The dimensions and the identity of a file's model, from its metadata and its content."""
    heads = head.number("{arch}.attention.head_count", 1) or 1
    width = head.number("{arch}.embedding_length")
    names = {tensor.name for tensor in head.tensors}
    return TargetFacts(
        family=head.architecture,
        layers=head.number("{arch}.block_count"),
        hidden_size=width,
        vocab_size=runtime.vocab_size,
        heads=heads,
        kv_heads=head.number("{arch}.attention.head_count_kv", heads) or 1,
        head_dim=head.number("{arch}.attention.key_length", width // heads),
        rope_theta=head.real("{arch}.rope.freq_base", 10000.0),
        rms_norm_eps=head.real("{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        max_positions=head.number("{arch}.context_length"),
        tie_embeddings="output.weight" not in names,
        eos_ids=runtime.ends(),
        bos_id=None,
        tokenizer_hash=tokenizer_hash(words.json),
        weights_id=SCHEME + file_id(head.path),
    )
