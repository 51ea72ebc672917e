"""Verifiers for the kill runs: one process loads the model once, and forks a new verifier whenever the last one has
died.

python -m tests.torture.nursery PORT FILE       (FILE: where the process id of the living one is written)
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cloud_verifier import logs
from cloud_verifier.app import Verifier
from cloud_verifier.model import load
from cloud_verifier.settings import Settings


async def _serve(verifier: Verifier) -> None:
    async with verifier.open():
        await asyncio.Event().wait()


def main(argv: Sequence[str]) -> None:
    """Serve for as long as the parent lives, one process after another."""
    port, told = int(argv[0]), Path(argv[1])
    settings = Settings(port=port)
    logs.configure("warning", settings.limits)
    served, parent = load(settings), os.getppid()
    while os.getppid() == parent:
        child = os.fork()
        if not child:
            asyncio.run(_serve(Verifier(served, settings)))
            os._exit(0)
        # A reader never sees half of a number: the file appears whole.
        with tempfile.NamedTemporaryFile("w", dir=told.parent, delete=False) as file:
            file.write(str(child))
        os.replace(file.name, told)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
