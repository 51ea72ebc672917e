"""One ONNX Runtime session in a process of its own, for runtimes that need their own environment.

Needs only numpy and onnxruntime: that environment's Python runs it by path. On stdin and stdout go frames: the
length of a JSON head (8 bytes), the head, the bytes of the arrays it lists. The first frame out names the runtime, the
second also which provider ran how many nodes. `session.mjs` speaks the same for the browser's runtime.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Arrays = dict[str, Any]


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], Arrays] | None:
    """The head and the arrays by name; None at the end."""
    length = stream.read(8)
    if len(length) < 8:
        return None
    head = json.loads(stream.read(struct.unpack("<Q", length)[0]))
    arrays = {}
    for entry in head.pop("arrays"):
        kind = np.dtype(entry["dtype"])
        content = stream.read(kind.itemsize * int(np.prod(entry["shape"], dtype=np.int64)))
        arrays[entry["name"]] = np.frombuffer(content, kind).reshape(entry["shape"])
    return head, arrays


def write_frame(stream: BinaryIO, arrays: Mapping[str, Any], **head: Any) -> None:
    """Arrays by name, and whatever else the head says."""
    entries = [{"name": name, "dtype": str(value.dtype), "shape": value.shape} for name, value in arrays.items()]
    text = json.dumps({"arrays": entries, **head}).encode()
    stream.write(struct.pack("<Q", len(text)) + text)
    for value in arrays.values():
        stream.write(np.ascontiguousarray(value).tobytes())
    stream.flush()


def open_session(model: str, provider: str, folder: str, context: str) -> Any:
    """A session with profiling on, on `provider`; QNN writes its compiled form to `context`, where one is named."""
    import onnxruntime  # type: ignore[import-untyped, unused-ignore]

    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(folder) / "profile")
    options.log_severity_level = 3
    if context:
        for key, value in {"enable": "1", "embed_mode": "1", "file_path": context}.items():
            options.add_session_config_entry(f"ep.context_{key}", value)
    if provider == "QNNExecutionProvider":  # a plugin: registered, then chosen by device
        import onnxruntime_qnn  # type: ignore[import-not-found, unused-ignore]  # only there

        onnxruntime.register_execution_provider_library(provider, onnxruntime_qnn.get_library_path())
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider]
        options.add_provider_for_devices(devices, {"backend_path": onnxruntime_qnn.get_qnn_htp_path()})
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
    """`session.py MODEL PROVIDER [CONTEXT]`."""
    # The runtimes print on stdout: frames go to a copy of it, prints to stderr.
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    found = sorted(f"{d.name} {d.version}" for d in distributions() if d.name.startswith(("onnxruntime", "openvino")))
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(sys.argv[1], sys.argv[2], folder, *(sys.argv[3:] or [""]))
        write_frame(stdout, {}, runtime=", ".join(found))
        head: dict[str, Any] = {}
        while (frame := read_frame(stdin)) is not None:
            outputs = session.run(None, frame[1])
            if not head:
                head = {"placement": placement(session.end_profiling())}
            write_frame(stdout, {str(i): value for i, value in enumerate(outputs)}, **head)


if __name__ == "__main__":
    main()
