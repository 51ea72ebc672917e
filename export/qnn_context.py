"""QNN's compiled context of `npu-qnn`, which a device would otherwise compile at its first start; needs
`onnxruntime-qnn`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from export.static_runner import Feeds
from moa.errors import MoaError, UsageError

CONTEXT = "context.onnx"
_PROVIDER = "QNNExecutionProvider"


def require_qnn() -> Any:
    """The plugin's module, or an error that says how to install it."""
    try:
        import onnxruntime_qnn  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UsageError(
            "--qnn-context needs the package onnxruntime-qnn", hint="install it beside this ONNX Runtime"
        ) from None
    return onnxruntime_qnn


def write_context(model: Path, feeds: list[Feeds], soc: int) -> tuple[Path, str]:
    """Compile `model` for a Qualcomm SoC (0: any) and run both on the emulator; returns the file and the comparison."""
    path = model.with_name(CONTEXT)
    path.unlink(missing_ok=True)
    plain = _session(model, soc, context=path)
    if not path.is_file():
        raise MoaError(f"QNN did not compile the graph for SoC {soc}", hint="its output is above")
    compiled = _session(path, soc)
    for step in feeds:
        for wanted, found in zip(plain.run(None, step), compiled.run(None, step), strict=True):
            if not np.array_equal(wanted, found):
                raise MoaError(f"QNN's compiled form answers otherwise than its graph (SoC {soc})")
    chip = f"SoC {soc}" if soc else "no certain SoC"
    return path, (
        f"{CONTEXT} compiled for {chip} by onnxruntime-qnn {version('onnxruntime-qnn')};"
        f" on its HTP emulation equal to the graph in {len(feeds)} steps, not run on a device"
    )


def _session(model: Path, soc: int, *, context: Path | None = None) -> Any:
    plugin = require_qnn()
    if not _devices():
        onnxruntime.register_execution_provider_library(_PROVIDER, plugin.get_library_path())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if context:
        for key, value in {"enable": "1", "embed_mode": "1", "file_path": str(context)}.items():
            options.add_session_config_entry(f"ep.context_{key}", value)
    chip = {"soc_model": str(soc)} if soc else {}
    options.add_provider_for_devices(_devices(), {"backend_path": plugin.get_qnn_htp_path(), **chip})
    return onnxruntime.InferenceSession(model, options)


def _devices() -> list[Any]:
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == _PROVIDER]
