"""Compares the float32 graph with torch, over random caches, trees and records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from export.body import BodySpec
from export.runner import OrtRunner, StepInput, TorchRunner
from moa.errors import MoaError
from moa.tree import ancestors

TOLERANCE = 1e-4
"""Of the largest number of an output, where that is above one: float32 keeps so many digits, not so many decimals."""
# (tokens, queries, past, records): no past, no records, one of each, sizes the trace did not see
_SIZES = (
    (1, 1, 0, 0),
    (1, 1, 5, 0),
    (1, 1, 64, 100),
    (6, 6, 0, 1),
    (8, 8, 33, 17),
    (16, 1, 0, 9),
    (5, 3, 7, 4),
    (40, 12, 3, 1),
)


def random_steps(
    spec: BodySpec, vocabulary: int, *, seed: int = 0, sizes: tuple[tuple[int, int, int, int], ...] = _SIZES
) -> Iterator[StepInput]:
    """Steps of random trees over random caches and records."""
    rng = np.random.default_rng(seed)

    def rows(heads: int, count: int, width: int) -> NDArray[np.float32]:
        return rng.standard_normal((heads, count, width), np.float32)

    for tokens, queries, past, records in sizes:
        parents = [int(rng.integers(-1, node)) if node else -1 for node in range(tokens)]
        held = spec.records if records else None
        yield StepInput(
            ids=rng.integers(0, vocabulary, tokens),
            queries=np.sort(rng.choice(tokens, queries, replace=False)),
            positions=past + rng.integers(0, 4, tokens).cumsum(),
            mask=np.concatenate([rng.random((tokens, past)) < 0.8, ancestors(np.array([parents]))[0]], axis=1),
            past=[rows(layer.kv_heads, past, layer.head_dim) for layer in spec.cache for _ in "kv"],
            record_k=rows(held.kv_heads, records, held.head_dim) if held else None,
            record_v=rows(held.kv_heads, records, held.head_dim) if held else None,
        )


def _difference(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))


def parity(reference: TorchRunner, model: Path, vocabulary: int, draft_to_target: NDArray[np.int64] | None) -> float:
    """Largest difference of a logit or a new cache row, as `TOLERANCE` counts it; raises above that."""
    beside = model.with_name("parity.onnx")
    proto = onnx.load(model, load_external_data=False)
    proto.graph.output.append(onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, None))
    onnx.save(proto, beside)
    try:
        runner = OrtRunner(beside, reference.spec, extra_outputs=("logits",))
        worst = 0.0
        for step in random_steps(reference.spec, vocabulary):
            wanted, rest = reference.logits(step)
            *_, logits = found = runner.run(step)
            chosen = wanted.numpy() if draft_to_target is None else wanted.numpy()[:, draft_to_target]
            pairs = [(logits[0], chosen), *((a[0], np.asarray(b)) for a, b in zip(found[2:-1], rest, strict=True))]
            worst = max(worst, *(_difference(a, b) for a, b in pairs if b.size))
    finally:
        beside.unlink()
    if not worst <= TOLERANCE:
        raise MoaError(f"the exported graph differs from torch by {worst:.2e}, more than {TOLERANCE:.0e}")
    return worst
