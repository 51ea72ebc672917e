"""How each dynamic variant is made and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort

from export.forms import BLOCKS, Blocks, Workshop
from export.kinds import VariantKind
from export.quiet import quiet
from export.runner import OrtRunner
from moa.errors import MoaError
from moa.manifest import Agreement

Judge = Callable[[OrtRunner], Agreement | None]
"""Compares a runner with the float32 drafter on held-out text; None without text."""


UNPACKED_MOST = 64 << 20
"""Weights of a web variant that a browser unpacks in its memory, where each takes four bytes; products of
more are in eight bits: half as fast."""
ENOUGH = 0.97
"""Share of the float32 graph's acceptance length that four bits must keep."""


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
    """Write a dynamic variant into `folder`."""
    folder.mkdir(parents=True)
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
    """The smallest graph that keeps enough acceptance; without text to compare on, the smallest."""
    made: Made | None = None
    tried: list[str] = []
    for blocks in BLOCKS:
        candidate, agreement = _judged(shop, kind, path, blocks, judge)
        if agreement is None:
            return Made(candidate, "int4", f"{blocks}; not judged on text")
        tried.append(f"{blocks}: {agreement.acceptance_ratio:.3f}")
        made = Made(candidate, "int4", f"acceptance of fp32 kept by {'; '.join(tried)}", agreement)
        if agreement.acceptance_ratio >= ENOUGH:
            break
    assert made is not None
    return made


def _judged(
    shop: Workshop, kind: VariantKind, path: Path, blocks: Blocks, judge: Judge
) -> tuple[list[Path], Agreement | None]:
    files = shop.block_graph(kind.opset, blocks).save(path)
    return files, judge(OrtRunner(path, shop.source.spec))


def _to_ort(path: Path) -> list[Path]:
    """Convert to the .ort format; the list of operators that it needs makes a reduced build of the runtime possible."""
    with quiet():
        convert_onnx_models_to_ort(path, optimization_styles=[OptimizationStyle.Fixed])
    path.unlink()
    files = [path.with_suffix(".ort"), path.with_name("required_operators.config")]
    found = next(iter(path.parent.glob("*required_operators*.config")), None)
    if found is None or not files[0].is_file():
        raise MoaError("ONNX Runtime did not convert the model to its .ort format")
    found.rename(files[1])
    return files
