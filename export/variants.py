"""How each variant is made and written, and which part of a static one was run or only checked."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import onnxruntime
from onnxruntime.tools.convert_onnx_models_to_ort import (
    OptimizationStyle,
    convert_onnx_models_to_ort,
)

from export.agreement import Continuation, Reference, Replay
from export.forms import BLOCKS, Workshop
from export.kinds import VariantKind
from export.runner import OrtRunner, StepInput, random_steps
from export.static_forms import (
    EMBEDDING,
    Feeds,
    StaticRunner,
    StaticShape,
    export_static,
    partitions,
    quantize_for_htp,
    write_embedding,
)
from export.storage import quiet
from moa.errors import MoaError
from moa.manifest import Agreement

Judge = Callable[[OrtRunner], Agreement | None]
"""Compares a runner with the float32 drafter on held-out text; None without text."""
UNPACKED_MOST = 64 << 20
"""Weights of a web variant that a browser unpacks in its memory, where each takes four bytes;
products of more are in eight bits: half as fast."""
ENOUGH = 0.97
"""Share of the float32 graph's acceptance length that four bits must keep."""
_CALIBRATION_STEPS = 64
"""Steps along all texts, beside the first and the last token of each."""


@dataclass(frozen=True)
class Made:
    """A variant's files, the model first, and their properties."""

    files: list[Path]
    precision: str
    notes: str = ""
    agreement: Agreement | None = None
    checked: Literal["executed", "static"] = "executed"
    checked_with: str = ""
    """Empty: the CPU provider of the ONNX Runtime here."""


def make_dynamic(shop: Workshop, kind: VariantKind, folder: Path, judge: Judge) -> Made:
    """Write a dynamic variant into `folder`, and judge it."""
    folder.mkdir(parents=True)
    made = _written(shop, kind, folder, judge)
    if made.agreement is not None:  # it was judged to choose its form
        return made
    runner = OrtRunner(made.files[0], shop.source.spec)
    return replace(made, agreement=judge(runner))


def _written(shop: Workshop, kind: VariantKind, folder: Path, judge: Judge) -> Made:
    """Write a dynamic variant in the form of its kind: precision, and how its files are stored."""
    path = folder / "model.onnx"
    if kind.name == "cpu-fp32":
        return Made(shop.float_graph(kind.opset).save(path), "fp32")
    if kind.name == "cpu-int4":
        return _four_bits(shop, kind, path, judge)
    if kind.name == "web" and shop.parameters <= UNPACKED_MOST:
        graph = shop.unpacked_graph(kind.opset)
        return Made(graph.save_whole(path), "int8", "weights become float32 when they are loaded")
    graph, maker = shop.int8_graph(kind.opset)
    if kind.name == "web":
        return Made(graph.save_whole(path), "int8", f"layers by {maker}")
    if kind.name == "mobile":
        graph.save_whole(path)
        return Made(_to_ort(path), "int8", f"layers by {maker}; no phone ran it when it was built")
    return Made(graph.save(path), "int8", f"layers by {maker}")


def _four_bits(shop: Workshop, kind: VariantKind, path: Path, judge: Judge) -> Made:
    """Write the smallest graph in four bits that keeps enough of the float32 drafter's acceptance,
    or the most accurate if none does; without text to compare on, the smallest of all."""
    made: Made | None = None
    tried: list[str] = []
    for blocks in BLOCKS:
        candidate = shop.block_graph(kind.opset, blocks).save(path)
        agreement = judge(OrtRunner(path, shop.source.spec))
        if agreement is None:
            return Made(candidate, "int4", f"{blocks}; not judged on text")
        tried.append(f"{blocks}: {agreement.acceptance_ratio:.3f}")
        made = Made(candidate, "int4", f"acceptance of fp32 kept by {'; '.join(tried)}", agreement)
        if agreement.acceptance_ratio >= ENOUGH:
            break
    assert made is not None
    return made


