"""Estimates of a build: shapes, sizes, and roughly how long it will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from export.atomic_folder import gigabytes
from export.kinds import VariantKind, choose_kinds
from moa.drafters.graph import GraphSizes
from moa.drafters.registry import find
from moa.errors import UsageError
from moa.manifest import BundleKind
from moa.process.memory import available_bytes
from moa.target.loading import read_facts

_BYTES_PER_WEIGHT = {
    "cpu-int4": 0.5 + 4 / 32,
    "cpu-fp32": 4.0,
    "npu-openvino": 4.0,
    "coreml": 4.0,
    "nnapi": 4.0,
}
_HOST_EMBEDDING = 2.0
"""Bytes per weight of the embedding table that a static form leaves to the host."""


@dataclass(frozen=True)
class Cost:
    """How long a part of a build takes on two cores of a small machine that do nothing else."""

    seconds: float
    """Whatever the model's size."""
    seconds_per_weight: float

    def of(self, weights: int) -> float:
        """For a model of so many weights."""
        return self.seconds + self.seconds_per_weight * weights


# Their ratios were measured while bundles of models of 7M and of 0.5B weights were made on a busy
# machine, their sum on one that did nothing else.
READING = Cost(0.2, 4e-9)
EXPORTING = Cost(8.0, 22e-9)
"""A graph."""
COMPARING = Cost(0.9, 43e-9)
MAKING = Cost(0.2, 15e-9)
"""A variant, besides its timing."""
TIMING_SECONDS = 2.5
"""A dynamic variant's, which runs for so long however busy the machine is."""
RECORDING = Cost(0.2, 5e-9)
# Bytes of memory of its own (not of mapped files, which the system takes back) that a process has
# while it makes a bundle, a tenth above what was measured on a language model of 0.63B weights.
_MEMORY_OF_FOUR_BITS = 4.4
"""For each weight: 2.8 GB while it is read in float32. Then the weights lie in a file, and it takes
0.5 GB while the graph is exported, 2.2 while it is compared with torch, 1.6 while it is quantized."""
_MEMORY_OF_HEAD = 13.2
"""For each weight of the head, which is the embedding where they are tied: while the graph is compared
with torch the runtime makes three copies of it. It is the most where the head has most of the weights."""
_MEMORY_OF_WORD = 2_000
"""For each word meanwhile: its logits, in float32 and float64, and what tokenizers make of it. Gemma 3
270M, 262,144 words with 168M of its 268M weights, took 2.87 GB in all."""
_MEMORY_OF_OTHERS = 8.0
"""For each weight, in variants besides `cpu-int4`: 4.9 GB while a float32 graph is timed, with the
runtime's own copies; 4.3 while one is converted for phones."""
_MEMORY_OF_LAYERS = 13.0
"""And for each weight of the layers: the library's quantizer to eight bits took 4.7 GB, almost
three copies of the 0.36B there."""
_MEMORY_OF_TRAINED = 12.0
"""For each weight of a drafter that was trained: not measured."""
_PROGRAM = 400_000_000
"""Bytes of memory that torch and the other libraries take."""
_GRAPH = 2**20
"""Bytes of a variant besides its weights, at most."""


@dataclass(frozen=True)
class ExportPlan:
    """What the headers of files say about a drafter beside its target, and estimates from them."""

    sizes: GraphSizes
    draft_vocabulary: int
    embedding_weights: int
    head_weights: int
    variant_bytes: dict[str, int]
    weights: int
    """Those that a build goes over."""
    seconds: float

    @property
    def memory(self) -> int:
        """Bytes of memory that a build takes."""
        weights = self.sizes.layer_weights + self.embedding_weights + self.head_weights
        if not self.sizes.of_published:
            own = _MEMORY_OF_TRAINED * weights
        elif self.variant_bytes.keys() == {"cpu-int4"}:
            own = _MEMORY_OF_FOUR_BITS * weights
        else:
            own = max(_MEMORY_OF_OTHERS * weights, _MEMORY_OF_LAYERS * self.sizes.layer_weights)
        head = self.head_weights or self.embedding_weights
        compared = _MEMORY_OF_HEAD * head + _MEMORY_OF_WORD * self.sizes.vocabulary
        return int(max(own, compared)) + _PROGRAM

    @property
    def disk(self) -> int:
        """Bytes of disk that a build needs: for the bundle, and in float32 for torch's weights, for
        the graph that is compared with them, and for the layers that all variants are made from."""
        weights = self.sizes.layer_weights + self.embedding_weights + self.head_weights
        bundle = sum(self.variant_bytes.values())
        in_float32 = 4 * (2 * weights + self.sizes.layer_weights)
        besides_weights = _GRAPH * (2 + len(self.variant_bytes))
        return bundle + in_float32 + besides_weights

    def as_dict(self) -> dict[str, Any]:
        """The plan for programs: every number on one level."""
        numbers = asdict(self) | {"disk_bytes": self.disk, "memory_bytes": self.memory}
        sizes: dict[str, Any] = numbers.pop("sizes")
        del sizes["no_static_form"]
        return sizes | numbers

    def lines(self) -> list[str]:
        """Returns the plan as lines for people."""
        sizes = self.sizes
        shown = [f"{heads} x {width}" for heads, width in sizes.cache[:4]]
        if len(sizes.cache) > 4:
            shown.append("...")
        tied = " (tied)" if sizes.tied else ""
        lines = [
            f"{sizes.kind} drafter: hidden size {sizes.hidden_size},"
            f" {len(sizes.cache)} cache layers ({', '.join(shown)})",
            f"vocabulary {sizes.vocabulary}, drafts from {self.draft_vocabulary}",
            f"an activation record is {sizes.record_width} numbers",
            f"weights: layers {sizes.layer_weights:,}, embedding {self.embedding_weights:,},"
            f" head {self.head_weights:,}{tied}",
        ]
        for name, size in self.variant_bytes.items():
            lines.append(f"{name}: about {gigabytes(size)}")
        lines.append(
            f"while building: about {gigabytes(self.disk)} of disk and"
            f" {gigabytes(self.memory)} of memory"
        )
        lines.append(f"time without calibration: about {self.seconds:.0f} s")
        return lines


