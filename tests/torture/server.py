"""A real verifier in its own process, with its log, metrics and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from cloud_verifier.serving.auth import new_token, token_line
from tests.torture.raw import fetch

_START_SECONDS = 300.0
_COMMAND = "from cloud_verifier.cli import main; main()"


class Server:
    """A running `cloud-verifier serve` with two principals, honest and greedy."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self.honest, self.greedy = new_token(), new_token()
        self.tokens, self.log = folder / "tokens", folder / "log"
        self.tokens.write_text(f"{token_line('honest', self.honest)}\n{token_line('greedy', self.greedy)}\n")
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self.port = self.api_port = 0

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process, which must have been started."""
        if self._process is None:
            raise RuntimeError("the verifier has not been started")
        return self._process

    async def start(self) -> None:
        """Start it, or start it again on the same port, and wait until it listens."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _COMMAND, "serve", "--port", str(self.port)),
                *("--auth-tokens", str(self.tokens), *self._flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        async with asyncio.timeout(_START_SECONDS):
            line = (await self._process.stdout.readline()).decode()
            if "listening on" not in line:
                raise RuntimeError(f"the verifier did not start: {self.log.read_text()[-2000:]}")
            self.port = int(line.rpartition(":")[2])
            if "--openai" in self._flags:
                line = (await self._process.stdout.readline()).decode()
                self.api_port = int(line.partition("/v1,")[0].rpartition(":")[2])

    @property
    def memory(self) -> float:
        """Resident megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    @property
    def descriptors(self) -> int:
        """Open files."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def processor(self) -> float:
        """Seconds of processor time so far."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    async def metrics(self) -> dict[str, float]:
        """The samples of /metrics, by name with labels."""
        page = await fetch(self.port, "/metrics", self.honest)
        pairs = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs if name}

    @property
    def said(self) -> str:
        """Its log."""
        return self.log.read_text()

    async def stop(self) -> int:
        """SIGTERM, and wait; the exit code."""
        if self.process.returncode is None:
            self.process.terminate()
        async with asyncio.timeout(_START_SECONDS):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def server(*flags: str) -> AsyncIterator[Server]:
    """A verifier of the embedded pair for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        made = Server(Path(folder), flags)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()
