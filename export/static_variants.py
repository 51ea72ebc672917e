"""How each static variant is made, and which part of it was run or only checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export.agreement import Replay
from export.continuations import Continuation
from export.describe import this_runtime
from export.forms import Workshop
from export.kinds import VariantKind
from export.parity import random_steps
from export.reference import Reference
from export.runner import StepInput
from export.static_forms import EMBEDDING, StaticShape, export_static, partitions, quantize_for_htp, write_embedding
from export.static_runner import Feeds, StaticRunner, session_of
from export.variants import Made

_CALIBRATION_STEPS = 64


def make_static(
    shop: Workshop, kind: VariantKind, folder: Path, shape: StaticShape, reference: Reference | None
) -> Made:
    """Write a static variant and run it on the CPU; for runtimes that have a usability checker, that is run too."""
    folder.mkdir(parents=True)
    model = folder / "model.onnx"
    htp = kind.name == "npu-qnn"
    export_static(shop, shape, model, opset=kind.opset, native_norm=htp)
    files = [model, write_embedding(shop, folder)]
    notes = [f"tokens {shape.tokens}, past {shape.past}, records {shape.records}; {EMBEDDING} is the host's embedding"]
    if htp:
        plain = static_runner(shop, model, shape)
        feeds = calibration_feeds(shop, plain, reference.traces if reference else ())
        quantize_for_htp(model, feeds)
        learned = "the prompts it is judged on" if reference else "random steps: judge it before use"
        notes.append(f"ranges from {learned}")
    here = f"{this_runtime()}, not with {kind.runtime}"
    seen = None
    if kind.name in ("coreml", "nnapi"):
        seen = partitions(model, "CoreML" if kind.name == "coreml" else "NNAPI")
        notes.append(f"its arithmetic ran with {here}")
    agreement = reference.judge(static_runner(shop, model, shape)) if reference else None
    precision = "a16w8" if htp else "fp32"
    return Made(files, precision, "; ".join(notes), agreement, "static" if seen else "executed", seen or here)


def static_runner(shop: Workshop, model: Path, shape: StaticShape) -> StaticRunner:
    """The form as a `Runner`, on the CPU."""
    return StaticRunner(
        session_of(model),
        np.load(model.parent / EMBEDDING, mmap_mode="r"),
        shop.source.spec,
        shape,
        rope_theta=shop.source.rope_theta,
        top_k=shop.top_k,
        draft_to_target=shop.draft_to_target,
    )


def calibration_feeds(shop: Workshop, runner: StaticRunner, traces: Sequence[Continuation]) -> list[Feeds]:
    """Calibration inputs for the quantizer: steps along real texts, or random ones, also without past or records."""
    width = runner.shape.tokens
    if not traces:
        sizes = ((width, width, 40, 30), (1, 1, 0, 0), (width, width, 0, 0), (1, 1, 40, 0)) * 3
        steps = list(random_steps(shop.source.spec, shop.source.vocabulary, sizes=sizes))
        return [runner.feeds(step, slice(0, len(step.ids)), step.past) for step in steps]
    chosen: list[StepInput] = []
    every = max(1, sum(len(trace.ids) - trace.prompt for trace in traces) // _CALIBRATION_STEPS)
    for trace in traces:
        replay, length = Replay(runner, trace), len(trace.ids)
        chosen += [replay.along(0, min(width, length), held=0), replay.along(length - 1, length, held=0)]
        for at in range(trace.prompt, length - 1, every):
            chosen.append(replay.along(at, min(at + width, length), held=at))
    return [runner.feeds(step, slice(0, len(step.ids)), step.past) for step in chosen]
