"""A program may open clients in several threads at once. msgspec, before 0.23 at least, ends the process with a
segmentation fault where two threads make a decoder of one type at the same time: so every decoder is made on import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("moa", "export", "edge_client", "cloud_verifier")
OPEN = """
import sys, threading
sys.setswitchinterval(1e-6)
from moa import demo
from moa.bundle import Bundle

def run(go, found):
    go.wait()
    found.append(Bundle.open(demo.paths().bundle).manifest.files)

go, found = threading.Barrier(8), []
threads = [threading.Thread(target=run, args=(go, found)) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8
"""


def test_bundles_are_opened_by_many_threads_at_once() -> None:
    for _ in range(6):  # without care one in three is killed by a signal
        subprocess.run([sys.executable, "-c", OPEN], check=True, timeout=60, cwd=ROOT)


def test_decoders_are_made_on_import() -> None:
    late = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                late += [
                    f"{path.relative_to(ROOT)}:{call.lineno}"
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _makes_one(call)
                ]
    assert late == []


def _makes_one(call: ast.Call) -> bool:
    """Of a type of ours: builtin ones need nothing."""
    typed = any(word.arg == "type" and isinstance(word.value, ast.Name) for word in call.keywords)
    name = ast.unparse(call.func)
    return name.endswith(".Decoder") or (name.startswith("msgspec.") and name.endswith(".decode") and typed)