def _to_ort(path: Path) -> list[Path]:
    """Convert a model to the .ort format of phones. Returns it with the list of operators that it
    needs, from which a smaller build of the runtime can be made."""
    with quiet():
        convert_onnx_models_to_ort(path, optimization_styles=[OptimizationStyle.Fixed])
    path.unlink()
    files = [path.with_suffix(".ort"), path.with_name("required_operators.config")]
    operator_lists = list(path.parent.glob("*required_operators*.config"))
    if not operator_lists or not files[0].is_file():
        raise MoaError("ONNX Runtime did not convert the model to its .ort format")
    operator_lists[0].rename(files[1])
    return files


def make_static(
    shop: Workshop, kind: VariantKind, folder: Path, shape: StaticShape, reference: Reference | None
) -> Made:
    """Write a variant of fixed sizes, for an NPU, and run it on the CPU. Where ONNX Runtime has a
    checker for the variant's own runtime, that is run, too."""
    folder.mkdir(parents=True)
    model = folder / "model.onnx"
    is_for_htp = kind.name == "npu-qnn"
    export_static(shop, shape, model, opset=kind.opset, native_norm=is_for_htp)
    files = [model, write_embedding(shop, folder)]
    notes = [
        f"tokens {shape.tokens}, past {shape.past}, records {shape.records}; {EMBEDDING} is the host's embedding"
    ]
    if is_for_htp:
        traces = reference.traces if reference else ()
        quantize_for_htp(model, calibration_feeds(shop, StaticRunner(shop, model, shape), traces))
        if reference:
            notes.append("ranges from the prompts it is judged on")
        else:
            notes.append("ranges from random steps: judge it before use")
    agreement = reference.judge(StaticRunner(shop, model, shape)) if reference else None
    made = Made(
        files=files,
        precision="a16w8" if is_for_htp else "fp32",
        notes="; ".join(notes),
        agreement=agreement,
        checked_with=f"{this_runtime()}, not with {kind.runtime}",
    )
    if kind.name in ("coreml", "nnapi"):
        return _checked_by_rules(made, "CoreML" if kind.name == "coreml" else "NNAPI")
    return made


def _checked_by_rules(made: Made, runtime: Literal["CoreML", "NNAPI"]) -> Made:
    """Returns what was made with the result of ONNX Runtime's checker for a runtime that is not
    installed here; raises if that would not take the whole graph."""
    return replace(
        made,
        notes=f"{made.notes}; its arithmetic ran with {made.checked_with}",
        checked="static",
        checked_with=partitions(made.files[0], runtime),
    )


def calibration_feeds(
    shop: Workshop, runner: StaticRunner, traces: Sequence[Continuation]
) -> list[Feeds]:
    """Returns inputs to calibrate a quantizer with: steps along real texts, or random ones. Some
    have no past and no records."""
    tokens = runner.shape.tokens
    steps: list[StepInput] = []
    if traces:
        steps += _steps_along(runner, traces)
    else:
        sizes = ((tokens, tokens, 40, 30), (1, 1, 0, 0), (tokens, tokens, 0, 0), (1, 1, 40, 0))
        steps += random_steps(shop.source.spec, shop.source.vocabulary, sizes=sizes * 3)
    return [runner.feeds(step, slice(0, len(step.ids)), step.past) for step in steps]


def _steps_along(runner: StaticRunner, traces: Sequence[Continuation]) -> Iterator[StepInput]:
    """Yield steps at regular distances along the answers of these texts, and at the first and the
    last token of each text without records."""
    tokens = runner.shape.tokens
    answer_tokens = sum(len(trace.ids) - trace.prompt for trace in traces)
    distance = max(1, answer_tokens // _CALIBRATION_STEPS)
    for trace in traces:
        replay = Replay(runner, trace)
        length = len(trace.ids)
        yield replay.along(0, min(tokens, length), held=0)
        yield replay.along(length - 1, length, held=0)
        for start in range(trace.prompt, length - 1, distance):
            yield replay.along(start, min(start + tokens, length), held=start)


def this_runtime() -> str:
    """The runtime on which a dynamic form is run at build time."""
    return f"onnxruntime {onnxruntime.__version__}, CPUExecutionProvider, {platform.system()} {platform.machine()}"
