"""Processes that are forked off one that has imported the programs and loaded the model: a kill costs no start."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from cloud_verifier import logs
from cloud_verifier.app import Verifier
from cloud_verifier.settings import Settings
from moa.process.listening import Port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.torture.loaded"])
_START_SECONDS = 1800.0  # at low priority a run starts slowly


def redirect(log: Path, typed: str = "") -> None:
    """Give this process other standard streams: what is typed, and a file that output is added to."""
    read, write = os.pipe()
    os.write(write, typed.encode())
    os.close(write)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for end, (standard, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        os.dup2(said if end else read, end)
        setattr(sys, standard, os.fdopen(end, mode, closefd=False))
    os.close(read)
    os.close(said)


def _serve(port: int, log: Path) -> None:
    """A verifier; the body of its process."""
    from tests.torture.loaded import SERVED

    async def serve() -> None:
        async with Verifier(SERVED, settings).open():
            await asyncio.Event().wait()

    redirect(log)
    settings = Settings(port=port)
    logs.configure("warning", settings.limits)
    asyncio.run(serve())


class Mortal:
    """A verifier that is started again whenever it is killed."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self.url, self._log = port, f"ws://127.0.0.1:{port}", log

    async def start(self) -> None:
        """Start one, and wait until it listens."""
        self._process = CONTEXT.Process(target=_serve, args=(self.port, self._log), daemon=True)
        self._process.start()
        async with asyncio.timeout(_START_SECONDS):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL the running one."""
        self._process.kill()
        self._process.join()

    @property
    def said(self) -> str:
        """What they have logged."""
        return self._log.read_text()


@contextlib.asynccontextmanager
async def mortal() -> AsyncIterator[Mortal]:
    """One for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder, Port("127.0.0.1", 0) as port:
        made = Mortal(port.number, Path(folder, "log"))
        await made.start()
        try:
            yield made
        finally:
            made.kill()
