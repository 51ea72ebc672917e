"""A verifier on this machine, started and stopped by the client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO

from moa.errors import LinkError, UsageError, how_to_install

_START_SECONDS = 300.0
_PROGRAM = """
import os, signal, threading

def end_with_parent():
    while os.read(0, 4096):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from cloud_verifier.cli import main
main()
"""
"""The verifier's command; it ends with its parent in any case, because their pipe closes."""


@contextlib.asynccontextmanager
async def local_verifier(
    *arguments: str, needs: Sequence[str] = ("torch", "transformers")
) -> AsyncIterator[str]:
    """Run `cloud-verifier serve` with these flags as a child process while the body runs; yields
    its address. `needs`: packages without which it cannot start."""
    missing = [
        name for name in ("cloud_verifier", *needs) if importlib.util.find_spec(name) is None
    ]
    if missing:
        extra = "verifier" if "torch" in needs else "upstream"
        raise UsageError(
            f"a local verifier needs {missing[0]}, which is not installed",
            hint=f"{how_to_install(extra)}, or give the address of a verifier, or chat --offline",
        )
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _PROGRAM,
            "serve",
            "--port",
            "0",
            "--log-level",
            "error",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            yield await _address(process, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(10):
                    await process.communicate()
            except TimeoutError:
                process.kill()
                await process.communicate()


async def _address(process: asyncio.subprocess.Process, errors: IO[bytes]) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            line = (await process.stdout.readline()).decode().strip()
    except TimeoutError:
        raise LinkError(f"the local verifier was not ready within {_START_SECONDS:.0f} s") from None
    if "ws" not in line:
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        raise LinkError(f"the local verifier did not start: {said[-1] if said else 'no message'}")
    return line.split()[-1]
