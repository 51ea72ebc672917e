"""Estimates of a build: shapes, sizes, and roughly how long it will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from export.atomic_folder import gigabytes
from export.kinds import VariantKind, choose_kinds
from moa.drafters.graph import GraphSizes
from moa.drafters.registry import find
from moa.errors import UsageError
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
# two cores of a small machine
_SECONDS_PER_GRAPH = 3.0
_SECONDS_TO_TIME = 2.5
_WEIGHTS_PER_SECOND = 20e6
_MEMORY_PER_WEIGHT = 12
"""Bytes of memory while a bundle is made, measured on a model of 0.6B weights: the float32 graph,
torch's own copy that it is compared with, and the matrix that is being quantized."""
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
    seconds: float

    @property
    def memory(self) -> int:
        """Bytes of memory that a build takes."""
        weights = self.sizes.layer_weights + self.embedding_weights + self.head_weights
        return _MEMORY_PER_WEIGHT * weights + _PROGRAM

    @property
    def disk(self) -> int:
        """Bytes a build needs: the bundle, and the float32 graph that all variants are made from,
        twice."""
        weights = self.sizes.layer_weights + self.embedding_weights + self.head_weights
        return (
            sum(self.variant_bytes.values()) + 8 * weights + _GRAPH * (2 + len(self.variant_bytes))
        )

    def as_dict(self) -> dict[str, Any]:
        """For programs: every number on one level."""
        numbers = asdict(self) | {"disk_bytes": self.disk, "memory_bytes": self.memory}
        sizes: dict[str, Any] = numbers.pop("sizes")
        del sizes["no_static_form"]
        return sizes | numbers

    def lines(self) -> list[str]:
        """For people."""
        cache = ", ".join(f"{heads} x {width}" for heads, width in self.sizes.cache[:4]) + (
            ", ..." if self.sizes.cache[4:] else ""
        )
        sizes = self.sizes
        return [
            f"{sizes.kind} drafter: hidden size {sizes.hidden_size},"
            f" {len(sizes.cache)} cache layers ({cache})",
            f"vocabulary {self.sizes.vocabulary}, drafts from {self.draft_vocabulary}",
            f"an activation record is {self.sizes.record_width} numbers",
            f"weights: layers {self.sizes.layer_weights:,}, embedding {self.embedding_weights:,},"
            f" head {self.head_weights:,}" + (" (tied)" if self.sizes.tied else ""),
            *(f"{name}: about {gigabytes(size)}" for name, size in self.variant_bytes.items()),
            f"while building: about {gigabytes(self.disk)} of disk and"
            f" {gigabytes(self.memory)} of memory",
            f"time without calibration: about {self.seconds:.0f} s",
        ]


def make_plan(
    target: str, drafter: str, variants: Sequence[str], draft_vocab: int | None
) -> ExportPlan:
    """Read shapes, not weights; refuse what cannot be built."""
    kinds = choose_kinds(variants)
    facts, folder = read_facts(target, identify=False)
    sizes = find(drafter).sizes(facts, folder)
    _refuse_static(kinds, sizes.no_static_form)
    _refuse_other_hosts(kinds, sizes)
    drafted = sizes.vocabulary if draft_vocab is None else draft_vocab
    if not 1 <= drafted <= sizes.vocabulary:
        raise UsageError(
            f"--draft-vocab must be 1..{sizes.vocabulary} (the target's vocabulary), not {drafted}"
        )
    weights = sizes.layer_weights
    embedding = sizes.vocabulary * (sizes.hidden_size + sizes.per_layer_width)
    head = drafted * sizes.hidden_size
    shared = sizes.tied and drafted == sizes.vocabulary
    return ExportPlan(
        sizes=sizes,
        draft_vocabulary=drafted,
        embedding_weights=embedding,
        head_weights=0 if shared else head,
        variant_bytes={kind.name: _size(kind, weights, embedding, head, shared) for kind in kinds},
        seconds=_seconds(kinds, weights + embedding + (0 if shared else head)),
    )


def _refuse_static(kinds: Sequence[VariantKind], why_not: str) -> None:
    static = next((kind.name for kind in kinds if kind.form == "static"), None)
    if static and why_not:
        raise UsageError(
            f"{static} is only for MoA drafters with CA, a body of their own and no borrowed layers: {why_not}",
            hint="leave this variant out",
        )


_KEEPS_STATES = ("onnxruntime", "onnxruntime-openvino")
"""Runtimes of variants that this project's own program for devices drives."""


def _refuse_other_hosts(kinds: Sequence[VariantKind], sizes: GraphSizes) -> None:
    other = next((kind for kind in kinds if kind.runtime not in _KEEPS_STATES), None)
    if other is not None and sizes.running_states:
        raise UsageError(
            f"{other.name}: this model's layers keep running states, which {other.runtime}'s hosts"
            " do not carry on",
            hint="leave this variant out",
        )


def _size(kind: VariantKind, layers: int, embedding: int, head: int, shared: bool) -> int:
    """Bytes of a variant; `shared`: one table is embedding and head."""
    each = _BYTES_PER_WEIGHT.get(kind.name, 1.0)
    if kind.form == "static":
        return int((layers + head) * each + embedding * _HOST_EMBEDDING)
    # The .ort format stores the head transposed, so a shared table is stored twice.
    return int((layers + embedding + (0 if shared and kind.name != "mobile" else head)) * each)


def _seconds(kinds: Sequence[VariantKind], weights: int) -> float:
    graphs = {kind.opset if kind.form == "dynamic" else kind.name for kind in kinds}
    timed = sum(kind.form == "dynamic" for kind in kinds)
    passes = len(kinds) + 1  # over all weights: one for each variant, and one to compare with torch
    return round(
        _SECONDS_PER_GRAPH * len(graphs)
        + _SECONDS_TO_TIME * timed
        + passes * weights / _WEIGHTS_PER_SECOND
    )
