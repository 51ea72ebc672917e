"""moa-edge: the model, and everything that device and server share."""

import os
from typing import TYPE_CHECKING

# ONNX Runtime writes a device id and reports to its maker unless this is set when its library is
# loaded. All our packages import this one first, and the user's own value does not count.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

__all__ = ["__version__"]

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    """The version, when it is wanted: reading the metadata takes as long as the rest of a command's
    start."""
    if name != "__version__":
        raise AttributeError(f"module 'moa' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("moa-edge")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"
