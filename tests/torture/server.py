"""A real verifier of the embedded pair in its own process, with two principals, its log, metrics and memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.kit.verifier import Running, verifier
from benchmarks.server.scrape import Page, look
from cloud_verifier.serving.auth import new_token, token_line


class Server:
    """A running `cloud-verifier serve`."""

    def __init__(self, running: Running, log: Path, honest: str, greedy: str) -> None:
        self.process, self.url, self.honest, self.greedy = running.stats, running.url, honest, greedy
        self.port, self.api_port = int(running.url.rpartition(":")[2]), 0
        self._log, self._told = log, running.process.stdout

    def read_api_port(self) -> None:
        """The endpoint's port is told in a line of its own."""
        assert self._told is not None
        self.api_port = int(self._told.readline().partition("/v1,")[0].rpartition(":")[2])

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

    async def metrics(self) -> Page:
        """The samples of /metrics, by name with labels."""
        return await look(self.url, self.honest)

    @property
    def said(self) -> str:
        """Its log."""
        return self._log.read_text()


@contextlib.asynccontextmanager
async def server(*flags: str) -> AsyncIterator[Server]:
    """A verifier for as long as the context lasts."""
    honest, greedy = new_token(), new_token()
    with tempfile.TemporaryDirectory() as folder:
        tokens, said = Path(folder, "tokens"), Path(folder, "log")
        tokens.write_text(f"{token_line('honest', honest)}\n{token_line('greedy', greedy)}\n")
        own = (f"--auth-tokens={tokens}", "--log-level=info")
        with said.open("a") as log, verifier(*own, *flags, threads=1, log=log) as running:
            made = Server(running, said, honest, greedy)
            if "--openai" in flags:
                made.read_api_port()
            yield made
