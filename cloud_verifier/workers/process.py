"""A worker process: a verifier without a port, which serves the connections that the front passes on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import sys
import zlib

from cloud_verifier import logs
from cloud_verifier.app import Verifier
from cloud_verifier.serving import event_loop as loop
from cloud_verifier.serving.auth import Credentials
from cloud_verifier.settings import Settings
from cloud_verifier.workers.control import (
    AllMetrics,
    Control,
    Heartbeat,
    Line,
    MetricsRequest,
    SendMetrics,
    Serve,
    StartFailed,
    WorkerMetrics,
    send,
)
from cloud_verifier.workers.pages import merge
from moa.errors import MoaError, run_cli

_BEAT_SECONDS = 1.0
_PAGE_SECONDS = 8.0


def main(settings: Settings, auth: Credentials, index: int, control: socket.socket, log_level: str) -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the front too, which ends the workers
    logs.configure(log_level, settings.limits)

    def work() -> int:
        from cloud_verifier.model import load

        try:
            logs.take_over_libraries()
            served = load(dataclasses.replace(settings, device=_device(settings.device, index)))
        except MoaError as error:
            send(control, StartFailed(error.line(), error.exit_code))
            return error.exit_code
        loop.run(WorkerProcess(Verifier(served, settings, auth), control).run())
        return 0

    sys.exit(run_cli("cloud-verifier", work))


class WorkerProcess:
    """The verifier of this process, connected to the front."""

    def __init__(self, verifier: Verifier, control: socket.socket) -> None:
        self._verifier, self._control = verifier, control
        self._stop = asyncio.Event()
        self._taken = 0
        self._adoptions: set[asyncio.Task[None]] = set()
        self._readers: list[asyncio.Future[dict[str, bytes]]] = []
        """Requests for metrics that wait for the front's answer."""
        verifier.admission.page = self._page

    async def run(self) -> None:
        """Serve until the front ends or sends SIGTERM, then drain."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        async with self._verifier.running(), self._verifier.transport.open(None):
            self._line = Line(self._control, self._heard, lost=self._stop.set)
            try:
                await self._beat_until_stopped()
                self._beat("draining")
                await self._verifier.drain()
            finally:
                self._line.close()

    async def _beat_until_stopped(self) -> None:
        while not self._stop.is_set():
            self._beat(self._verifier.wrong())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_SECONDS):
                    await self._stop.wait()

    def _beat(self, wrong: str) -> None:
        self._line.send(Heartbeat(len(self._verifier.service.channels), self._taken, wrong))

    def _heard(self, message: Control, carried: socket.socket | None) -> None:
        match message:
            case Serve():
                if carried is not None:
                    self._taken += 1
                    task = asyncio.create_task(self._adopt(carried, message.head))
                    self._adoptions.add(task)
                    task.add_done_callback(self._adoptions.discard)
            case SendMetrics():
                asyncio.get_running_loop().create_task(self._tell())
            case AllMetrics():
                for reader in self._readers:
                    if not reader.done():
                        reader.set_result(message.pages)
                self._readers.clear()

    async def _adopt(self, sock: socket.socket, head: bytes) -> None:
        with contextlib.suppress(OSError):  # it was closed meanwhile, or its TLS handshake failed
            await self._verifier.transport.adopt(sock, head)

    async def _tell(self) -> None:
        self._line.send(WorkerMetrics(zlib.compress(await self._verifier.admission.own_page())))

    async def _page(self) -> bytes:
        """The metrics of all processes."""
        reader: asyncio.Future[dict[str, bytes]] = asyncio.get_running_loop().create_future()
        self._readers.append(reader)
        if not self._line.send(MetricsRequest()):
            return await self._verifier.admission.own_page()
        async with asyncio.timeout(_PAGE_SECONDS):
            pages = await reader
        return merge({name: zlib.decompress(page) for name, page in pages.items()})


def _device(name: str, index: int) -> str:
    """With several accelerators, each worker has its own."""
    import torch

    if name in ("auto", "cuda") and torch.cuda.device_count() > 1:
        return f"cuda:{index % torch.cuda.device_count()}"
    return name
