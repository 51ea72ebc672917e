"""The variants by name. No torch: the command line checks names before it imports what takes
seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moa.errors import UsageError

OPSET = 23
"""Has RMSNormalization and Attention as operators."""
PORTABLE_OPSET = 20
"""The newest opset that OpenVINO's provider supports."""


@dataclass(frozen=True)
class VariantKind:
    """What a variant is for; `docs/export.md` describes them."""

    name: str
    runtime: str
    form: Literal["dynamic", "static"]
    opset: int


VARIANT_KINDS = {
    kind.name: kind
    for kind in (
        VariantKind("cpu-int4", "onnxruntime", "dynamic", OPSET),
        VariantKind("cpu-int8", "onnxruntime", "dynamic", OPSET),
        VariantKind("cpu-fp32", "onnxruntime", "dynamic", OPSET),
        VariantKind("portable", "onnxruntime-openvino", "dynamic", PORTABLE_OPSET),
        VariantKind("mobile", "onnxruntime-mobile", "dynamic", OPSET),
        VariantKind("web", "onnxruntime-web", "dynamic", OPSET),
        VariantKind("npu-qnn", "onnxruntime-qnn", "static", OPSET),
        VariantKind("npu-openvino", "onnxruntime-openvino", "static", PORTABLE_OPSET),
        VariantKind("coreml", "onnxruntime CoreML", "static", PORTABLE_OPSET),
        VariantKind("nnapi", "onnxruntime NNAPI", "static", PORTABLE_OPSET),
    )
}
DEFAULT = ("cpu-int4", "cpu-int8", "cpu-fp32")


def choose_kinds(names: Sequence[str]) -> list[VariantKind]:
    """The requested kinds, each once, in the given order."""
    if unknown := [name for name in names if name not in VARIANT_KINDS]:
        raise UsageError(
            f"unknown variant {unknown[0]!r}", hint=f"known: {', '.join(VARIANT_KINDS)}"
        )
    return [VARIANT_KINDS[name] for name in dict.fromkeys(names or DEFAULT)]
