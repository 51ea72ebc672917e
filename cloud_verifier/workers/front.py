"""The front of several workers: accepts connections, hands each to its worker, and replaces a worker that dies.

It reads only a request's head, which has the session key; then it passes the socket to the worker. With TLS the head is
encrypted: there the client's address is the key. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import zlib
from collections.abc import AsyncIterator, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from cloud_verifier.logs import log
from cloud_verifier.settings import Settings
from cloud_verifier.workers.affinity import choose_worker, is_whole, key_of
from cloud_verifier.workers.control import AllMetrics, Serve
from cloud_verifier.workers.worker import Start, Worker
from moa.errors import MoaError
from moa.process.listening import Port

_LONGEST_HEAD = 16 * 1024
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
_BACKOFF = (0.5, 30.0)
"""Seconds before a worker that died is started again: at first, and at most."""
_STEADY_SECONDS = 60.0
"""A worker that ran this long was healthy: its next start is not delayed further."""
_STUCK_SECONDS = 60.0
"""A worker that was unhealthy for so long is killed."""
_BACKLOG = 1024
_FAREWELL_SECONDS = 5.0
"""Time to close after the drain."""


class Front:
    """`count` workers, each in a process that `start` makes."""

    def __init__(
        self, settings: Settings, count: int, start: Start, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._start, self._clock = settings, start, clock
        self._stopping = self._opened = False
        self._placing: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self.workers = [Worker(index, self._ask, clock) for index in range(count)]
        self._registry = CollectorRegistry()
        self._well = Gauge("moa_workers_well", "Workers that take connections", registry=self._registry)
        self._restarts = Counter("moa_worker_restarts", "Workers started again", registry=self._registry)

    @property
    def url(self) -> str:
        """The address for clients."""
        return self._port.url("wss" if self._settings.tls_cert else "ws")

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Front]:
        """Start all workers, then listen while the body runs."""
        with Port(self._settings.host, self._settings.port) as self._port:
            lives = [asyncio.create_task(self._keep(worker)) for worker in self.workers]
            tasks = [*lives, asyncio.create_task(self._watch())]
            try:
                await self._first_beats(lives)
                self._opened = True
                self._accepting = asyncio.create_task(self._accept(self._port.listen(_BACKLOG)))
                tasks.append(self._accepting)
                yield self
            finally:
                self._stopping = True
                for worker in self.workers:
                    worker.kill()
                for task in (*tasks, *self._placing, *self._telling):
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self) -> None:
        """Accept no more connections, have every worker drain, and wait for them."""
        self._stopping = True
        self._accepting.cancel()
        self._port.socket.close()
        for worker in self.workers:
            worker.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.limits.drain_seconds + _FAREWELL_SECONDS):
                for worker in self.workers:
                    await worker.ended.wait()

    # ---- workers

    async def _first_beats(self, lives: list[asyncio.Task[None]]) -> None:
        """Return when every worker has loaded its model, or raise the first failure."""
        everybody = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait([everybody, *lives], return_when=asyncio.FIRST_COMPLETED)
            for life in lives:
                if life.done():
                    life.result()
        finally:
            everybody.cancel()

    async def _all_ready(self) -> None:
        for worker in self.workers:
            await worker.ready.wait()

    async def _keep(self, worker: Worker) -> None:
        first, longest = _BACKOFF
        pause = first
        while not self._stopping:
            began = self._clock()
            await worker.live(self._start)
            if not self._opened:
                raise worker.failure or MoaError(f"worker {worker.index} ended while it was starting")
            if self._stopping:
                return
            pause = first if self._clock() - began > _STEADY_SECONDS else min(2 * pause, longest)
            log.error("worker %d has ended: it is started again", worker.index, extra={"event": "worker_ended"})
            self._restarts.inc()
            await asyncio.sleep(pause)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for worker in self.workers:
                if worker.unhealthy_seconds > _STUCK_SECONDS:
                    log.error("worker %d is stuck: killed", worker.index, extra={"event": "worker_stuck"})
                    worker.kill()

    def _ask(self, asking: Worker) -> None:
        task = asyncio.create_task(self._tell(asking))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, asking: Worker) -> None:
        """Collect all processes' metrics for a worker that was asked for them."""
        there = [worker for worker in self.workers if worker.ready.is_set()]
        pages = await asyncio.gather(*(worker.page() for worker in there))
        self._well.set(sum(worker.well for worker in self.workers))
        named = {str(worker.index): page for worker, page in zip(there, pages, strict=True) if page}
        asking.send(AllMetrics({"front": zlib.compress(generate_latest(self._registry)), **named}))

    # ---- connections

    async def _accept(self, listener: socket.socket) -> None:
        running = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await running.sock_accept(listener)
            except OSError as error:  # too many open files: wait until others are closed
                log.error("cannot accept: %s", error.strerror, extra={"event": "accept_failed"})
                await asyncio.sleep(0.1)
                continue
            if len(self._placing) >= self._settings.limits.max_half_open:
                sock.close()
                continue
            task = asyncio.create_task(self._place(sock, str(address[0])))
            self._placing.add(task)
            task.add_done_callback(self._placing.discard)

    async def _place(self, sock: socket.socket, address: str) -> None:
        with sock, contextlib.suppress(OSError, TimeoutError):  # the worker has a descriptor of its own
            sock.setblocking(False)
            async with asyncio.timeout(self._settings.limits.handshake_timeout):
                head = b"" if self._settings.tls_cert else await _read_head(sock)
            loads = {worker.index: worker.load for worker in self.workers if worker.well}
            while (index := choose_worker(key_of(head) or address, loads)) is not None:
                if self.workers[index].take(Serve(head), sock):
                    return
                del loads[index]
            if not self._settings.tls_cert:
                await asyncio.get_running_loop().sock_sendall(sock, _BUSY)


async def _read_head(sock: socket.socket) -> bytes:
    head = b""
    while not is_whole(head) and len(head) < _LONGEST_HEAD:
        data = await asyncio.get_running_loop().sock_recv(sock, _LONGEST_HEAD - len(head))
        if not data:
            raise ConnectionResetError("hung up")
        head += data
    return head
