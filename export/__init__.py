"""From a trained drafter to a quantized, checked bundle that the device runs."""

import moa  # noqa: F401  turns ONNX Runtime's telemetry off before a module here loads the library
