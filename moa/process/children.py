"""Programs of ours as child processes: they end with their parent in any case."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import IO

_ENDS_WITH_PARENT = """
import os, signal, threading

def end_with_parent():
    while os.read(0, 4096):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from {module} import {function}
raise SystemExit({function}())
"""
"""What a child runs. However its parent ends, the pipe that is the child's standard input closes: then
it ends itself."""
END_SECONDS = 10.0
"""Seconds that a child has to end by itself."""


async def start_child(
    main: str,
    *arguments: str,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> asyncio.subprocess.Process:
    """Start a child process that runs `main`, a `module:function` of ours, with these arguments. It
    ends when this process does, in any case. Ctrl-C in the terminal does not reach it: its parent
    ends it."""
    module, _, function = main.partition(":")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # else a file of the current folder would be imported in place of a package
        "-c",
        _ENDS_WITH_PARENT.format(module=module, function=function),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


async def end_child(process: asyncio.subprocess.Process, seconds: float = END_SECONDS) -> None:
    """Ask a child process to end, kill it if it has not after so many seconds, and wait until it is
    gone."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(seconds):
            await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def without_our_settings() -> dict[str, str]:
    """This process's environment without our own settings, a token among them: for a child that runs
    what came from strangers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MOA_EDGE_")}
