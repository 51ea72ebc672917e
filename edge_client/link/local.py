"""A verifier on this machine, started and stopped by the client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO

from moa.errors import LinkError, UsageError, how_to_install
from moa.process.children import end_child, start_child

_START_SECONDS = 300.0


@contextlib.asynccontextmanager
async def local_verifier(
    *arguments: str, needs: Sequence[str] = ("torch", "transformers")
) -> AsyncIterator[str]:
    """Run `cloud-verifier serve` with these flags as a child process while the body runs; yields
    its address. `needs` are packages without which it cannot start."""
    packages = ("cloud_verifier", *needs)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        extra = "verifier" if "torch" in needs else "upstream"
        raise UsageError(
            f"a local verifier needs {missing[0]}, which is not installed",
            hint=f"{how_to_install(extra)}, or give the address of a verifier, or chat --offline",
        )
    with tempfile.TemporaryFile() as errors:
        process = await start_child(
            "cloud_verifier.cli:main",
            "serve",
            "--port",
            "0",
            "--log-level",
            "error",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield await _address(process, errors)
        finally:
            await end_child(process)


async def _address(process: asyncio.subprocess.Process, errors: IO[bytes]) -> str:
    """Wait for the line in which a starting verifier prints its address, and return the address. If
    it ends instead or takes too long, a `LinkError` has its last words, from the file `errors`."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            line = (await process.stdout.readline()).decode().strip()
    except TimeoutError:
        raise LinkError(f"the local verifier was not ready within {_START_SECONDS:.0f} s") from None
    if "ws" not in line:
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        last_words = said[-1] if said else "no message"
        raise LinkError(f"the local verifier did not start: {last_words}")
    return line.split()[-1]
