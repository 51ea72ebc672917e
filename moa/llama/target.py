"""A target in a GGUF file, which llama.cpp's library runs in this process.

**The same bits in every batch.** llama.cpp picks its kernels by how many tokens it gets: products
of one token, of up to seven and of eight or more add in different orders, and so does attention of
one token over a long context, or of 64 and more. So the same token gets other numbers in another
batch, and now and then another token is chosen. Here every token of a dense model on a CPU runs
through one and the same kernels: each sequence brings a multiple of eight tokens, at most 56, to a
call, and as many of them get logits; what is missing is filled up with tokens that nobody looks at,
and that are forgotten with the draft. A sequence has cells of its own, in the order of its tokens.
`Capabilities.batch_invariant` says whether this holds; where it does not (a mixture's experts see
other tokens of the batch, a card has kernels of its own), the numbers depend a little on the batch,
as they do in llama.cpp.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
    capacity_of,
    is_mixture,
    kv_bytes_per_token,
    most_sequences,
    plan_of,
)
from moa.llama.runtime import EXPERTS, Run, Runtime, Shape, check_kv_type
from moa.llama.sequences import Sequences
from moa.sampling import NO_LOGITS
from moa.target.contract import (
    Capabilities,
    Chooser,
    ExpectedLoad,
    LoadOptions,
    Machine,
    Memory,
    Node,
)
from moa.target.identity import SCHEME, file_id, identity_of, tokenizer_hash
from moa.target.registry import registered
from moa.target.rows import Row, RowBatch

_UNIT = 8
"""From so many tokens on, llama.cpp's products of a CPU add in one order, in multiples of it."""
_LONGEST = 56
"""Most tokens of a sequence in a call: attention of 64 and more adds in another order."""
_BATCH_ON_CPU = 128
"""Most tokens of a call. More are no faster there, and logits of all of them have their memory."""
_BATCH_ON_CARD = 512
_WORKSPACE = 2**30
"""Bytes of a card that are left for the work of a forward."""


