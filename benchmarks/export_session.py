"""One ONNX Runtime session in a process of its own, for runtimes that need their own environment.

Needs numpy and onnxruntime alone: it is run by that environment's Python, by path. Frames on stdin and stdout are a
length and an .npz: inputs by name in, outputs in order out. The first frame out tells which provider ran which share.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnxruntime


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Arrays by name; None at the end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    with np.load(io.BytesIO(stream.read(struct.unpack("<Q", head)[0])), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def write_frame(stream: BinaryIO, arrays: dict[str, Any]) -> None:
    """Arrays by name."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    stream.write(struct.pack("<Q", buffer.tell()) + buffer.getvalue())
    stream.flush()


def open_session(model: str, provider: str, folder: str) -> Any:
    """A session with profiling on, on `provider`."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(folder) / "profile")
    options.log_severity_level = 3
    if provider == "QNNExecutionProvider":  # a plugin: registered, then chosen by device
        import onnxruntime_qnn  # type: ignore[import-not-found]  # only there

        onnxruntime.register_execution_provider_library(provider, onnxruntime_qnn.get_library_path())
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider]
        backend = {"backend_path": onnxruntime_qnn.get_qnn_htp_path()}
        options.add_provider_for_devices(devices, backend)
        return onnxruntime.InferenceSession(model, options)
    settings = [{"device_type": "CPU"}] if provider == "OpenVINOExecutionProvider" else None
    return onnxruntime.InferenceSession(model, options, providers=[provider], provider_options=settings)


def placement(profile: str) -> dict[str, int]:
    """Nodes by provider."""
    events = json.loads(Path(profile).read_text(encoding="utf-8"))
    nodes = {
        event["name"]: event["args"]["provider"]
        for event in events
        if event.get("cat") == "Node" and event.get("args", {}).get("provider")
    }
    return dict(Counter(nodes.values()))


def main() -> None:
    """`export_session.py MODEL PROVIDER`."""
    # The runtimes print on stdout whatever they are told: frames go to a copy of it, prints to stderr.
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(sys.argv[1], sys.argv[2], folder)
        placed = False
        while (feeds := read_frame(stdin)) is not None:
            outputs = session.run(None, feeds)
            if not placed:
                found = placement(session.end_profiling())
                write_frame(stdout, {"placement": np.array(json.dumps(found))})
                placed = True
            write_frame(stdout, {str(i): value for i, value in enumerate(outputs)})


if __name__ == "__main__":
    main()
