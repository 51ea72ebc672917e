"""Real verifiers of the embedded pair in processes of their own: one as users start it, and one
that is killed.

What is killed is forked off a process that has imported the programs and loaded the model: a kill
costs no start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from cloud_verifier import logs
from cloud_verifier.app import Verifier
from cloud_verifier.serving.auth import OPERATOR, new_token, token_line
from cloud_verifier.settings import Settings
from testing.metrics_page import Page, look
from testing.ports import reserved_port
from testing.verifier import Running, verifier

SOAKED = ("--slots", "32", "--openai", "0")
"""Flags: so few slots that they are all in use after minutes; then their number has no slope of its
own."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.torture.loaded"])
_START_SECONDS = 1800.0  # at low priority a run starts slowly


class _Logged:
    """A verifier with a log."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self._log = log
        self._read = 0

    @property
    def said(self) -> str:
        """Its log."""
        return self._log.read_text()

    def complaints(self) -> list[str]:
        """What no log should hold, of the lines since the last look."""
        said = self.said
        before = self._read
        self._read = len(said)
        return [
            line[:2000]
            for line in said[before:].splitlines()
            if '"exception"' in line or "Traceback" in line
        ][:3]


class Server(_Logged):
    """A running `cloud-verifier serve`, with two principals, its metrics and memory."""

    def __init__(self, running: Running, log: Path, tokens: Mapping[str, str]) -> None:
        super().__init__(running.url, log)
        self.process = running.stats
        self.honest = tokens["honest"]
        self.greedy = tokens["greedy"]
        self.operator = tokens[OPERATOR]
        self.api_port = 0

    @property
    def memory(self) -> float:
        """Resident megabytes."""
        return float(self.process.memory_info().rss) / 2**20

    @property
    def descriptors(self) -> int:
        """Open files."""
        return int(self.process.num_fds())

    @property
    def processor(self) -> float:
        """Seconds of processor time so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def starved(self) -> float:
        """Seconds for which its threads were ready to run and had no processor so far; 0 where the
        system does not say."""
        nanoseconds = 0
        for thread in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                _, waited, _ = thread.read_text().split()
                nanoseconds += int(waited)
        return nanoseconds / 1e9

    def logged(self, event: str) -> dict[str, Any]:
        """The first line of its log with this event."""
        for line in map(json.loads, self.said.splitlines()):
            if line.get("event") == event:
                return dict(line)
        raise AssertionError(f"the verifier's log has no {event!r}")

    async def metrics(self) -> Page:
        """The samples of /metrics, by name with labels."""
        return await look(self.url, self.operator)


@contextlib.asynccontextmanager
async def server(*flags: str) -> AsyncIterator[Server]:
    """A verifier for as long as the context lasts."""
    secrets = {name: new_token() for name in ("honest", "greedy", OPERATOR)}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens")
        said = Path(folder, "log")
        tokens.write_text("".join(f"{token_line(*one)}\n" for one in secrets.items()))
        own = (f"--auth-tokens={tokens}", "--log-level=info")
        with said.open("a") as log, verifier(*own, *flags, threads=1, log=log) as running:
            made = Server(running, said, secrets)
            if "--openai" in flags:  # its port is told in a line of its own
                assert running.process.stdout is not None
                told = running.process.stdout.readline()
                made.api_port = int(told.partition("/v1,")[0].rpartition(":")[2])
            yield made


# ---- forked


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


class Mortal(_Logged):
    """A verifier that is started again whenever it is killed."""

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

    @property
    def pid(self) -> int:
        """The process of the running one."""
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL the running one."""
        self._process.kill()
        self._process.join()


@contextlib.asynccontextmanager
async def mortal() -> AsyncIterator[Mortal]:
    """One for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        made = Mortal(f"ws://127.0.0.1:{port}", Path(folder, "log"))
        await made.start()
        try:
            yield made
        finally:
            made.kill()