@dataclass(frozen=True)
class Committed:
    """Tokens that joined a slot."""

    start: int
    tokens: Sequence[int]

    @property
    def stop(self) -> int:
        """The position after them."""
        return self.start + len(self.tokens)


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
        """The likeliest token after each node of row b; -1 after nodes that were not judged."""
        found = np.full(self.sizes[b], -1, dtype=np.int64)
        judged = self.batch.judged()[self.batch.starts[b] : self.batch.starts[b + 1]]
        for node in np.flatnonzero(judged).tolist():
            logits = self._logits[Node(b, node)]
            best = int(logits.argmax())
            if not np.isfinite(logits[best]):
                raise NumericalError(NO_LOGITS)
            found[node] = best
        return found

    def host_logits(self, nodes: Sequence[Node]) -> NDArray[np.float32]:
        """Logits of nodes of any rows. Those of rows that were not judged are computed by running
        the row again."""
        wanted = [Node(b, range(self.sizes[b])[node]) for b, node in nodes]
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
        """Load; errors are one clear line, those of a damaged file before it is loaded."""
        self._head = read_head(path)
        self._words = tokenizer_of(self._head)
        if options.rpc:
            library.add_servers(options.rpc)
        kv_type = options.kv_type or KV_TYPE
        check_kv_type(kv_type)  # before anything is computed from it
        capacity = capacity_of(self._head, options)
        on_card = options.device != "cpu" and options.gpu_layers != 0 and library.has_card
        if on_card:
            # Its memory is for this alone: all of it is taken, and one call runs all sessions.
            sequences = most_sequences(options, capacity)
            block = 0
            mapped = False
            gpu_layers = options.gpu_layers
            if gpu_layers < 0:
                kv = kv_bytes_per_token(self._head, kv_type) * sequences * capacity
                gpu_layers = layers_that_fit(
                    self._head,
                    library.card_memory(),
                    kv,
                    experts_on_host=options.cpu_moe,
                )
            sequence_bytes = 0
        else:
            plan = plan_of(self._head, options)
            sequences = plan.sequences
            block = plan.block
            mapped = plan.mapped
            gpu_layers = 0
            sequence_bytes = plan.sequence
        self.runtime = Runtime(
            library,
            path,
            Shape(
                sequences=sequences,
                capacity=capacity + PADDING,
                batch=_BATCH_ON_CARD if on_card else _BATCH_ON_CPU,
                kv_type=kv_type,
                gpu_layers=gpu_layers,
                threads=options.threads or _threads(),
                experts_on_host=options.cpu_moe,
                mapped=mapped,
                block_size=block,
                sequence_bytes=sequence_bytes,
            ),
        )
        self.facts = _facts(self._head, self._words, self.runtime)
        self.cache = Sequences(self.runtime, slots=options.slots, capacity=capacity)
        exact = options.exact and self.runtime.on_cpu
        exact = exact and not is_mixture(self._head) and not self.runtime.recurrent
        self._calls = Calls(
            unit=_UNIT if exact else 1,
            longest=_LONGEST if exact else self.runtime.shape.batch,
            batch=self.runtime.shape.batch,
            block=self.runtime.shape.block,
        )
        self._capabilities = Capabilities(
            decoder="llama.cpp", trees=False, states=False, batch_invariant=exact
        )

    @classmethod
    def open(cls, source: str, options: LoadOptions) -> Self:
        """Load a file."""
        options.refuse(source, "dtype", "quantize")
        if options.device not in ("auto", "cpu"):
            raise UsageError(
                f"--device {options.device} does not go with a GGUF file",
                hint="cpu, or leave it out: --gpu-layers says how much is on a card",
            )
        path = Path(source)
        read_head(path)  # a damaged file is refused whether llama.cpp is installed or not
        return cls(path, load(find(options.library)), options)

    # ---- what it is

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._capabilities

    @cached_property
    def computes(self) -> str:
        """By the file, and all that decides how llama.cpp adds: its build, the processor's
        instructions, what is on a card, and how calls are cut."""
        about = self.runtime.adds_by | {"unit": self._calls.unit}
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
        """The file's own."""
        words = self._words
        special = {
            name: token
            for name, token in (
                ("bos_token", words.begin),
                ("eos_token", words.end),
                ("pad_token", words.padding),
                ("unk_token", words.unknown),
            )
            if token is not None
        }
        kind: Any = PreTrainedTokenizerFast
        made: PreTrainedTokenizerFast = kind(
            tokenizer_object=words.core, clean_up_tokenization_spaces=False, **special
        )
        made.chat_template = words.chat_template
        return made

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
        names = ", ".join(self.runtime.devices()) or platform.machine()
        return Machine(
            device="cpu" if self.runtime.on_cpu else "auto",
            dtype=f"{_most_common_kind(self._head)}, keys and values {self.runtime.shape.kv_type}",
            hardware=f"{names}, {threads} {'thread' if threads == 1 else 'threads'}",
        )

    @property
    def memory(self) -> Memory:
        """What it takes beside its weights."""
        per_token = kv_bytes_per_token(self._head, self.runtime.shape.kv_type)
        shape = self.runtime.shape
        return Memory(
            kv_bytes_per_token=per_token,
            kv_bytes=per_token * self.runtime.cells * shape.sequences,
            buffer_bytes=4 * self.runtime.vocab_size * shape.batch,
        )

    # ---- forwards

    def forward(self, rows: Sequence[Row]) -> LlamaStep:
        """Run every row's tokens behind its slot's committed ones."""
        batch = RowBatch.of(rows, self.facts.vocab_size)
        for b, slot in enumerate(batch.slots):
            if not batch.chain(b):
                raise UsageError(f"slot {slot}: this target verifies chains only, not trees")
        self.cache.check_room(batch.slots, batch.sizes)
        step = LlamaStep(self, batch, self.cache.begin(batch.slots))
        judged = batch.judged()
        wanted = {}
        for b, row in enumerate(rows):
            nodes = judged[batch.starts[b] : batch.starts[b + 1]]
            if row.judged == "read":
                nodes = np.ones_like(nodes)
            wanted[b] = np.flatnonzero(nodes).tolist()
        self._run(step, wanted)
        return step

    def run_again(self, step: LlamaStep, b: int) -> None:
        """Run row b once more, for the logits after all of its nodes."""
        slot = step.batch.slots[b]
        if self.cache.versions[slot] != step.versions[b]:
            raise UsageError(f"slot {slot} has moved on since this forward")
        self._run(step, {b: list(range(step.sizes[b]))})

    def _run(self, step: LlamaStep, judged: dict[int, list[int]]) -> None:
        """Run these rows, for the logits after these of their nodes."""
        batch = step.batch
        pieces = []
        for b, nodes in judged.items():
            slot = batch.slots[b]
            missing = self.cache.rewind(slot)
            tokens = batch.ids[batch.starts[b] : batch.starts[b + 1]].tolist()
            if self.runtime.recurrent and len(tokens) > 1:
                self.cache.keep_state(slot)
            pieces.append(
                Pieces(
                    row=b,
                    sequence=self.cache.sequence(slot),
                    start=self.cache.held(slot),
                    tokens=[*missing, *tokens],
                    skipped=len(missing),
                    judged=nodes,
                )
            )
        for call in self._calls.of(pieces):
            runs = [Run(part.sequence, part.start, part.tokens, part.judged) for part in call]
            for part in call:
                self.cache.ran(batch.slots[part.row], part.start + len(part.tokens))
            found = self.runtime.run(runs, unit=self._calls.unit)
            for part, logits in zip(call, found, strict=True):
                step.keep(
                    {
                        Node(part.row, part.first + place): row
                        for place, row in zip(part.judged, logits, strict=True)
                    }
                )

    def commit(self, step: Any, b: int, path: Sequence[int]) -> Committed:
        """Append `path`, the first nodes of row b, to its slot."""
        slot = step.batch.slots[b]
        if self.cache.versions[slot] != step.versions[b]:
            raise UsageError(f"slot {slot} has moved on since this forward")
        if list(path) != list(range(len(path))) or len(path) > step.sizes[b]:
            raise UsageError(f"slot {slot}: {list(path)} is no chain of nodes from its end on")
        start = self.cache.lengths[slot]
        first = int(step.batch.starts[b])
        tokens = step.batch.ids[first : first + len(path)].tolist()
        self.cache.commit(slot, tokens)
        return Committed(start, tokens)

    # ---- costs

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Read the weights into memory, where the file is mapped: by a forward."""
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


def _threads() -> int:
    """As many as this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _most_common_kind(head: GgufHead) -> str:
    sizes: dict[str, int] = {}
    for tensor in head.tensors:
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.size
    return max(sizes, key=sizes.__getitem__, default="F32")


def layers_that_fit(
    head: GgufHead, free: int, kv_bytes: int, *, experts_on_host: bool = False
) -> int:
    """How many of a file's layers a card with so many free bytes takes, their keys and values
    with them; one more than there are stands for the head, too."""
    experts = re.compile(EXPERTS)
    layers = head.number("{arch}.block_count")
    sizes = [0] * layers
    others = 0
    for tensor in head.tensors:
        if experts_on_host and experts.search(tensor.name):
            continue
        place = tensor.name.split(".")
        number = int(place[1]) if place[0] == "blk" and place[1].isdecimal() else layers
        if number < layers:
            sizes[number] += tensor.size
        else:
            others += tensor.size
    room = free - _WORKSPACE - others
    for found, size in enumerate(reversed(sizes)):  # llama.cpp gives the last layers to the card
        room -= size + kv_bytes // layers
        if room < 0:
            return found
    return layers + 1


def _facts(head: GgufHead, words: GgufTokenizer, runtime: Runtime) -> TargetFacts:
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
