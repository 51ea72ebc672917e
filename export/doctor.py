"""What this machine can export and run."""

from __future__ import annotations

import os
import platform
import shutil
from typing import Any

import onnx
import onnxruntime

from export.atomic_folder import gigabytes
from export.describe import tool_versions
from moa.bundle import OPSETS


def findings() -> dict[str, Any]:
    """Versions, and what they allow here."""
    optimum = _imports_quantizer()
    opset = onnx.defs.onnx_opset_version()
    return {
        **tool_versions(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "free disk": gigabytes(shutil.disk_usage(".").free),
        "execution providers": ", ".join(onnxruntime.get_available_providers()),
        "opsets": f"onnx knows up to {opset}; bundles use {', '.join(map(str, OPSETS))}",
        "int8 recipes": "optimum's ORTQuantizer"
        if optimum
        else "ONNX Runtime's own quantizer (optimum does not import)",
        "export": "ready" if opset >= max(OPSETS) else f"onnx is too old: opset {max(OPSETS)} is needed",
    }


def _imports_quantizer() -> bool:
    try:
        from optimum.onnxruntime import ORTQuantizer
    except ImportError:
        return False
    return ORTQuantizer is not None
