"""moa-edge: the model, and everything that device and server share."""

import os
from importlib.metadata import PackageNotFoundError, version

# ONNX Runtime writes a device id and reports to its maker unless this is set when its library is loaded. All our
# packages import this one first, and the user's own value does not count.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

try:
    __version__ = version("moa-edge")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

__all__ = ["__version__"]
