"""A verifier on this machine, started and stopped by the client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO

from moa import demo
from moa.errors import LinkError, UsageError, how_to_install
from moa.process.children import end_child, start_child
from moa.target.tokenizer_files import refuse_other_tokenizer

_START_SECONDS = 300.0


def check_bundle(bundle: str) -> None:
    """Raise a `UsageError` for a bundle that a verifier on this machine would refuse, which serves the
    embedded target: before either end is loaded."""
    if not bundle:
        return  # the embedded one
    refuse_other_tokenizer(
        bundle,
        demo.paths().target,
        name="the toy target that `--verifier local` serves",
        hint="`cloud-verifier serve --target MODEL` serves the model that it was made for: give its"
        " address; `moa-edge up MODEL --bundle DIR` starts both",
    )


@contextlib.asynccontextmanager
async def local_verifier(
    *arguments: str,
    needs: Sequence[str] = ("torch", "transformers"),
    upstream: str = "",
) -> AsyncIterator[str]:
    """Run `cloud-verifier serve` with these flags as a child process while the body runs; yields
    its address. `needs` are packages without which it cannot start. In front of an `upstream` errors
    speak of that: whoever has an endpoint knows of no verifier."""
    packages = ("cloud_verifier", *needs)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        extra, user, instead = "verifier", "a local verifier", "give the address of a verifier, or "
        if upstream:
            extra, user, instead = "upstream", "--upstream", ""
        raise UsageError(
            f"{user} needs {missing[0]}, which is not installed",
            hint=f"{how_to_install(extra)}, or {instead}chat --offline",
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
            yield await _address(process, errors, upstream)
        finally:
            await end_child(process)


async def _address(process: asyncio.subprocess.Process, errors: IO[bytes], upstream: str) -> str:
    """Wait for the line in which a starting verifier prints its address, and return the address. If
    it ends instead, an error has its last words, from the file `errors`: a `UsageError` where its
    exit code says that the user can correct it. If it takes too long, that is a `LinkError`."""
    assert process.stdout is not None
    what = f"the connection to {upstream}" if upstream else "the local verifier"
    try:
        async with asyncio.timeout(_START_SECONDS):
            line = (await process.stdout.readline()).decode().strip()
            if not line:
                await process.wait()
    except TimeoutError:
        raise LinkError(f"{what} was not ready within {_START_SECONDS:.0f} s") from None
    if "ws" not in line:
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        last_words = said[-1] if said else "no message"
        why = f"{what} did not start"
        if upstream:
            last_words = last_words.removeprefix("cloud-verifier: ").removeprefix("error: ")
            why = f"cannot connect to {upstream}"
        is_correctable = process.returncode == UsageError.exit_code
        raise (UsageError if is_correctable else LinkError)(f"{why}: {last_words}")
    return line.split()[-1]
