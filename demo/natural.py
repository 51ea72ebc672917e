"""Natural text: code and technical English of the standard library and of installed packages, split
by package.

The packages are those that `constraints.txt` pins, so that everybody with that environment has the
same text.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from importlib import metadata, util
from itertools import chain, zip_longest
from pathlib import Path
from typing import Literal

from moa.errors import UsageError

Split = Literal["train", "heldout"]

STDLIB = "stdlib"
TRAINED = (
    STDLIB, "sympy", "torch", "transformers", "numpy", "matplotlib", "fontTools", "mpmath", "PIL", "mypy", "setuptools",
    "yaml", "urllib3", "jinja2", "hypothesis", "_pytest", "huggingface_hub", "onnxscript", "coverage",
    "fsspec",
    "pygments", "dateutil", "charset_normalizer", "pyparsing", "grimp", "importlinter", "contourpy", "onnx_ir",
    "kiwisolver",
)  # fmt: skip
HELD_OUT = (
    "networkx", "click", "rich", "requests", "websockets", "prometheus_client", "sortedcontainers", "markdown_it",
    "packaging", "filelock", "psutil", "tqdm",
)  # fmt: skip
"""No target and no drafter of the demo was trained on these."""

# Skip tests, copied packages and generated tables, which are not typical Python, and build data,
# which names the machine.
_SKIPPED_FOLDERS = frozenset({
    "__pycache__", "test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3",
    "pydoc_data", "encodings", "turtledemo", "ensurepip", "_vendor", "_vendored", "vendor", "extern", "typeshed",
    "lexers",
})  # fmt: skip
_LARGEST_FILE = 150_000


def split_of(key: str) -> Split:
    """The split that a prompt or path belongs to: one in sixteen is held out, by a stable hash."""
    return "heldout" if blake2b(key.encode(), digest_size=8).digest()[-1] % 16 == 0 else "train"


def _root(package: str) -> Path:
    if package == STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    found = util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            f"the package {package} is not installed", hint="install what constraints.txt pins"
        )
    return Path(found.submodule_search_locations[0])


def files(package: str, split: Split | None = None) -> Iterator[str]:
    """A package's source files worth learning from, in a fixed shuffled order; `split` by path, or
    all of them."""
    root = _root(package)
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        skipped = _SKIPPED_FOLDERS.intersection(inside.parts) or path.name.startswith(
            "_sysconfigdata"
        )
        if not skipped and split in (None, split_of(inside.as_posix())):
            found.append(path)
    random.Random(0).shuffle(found)
    for path in found:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if 0 < len(text) <= _LARGEST_FILE:
            yield text


def code(split: Split) -> Iterator[str]:
    """Source files, from all packages in turn; every second one is from the standard library."""
    if split == "heldout":
        return _in_turn(files(package) for package in HELD_OUT)
    # Held-out files of the standard library are benchmarks of their own.
    library = files(STDLIB, "train")
    others = _in_turn(files(package) for package in TRAINED if package != STDLIB)
    return _in_turn([library, others])


def english(split: Split) -> Iterator[str]:
    """Docstrings and descriptions that read as prose, one of every package in turn."""
    return _in_turn(_prose(package) for package in (HELD_OUT if split == "heldout" else TRAINED))


def _in_turn(streams: Iterable[Iterator[str]]) -> Iterator[str]:
    return (text for turn in zip_longest(*streams) for text in turn if text is not None)


def _prose(package: str) -> Iterator[str]:
    """Longer than a few lines, and mostly letters: no tables, no signatures, no doctests."""
    trees = (_parsed(text) for text in files(package, "train" if package == STDLIB else None))
    docs = (text for tree in trees if tree for text in _docstrings(tree))
    seen: set[str] = set()
    for text in chain(_description(package), docs):
        letters = sum(char.isalpha() or char in " \n,." for char in text)
        if len(text) >= 240 and letters >= 0.9 * len(text) and text not in seen:
            seen.add(text)
            yield text


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield inspect.cleandoc(
                    re.split(r"^\s*>>>", text, maxsplit=1, flags=re.MULTILINE)[0]
                ).strip()


def _description(package: str) -> Iterator[str]:
    """The paragraphs of a package's description."""
    try:
        text = metadata.distribution(package).read_text("METADATA") or ""
    except metadata.PackageNotFoundError:
        return
    _, _, body = text.partition("\n\n")  # after the headers
    yield from (paragraph.strip() for paragraph in re.split(r"\n\s*\n", body))


def functions(
    texts: Iterable[str], lines: int = 8, shortest: int = 14, longest: int = 40
) -> Iterator[tuple[str, str]]:
    """Functions of the files to be continued: their first lines, and the rest."""
    for text in texts:
        rows = text.splitlines(keepends=True)
        for node in ast.walk(_parsed(text) or ast.Module([], [])):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                function = rows[node.lineno - 1 : node.end_lineno]
                if shortest <= len(function) <= longest:
                    yield "".join(function[:lines]), "".join(function[lines:])


def passages(
    texts: Iterable[str], opening: int = 160, longest: int = 800
) -> Iterator[tuple[str, str]]:
    """Prose to be continued: its opening, up to a word's end, and the rest."""
    for text in texts:
        cut = text.find(" ", opening)
        if 0 < cut < len(text) - opening // 2:
            yield text[:cut], text[cut:longest]
