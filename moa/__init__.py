"""moa-edge: the model, and everything that device and server share."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("moa-edge")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

__all__ = ["__version__"]
