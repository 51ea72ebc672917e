"""What a build will make, before it makes it: shapes, sizes, and roughly how long it will take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from export.place import gigabytes
from export.source import INDEPENDENT
from export.variants import VariantKind, choose_kinds
from moa.config import DrafterConfig
from moa.errors import UsageError
from moa.model.identity import stored_tensors
from moa.model.streaming import read_facts

_BYTES_PER_WEIGHT = {"cpu-int4": 0.5 + 4 / 32, "cpu-fp32": 4.0, "npu-openvino": 4.0, "coreml": 4.0, "nnapi": 4.0}
_HOST_EMBEDDING = 2.0
"""Bytes per weight of the table that a static form leaves to the host."""
_ON_THE_SERVER = ("layer_self_attention.", "Ekv2E.", "final_state.", "confidence_head.")
_SECONDS_PER_GRAPH, _WEIGHTS_PER_SECOND = 15.0, 20e6  # two cores of a small machine


@dataclass(frozen=True)
class Plan:
    """Estimates, made from the headers of files alone."""

    kind: str
    hidden_size: int
    vocabulary: int
    draft_vocabulary: int
    cache: list[tuple[int, int]]
    """Heads and their width, for each layer with a cache."""
    record_width: int
    tied: bool
    layer_weights: int
    embedding_weights: int
    head_weights: int
    variant_bytes: dict[str, int]
    seconds: float

    @property
    def disk(self) -> int:
        """Bytes a build needs: the bundle, and the float32 graph that all variants are made from, twice."""
        weights = self.layer_weights + self.embedding_weights + self.head_weights
        return sum(self.variant_bytes.values()) + 8 * weights

    def lines(self) -> list[str]:
        """For people."""
        cache = ", ".join(f"{heads} x {width}" for heads, width in self.cache[:4]) + (", ..." if self.cache[4:] else "")
        return [
            f"{self.kind} drafter: hidden size {self.hidden_size}, {len(self.cache)} cache layers ({cache})",
            f"vocabulary {self.vocabulary}, drafts from {self.draft_vocabulary}",
            f"an activation record is {self.record_width} numbers",
            f"weights: layers {self.layer_weights:,}, embedding {self.embedding_weights:,},"
            f" head {self.head_weights:,}" + (" (tied)" if self.tied else ""),
            *(f"{name}: about {gigabytes(size)}" for name, size in self.variant_bytes.items()),
            f"room on disk while building: about {gigabytes(self.disk)}",
            f"time without calibration: about {self.seconds:.0f} s",
        ]


def make_plan(target: str, drafter: str, variants: Sequence[str], draft_vocab: int | None) -> Plan:
    """Read shapes, not weights."""
    kinds = choose_kinds(variants)
    facts, folder = read_facts(target)
    if drafter.startswith(INDEPENDENT):
        own, where = read_facts(drafter.removeprefix(INDEPENDENT))
        _refuse_static(kinds, "this one is independent")
        weights = _count(where, lambda name: _layer(name) >= 0)
        cache, records, hidden, tied = (
            [(own.kv_heads, own.head_dim)] * own.layers,
            0,
            own.hidden_size,
            own.tie_embeddings,
        )
        vocabulary = min(facts.vocab_size, own.vocab_size)
    else:
        path = Path(drafter).expanduser()
        config = DrafterConfig.read(path, facts)
        _refuse_static(kinds, f"this one has {config.tli}" if config.tli else "" if config.use_ca else "it has no CA")
        weights = _count(path, lambda name: not name.startswith(_ON_THE_SERVER))
        if config.tli:
            weights += _count(folder, lambda name: _layer(name) >= facts.layers - config.tli)
        cache = [(config.self_attention_num_key_value_heads, config.head_dim)]
        cache += [(facts.kv_heads, facts.head_dim)] * config.tli
        records, hidden, tied = config.record_width if config.use_ca else 0, config.hidden_size, facts.tie_embeddings
        vocabulary = facts.vocab_size
    drafted = vocabulary if draft_vocab is None else draft_vocab
    if not 1 <= drafted <= vocabulary:
        raise UsageError(f"--draft-vocab must be 1..{vocabulary} (the target's vocabulary), not {drafted}")
    embedding, whole_head = vocabulary * hidden, drafted * hidden
    head = 0 if tied and drafted == vocabulary else whole_head
    everything = weights + embedding + head

    def size(kind: VariantKind) -> int:
        bytes_each = _BYTES_PER_WEIGHT.get(kind.name, 1.0)
        if kind.form == "static":
            return int((weights + whole_head) * bytes_each + embedding * _HOST_EMBEDDING)
        # The .ort format stores the head turned, so a tied table twice.
        return int((weights + embedding + (whole_head if kind.name == "mobile" else head)) * bytes_each)

    graphs = {kind.opset if kind.form == "dynamic" else kind.name for kind in kinds}
    return Plan(
        kind="independent" if drafter.startswith(INDEPENDENT) else "moa",
        hidden_size=hidden,
        vocabulary=facts.vocab_size,
        draft_vocabulary=drafted,
        cache=cache,
        record_width=records,
        tied=tied,
        layer_weights=weights,
        embedding_weights=embedding,
        head_weights=head,
        variant_bytes={kind.name: size(kind) for kind in kinds},
        seconds=round(_SECONDS_PER_GRAPH * len(graphs) + len(kinds) * everything / _WEIGHTS_PER_SECOND),
    )


def _refuse_static(kinds: Sequence[VariantKind], why_not: str) -> None:
    static = next((kind.name for kind in kinds if kind.form == "static"), None)
    if static and why_not:
        raise UsageError(
            f"{static} is only for MoA drafters with CA and without borrowed layers: {why_not}",
            hint="leave this variant out",
        )


def _count(folder: Path, wanted: Callable[[str], bool]) -> int:
    return sum(math.prod(tensor.shape) for name, tensor in stored_tensors(folder).items() if wanted(name))


def _layer(name: str) -> int:
    """The number of the decoder layer that a tensor belongs to; -1 for none."""
    _, found, after = name.partition(".layers.")
    return int(after.partition(".")[0]) if found else -1