def check_memory(plan: ExportPlan) -> None:
    """Raise a `UsageError` if less memory is free than making a bundle takes: a system without
    memory kills it after minutes, or others before it."""
    available = available_bytes()
    is_known = available > 0
    if is_known and available < plan.memory:
        raise UsageError(
            f"making the bundle takes {plan.memory / 1e9:.1f} GB of memory, and"
            f" {available / 1e9:.1f} GB are free",
            hint="free some, or make it with moa-export on another machine and copy its folder, which"
            " `moa-edge up` and `edge-client` take as --bundle",
        )


def make_plan(
    target: str, drafter: str, variants: Sequence[str], draft_vocab: int | None
) -> ExportPlan:
    """Estimate a build from the headers of the files: shapes are read, and no weights. A
    `UsageError` for what cannot be built. `draft_vocab` is the number of tokens that can be
    drafted; None: all."""
    kinds = choose_kinds(variants)
    facts, folder = read_facts(target, identify=False)
    sizes = find(drafter).sizes(facts, folder)
    if sizes.kind not in (known := get_args(BundleKind)):
        raise UsageError(
            f"a bundle cannot say that its drafter is of kind {sizes.kind!r}: known are"
            f" {', '.join(known)}",
            hint="add it to moa/manifest.py:BundleKind",
        )
    _refuse_static(kinds, sizes.no_static_form)
    _refuse_other_hosts(kinds, sizes)
    draft_vocabulary = sizes.vocabulary if draft_vocab is None else draft_vocab
    if not 1 <= draft_vocabulary <= sizes.vocabulary:
        raise UsageError(
            f"--draft-vocab must be 1..{sizes.vocabulary} (the target's vocabulary), not {draft_vocabulary}"
        )
    layers = sizes.layer_weights
    embedding = sizes.vocabulary * (sizes.hidden_size + sizes.per_layer_width)
    head = draft_vocabulary * sizes.hidden_size
    # A head of fewer tokens cannot share the embedding's table.
    shared = sizes.tied and draft_vocabulary == sizes.vocabulary
    head_of_its_own = 0 if shared else head
    weights = layers + embedding + head_of_its_own
    return ExportPlan(
        sizes=sizes,
        draft_vocabulary=draft_vocabulary,
        embedding_weights=embedding,
        head_weights=head_of_its_own,
        variant_bytes={kind.name: _size(kind, layers, embedding, head, shared) for kind in kinds},
        weights=weights,
        seconds=_seconds(kinds, weights),
    )


def _refuse_static(kinds: Sequence[VariantKind], why_not: str) -> None:
    """Raise a `UsageError` if a variant of fixed sizes is asked for of a drafter that cannot have
    one; `why_not` is the reason, empty if it can."""
    static = [kind.name for kind in kinds if kind.form == "static"]
    if static and why_not:
        raise UsageError(
            f"{static[0]} is only for MoA drafters with CA, a body of their own and no borrowed layers: {why_not}",
            hint="leave this variant out",
        )


_KEEPS_STATES = ("onnxruntime", "onnxruntime-openvino")
"""Runtimes of variants that this project's own program for devices drives."""


def _refuse_other_hosts(kinds: Sequence[VariantKind], sizes: GraphSizes) -> None:
    """Raise a `UsageError` if a drafter whose layers keep running states is to run in a program
    that does not carry these from step to step."""
    if not sizes.running_states:
        return
    for kind in kinds:
        if kind.runtime not in _KEEPS_STATES:
            raise UsageError(
                f"{kind.name}: this model's layers keep running states, which {kind.runtime}'s hosts"
                " do not carry on",
                hint="leave this variant out",
            )


def _size(kind: VariantKind, layers: int, embedding: int, head: int, shared: bool) -> int:
    """Returns the bytes of a variant with so many weights in its layers, its embedding and its
    head. `shared`: one table is both embedding and head."""
    bytes_per_weight = _BYTES_PER_WEIGHT.get(kind.name, 1.0)
    if kind.form == "static":
        return int((layers + head) * bytes_per_weight + embedding * _HOST_EMBEDDING)
    weights = layers + embedding
    # The .ort format of phones stores the head transposed, so a shared table is stored twice.
    if not shared or kind.name == "mobile":
        weights += head
    return int(weights * bytes_per_weight)


def _seconds(kinds: Sequence[VariantKind], weights: int) -> float:
    """Returns how long a build takes without calibration, about, by the weights that it goes
    over."""
    # Dynamic variants of one opset are made from one graph, each static one has its own.
    graphs = {kind.opset if kind.form == "dynamic" else kind.name for kind in kinds}
    timed = [kind for kind in kinds if kind.form == "dynamic"]
    seconds = READING.of(weights) + COMPARING.of(weights) + RECORDING.of(weights)
    seconds += EXPORTING.of(weights) * len(graphs)
    seconds += MAKING.of(weights) * len(kinds)
    seconds += TIMING_SECONDS * len(timed)
    return round(seconds)
