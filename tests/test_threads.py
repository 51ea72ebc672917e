"""A program may open clients in several threads at once. msgspec, before 0.23 at least, ends the
process with a segmentation fault where two threads make a decoder of one type at the same time: so
every decoder is made on import."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("moa", "export", "edge_client", "cloud_verifier")


def test_decoders_are_made_on_import() -> None:
    late = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
                late += [
                    f"{path.relative_to(ROOT)}:{call.lineno}" for call in calls if _makes_one(call)
                ]
    assert late == []


def _makes_one(call: ast.Call) -> bool:
    """Of a type of ours: builtin ones need nothing."""
    typed = any(word.arg == "type" and isinstance(word.value, ast.Name) for word in call.keywords)
    name = ast.unparse(call.func)
    return name.endswith(".Decoder") or (
        name.startswith("msgspec.") and name.endswith(".decode") and typed
    )
