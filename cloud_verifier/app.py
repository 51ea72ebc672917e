"""Connects the parts of a verifier: model, engine, scheduler, service, transport."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from cloud_verifier.engine.core import Engine
from cloud_verifier.engine.recording import Recorder
from cloud_verifier.engine.scheduler import Scheduler
from cloud_verifier.engine.stream_drafting import stream_drafter
from cloud_verifier.engine.work import Report
from cloud_verifier.engine.workload import Workload
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from cloud_verifier.model import Served
from cloud_verifier.serving.admission import Admission
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.serving.transport import Transport
from cloud_verifier.sessions.service import Service
from cloud_verifier.sessions.session import PROGRESS_SECONDS
from cloud_verifier.settings import Settings
from moa.process.listening import Port
from moa.tree import TreeShape

_SWEEP_SECONDS = 1.0


class Verifier:
    """One verifier: everything between a loaded model and an open port."""

    def __init__(
        self, served: Served, settings: Settings, auth: Authenticator | None = None
    ) -> None:
        self.metrics = Metrics()
        scheduler = Scheduler(
            settings.limits,
            max_batch_rows=settings.max_batch_rows,
            max_batch_tokens=settings.max_batch_tokens,
            prefill_tokens=settings.prefill_tokens,
            batch_wait=settings.batch_wait_ms / 1000,
            now=time.monotonic(),
        )
        self.work = Workload(scheduler)
        self.service = Service(
            served.facts,
            settings.limits,
            self.work,
            metrics=self.metrics,
            free_pages=lambda: served.target.cache.free_pages,
            grammars=served.target.grammars,
        )
        recorder = Recorder(served.drafter, self._post, metrics=self.metrics)
        shape = settings.stream_shape
        if not served.target.capabilities.trees:
            shape = TreeShape.chain(shape.depth, min_score=shape.min_score)
        drafting = stream_drafter(
            served.target, served.stream_drafter, served.graph, recorder, shape=shape
        )
        self.engine = Engine(
            served.target,
            recorder,
            self.work,
            self._post,
            decode=served.decode,
            metrics=self.metrics,
            drafting=drafting,
            most_guesses=settings.limits.max_tree_nodes - 1,
            died=lambda: self._in_loop(self.died.set),
        )
        self.admission = Admission(
            self.service, auth or Authenticator(), lambda: self.engine.wrong()
        )
        self.transport = Transport(self.service, settings, self.admission)
        self._address = settings.host, settings.port
        self._loop: asyncio.AbstractEventLoop | None = None
        self.died = asyncio.Event()
        """Set when the engine's thread has ended by itself: this process serves no more."""

    @contextlib.asynccontextmanager
    async def open(self, port: Port | None = None) -> AsyncIterator[Verifier]:
        """Start the engine and listen while the body runs, on the settings' port unless one is
        taken already."""
        with port or Port(*self._address) as taken:
            async with self.running(), self.transport.open(taken):
                yield self

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Verifier]:
        """Start the engine without listening: the caller has another way in."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        helpers = [
            asyncio.create_task(self._sweep()),
            asyncio.create_task(self._tell_progress()),
        ]
        try:
            yield self
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.to_thread(self.engine.stop)

    async def drain(self) -> None:
        """Send Goaway to all clients, then wait for running work, up to the limit."""
        seconds = self.service.limits.drain_seconds
        log.info("draining", extra={"event": "drain"})
        self.service.drain("the verifier is stopping", seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.service.idle:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # let the writers send their last frames

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.service.sweep()

    async def _tell_progress(self) -> None:
        """While the engine is well: edges that hear nothing of it are to help themselves."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS / 2)
            if not self.engine.wrong():
                self.service.tell_progress()

    def _post(self, reports: list[Report]) -> None:
        self._in_loop(self.service.take, reports)

    def _in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        """For the engine's thread. The loop may be closed already."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *arguments)
