"""Which packages a program will miss, found out without an import: all of them at once, with one
command that installs them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from moa.errors import UsageError, how_to_install

LLAMA_CPP = "llama.cpp"
"""How the library for GGUF files is named to the user: several packages have it."""
PACKAGES = {
    "verifier": (
        "huggingface_hub",
        "prometheus_client",
        "safetensors",
        "torch",
        "transformers",
    ),
    "serve": ("prometheus_client", "starlette", "uvicorn"),
    "export": ("onnx", "onnxscript", "torch", "transformers"),
    "gguf": (LLAMA_CPP,),
}
"""What each extra installs that a program cannot do without."""


def check_installed(extras: Iterable[str]) -> None:
    """Raise a `UsageError` if a package of these extras is missing."""
    missing: dict[str, None] = {}
    needed: list[str] = []
    for extra in extras:
        lacks = [name for name in PACKAGES[extra] if not _is_there(name)]
        if lacks:
            needed.append(extra)
            missing |= dict.fromkeys(lacks)
    if not missing:
        return
    *others, last = missing
    names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    raise UsageError(f"{names} not installed", hint=how_to_install(",".join(needed)))


def _is_there(name: str) -> bool:
    if name != LLAMA_CPP:
        return find_spec(name) is not None
    from moa.llama import library

    try:
        library.find()
    except UsageError:
        return False
    return True
