"""The process of a verifier."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from cloud_verifier.cli import run_loop

async def main():
    print(gc.get_freeze_count(), len(gc.get_objects()))

print(len(gc.get_objects()))
run_loop(main())
"""


def test_the_garbage_collector_looks_no_longer_at_what_is_loaded() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    loaded, left_out, left = map(int, ran.stdout.split())
    assert loaded > 5_000
    assert left_out > 0.9 * loaded
    assert left < 0.1 * loaded
