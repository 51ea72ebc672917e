"""Estimates of a build: shapes, sizes, and roughly how long it will take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig

from export.atomic_folder import gigabytes
from export.kinds import VariantKind, choose_kinds
from export.source import INDEPENDENT
from moa.config import DrafterConfig, TargetFacts
from moa.errors import UsageError
from moa.model.families import facts_of
from moa.model.identity import tensor_shapes
from moa.model.loading import read_facts
from moa.model.state_drafter import StateDrafterConfig, is_states

_BYTES_PER_WEIGHT = {
    "cpu-int4": 0.5 + 4 / 32,
    "cpu-fp32": 4.0,
    "npu-openvino": 4.0,
    "coreml": 4.0,
    "nnapi": 4.0,
}
_HOST_EMBEDDING = 2.0
"""Bytes per weight of the embedding table that a static form leaves to the host."""
_NO_LAYER = ("layer_self_attention.", "Ekv2E.", "final_state.", "body.embedding.", "body.head.")
"""Weights that stay on the server, or are counted as embedding and head."""
# two cores of a small machine
_SECONDS_PER_GRAPH = 3.0
_SECONDS_TO_TIME = 2.5
_WEIGHTS_PER_SECOND = 20e6
_GRAPH = 2**20
"""Bytes of a variant besides its weights, at most."""


@dataclass(frozen=True)
class ExportPlan:
    """What the headers of files say about a drafter beside its target, and estimates from them."""

    kind: str
    hidden_size: int
    vocabulary: int
    """Tokens that both know."""
    cache: list[tuple[int, int]]
    """Heads and their width, for each layer with a cache."""
    record_width: int
    tied: bool
    layer_weights: int
    draft_vocabulary: int
    embedding_weights: int
    head_weights: int
    variant_bytes: dict[str, int]
    seconds: float

    @property
    def disk(self) -> int:
        """Bytes a build needs: the bundle, and the float32 graph that all variants are made from,
        twice."""
        weights = self.layer_weights + self.embedding_weights + self.head_weights
        return (
            sum(self.variant_bytes.values()) + 8 * weights + _GRAPH * (2 + len(self.variant_bytes))
        )

    def lines(self) -> list[str]:
        """For people."""
        cache = ", ".join(f"{heads} x {width}" for heads, width in self.cache[:4]) + (
            ", ..." if self.cache[4:] else ""
        )
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


def make_plan(
    target: str, drafter: str, variants: Sequence[str], draft_vocab: int | None
) -> ExportPlan:
    """Read shapes, not weights; refuse what cannot be built."""
    kinds = choose_kinds(variants)
    facts, folder = read_facts(target)
    if drafter.startswith(INDEPENDENT):
        body, own = read_facts(drafter.removeprefix(INDEPENDENT))
        config = DrafterConfig.for_body(facts, body, {}, use_ca=False)
        weights = _count(own, lambda name: _layer(name) >= 0)
        _refuse_static(kinds, "this one is independent")
    elif is_states(own := Path(drafter).expanduser()):
        return _states_plan(own, facts, kinds, draft_vocab)
    else:
        config = DrafterConfig.read(own, facts)
        body = _body(config, facts)
        weights = _count(own, lambda name: not name.startswith(_NO_LAYER))
        if config.tli:
            weights += _count(folder, lambda name: _layer(name) >= facts.layers - config.tli)
        _refuse_static(kinds, _no_static(config))
    cache = [
        *[(body.kv_heads, body.head_dim)] * config.layers,
        *[(facts.kv_heads, facts.head_dim)] * config.tli,
    ]
    kind = "moa" if config.use_ca else "independent"
    vocabulary = min(facts.vocab_size, body.vocab_size)
    tied = body.tie_embeddings
    width = config.hidden_size
    record = config.record_width
    return _plan(
        kind,
        kinds,
        weights,
        vocabulary,
        draft_vocab,
        tied=tied,
        width=width,
        cache=cache,
        record=record,
    )


def _states_plan(
    own: Path, facts: TargetFacts, kinds: Sequence[VariantKind], draft_vocab: int | None
) -> ExportPlan:
    _refuse_static(kinds, "this one reads states")
    config = StateDrafterConfig.read(own, facts)
    weights = _count(own, lambda name: not name.startswith(("fuse.", "tap_norms.")))
    record = sum(2 * heads * width for heads, width in config.cache)
    return _plan(
        "states",
        kinds,
        weights,
        facts.vocab_size,
        draft_vocab,
        tied=facts.tie_embeddings,
        width=config.hidden_size,
        cache=list(config.cache),
        record=record,
    )


def _plan(
    kind: str,
    kinds: Sequence[VariantKind],
    weights: int,
    vocabulary: int,
    draft_vocab: int | None,
    *,
    tied: bool,
    width: int,
    cache: list[tuple[int, int]],
    record: int,
) -> ExportPlan:
    drafted = vocabulary if draft_vocab is None else draft_vocab
    if not 1 <= drafted <= vocabulary:
        raise UsageError(
            f"--draft-vocab must be 1..{vocabulary} (the target's vocabulary), not {drafted}"
        )
    embedding = vocabulary * width
    head = drafted * width
    shared = tied and drafted == vocabulary
    return ExportPlan(
        kind=kind,
        hidden_size=width,
        vocabulary=vocabulary,
        cache=cache,
        record_width=record,
        tied=tied,
        layer_weights=weights,
        draft_vocabulary=drafted,
        embedding_weights=embedding,
        head_weights=0 if shared else head,
        variant_bytes={kind.name: _size(kind, weights, embedding, head, shared) for kind in kinds},
        seconds=_seconds(kinds, weights + embedding + (0 if shared else head)),
    )


def _body(config: DrafterConfig, facts: TargetFacts) -> TargetFacts:
    """The facts of a drafter's body: a model of its own, or layers between the target's embedding
    and head."""
    if config.body is not None:
        return facts_of(AutoConfig.for_model(**config.body), None)
    return replace(
        facts, kv_heads=config.self_attention_num_key_value_heads, head_dim=config.head_dim
    )


def _no_static(config: DrafterConfig) -> str:
    if config.tli:
        return f"this one has {config.tli}"
    if not config.use_ca:
        return "it has no CA"
    return "" if config.body is None else "its body is a model of another family"


def _refuse_static(kinds: Sequence[VariantKind], why_not: str) -> None:
    static = next((kind.name for kind in kinds if kind.form == "static"), None)
    if static and why_not:
        raise UsageError(
            f"{static} is only for MoA drafters with CA, a body of their own and no borrowed layers: {why_not}",
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


def _count(folder: Path, wanted: Callable[[str], bool]) -> int:
    return sum(math.prod(shape) for name, shape in tensor_shapes(folder).items() if wanted(name))


def _layer(name: str) -> int:
    """The number of the decoder layer that a tensor belongs to; -1 for none."""
    _, found, after = name.partition(".layers.")
    return int(after.partition(".")[0]) if found else -1
