"""The process of a verifier."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, gc, weakref
from cloud_verifier import loop
from cloud_verifier.app import Verifier

class Cycle:
    def __init__(self):
        self.me = self

loaded = len(gc.get_objects())

async def main():
    cycle = weakref.ref(Cycle())
    print(loaded, len(gc.get_objects()), gc.get_freeze_count())
    rounds = 0
    while cycle() is not None and rounds < 100_000:
        kept = [[] for _ in range(100)]  # what a round makes
        rounds += 1
        await asyncio.sleep(0)
    print(rounds)

loop.run(main())
"""


def test_cyclic_garbage_goes_soon_for_what_is_loaded_is_no_longer_looked_at() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    loaded, left, frozen, rounds = map(int, ran.stdout.split())
    assert loaded > 50_000
    assert frozen > 50_000
    assert left < 10_000
    assert rounds < 100_000
