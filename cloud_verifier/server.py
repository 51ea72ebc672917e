"""A process that serves sessions, whatever runs their rounds: an open port, the service behind it, and an
engine that starts and stops with them. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Self

from cloud_verifier.certificate import DAY_SECONDS, Certificate
from cloud_verifier.engine.contract import Report
from cloud_verifier.engine.job import Job
from cloud_verifier.logs import log
from cloud_verifier.serving.admission import Admission
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.serving.transport import Transport
from cloud_verifier.sessions.service import Service
from cloud_verifier.sessions.session import PROGRESS_SECONDS
from cloud_verifier.settings import Settings
from moa.process.listening import Port

_SWEEP_SECONDS = 1.0


class Server:
    """Everything between an engine and an open port."""

    def __init__(
        self, service: Service, settings: Settings, auth: Authenticator | None = None
    ) -> None:
        """Make a server of these sessions, which does not listen yet. Without `auth` everybody may
        connect."""
        self.service = service
        self.metrics = service.metrics
        self.admission = Admission(
            service,
            auth or Authenticator(),
            self.wrong,
            unready=self.unready,
            look=self.look,
            hosts=(settings.host, *settings.openai_hosts),
        )
        self.transport = Transport(service, settings, self.admission)
        self._certificate: Certificate | None = None
        if settings.tls_cert is not None:
            # What there is to tell of it at the start has been told before the model was loaded.
            quiet_until = time.time() + DAY_SECONDS
            self._certificate = Certificate(settings.tls_cert, quiet_until=quiet_until)
            self.metrics.certificate_end.set(self._certificate.end)
        self.died = asyncio.Event()
        """Set when the engine has ended by itself: this process serves no more."""
        self._address = settings.host, settings.port
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop, which other threads send reports to; None before it runs."""

    def wrong(self) -> str:
        """The engine's problem; empty if it is healthy."""
        raise NotImplementedError

    def unready(self) -> str:
        """Why it should get no new devices, beside the engine's problem; empty if it should."""
        return ""

    async def look(self) -> None:
        """Look after what `unready` says, where it may be old; called before health checks."""

    def works(self) -> bool:
        """Whether rounds that have no answer yet are being worked on."""
        return not self.wrong()

    def read_for(self, job: Job) -> int | None:
        """Returns how many tokens of its text are read for this round; None if nothing is being done
        for it."""
        return job.lease.length

    async def start_engine(self) -> None:
        """Have rounds run."""
        raise NotImplementedError

    async def stop_engine(self) -> None:
        """Run no more."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def open(self, port: Port | None = None) -> AsyncIterator[Self]:
        """Start the engine and listen while the body runs, on the settings' port unless one is
        taken already."""
        with port or Port(*self._address) as taken:
            async with self.running(), self.transport.open(taken):
                yield self

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Run the engine while the body runs, without listening: the caller has another way in."""
        self._loop = asyncio.get_running_loop()
        await self.start_engine()
        helpers = [
            asyncio.create_task(self._sweep()),
            asyncio.create_task(self._tell_progress()),
        ]
        try:
            yield self
        finally:
            for helper in helpers:
                helper.cancel()
            await self.stop_engine()

    async def drain(self) -> None:
        """Tell all devices that this process is about to stop, and wait for the work that runs, for
        `drain_seconds` at most."""
        seconds = self.service.limits.drain_seconds
        log.info("draining: what runs has %g s to end", seconds, extra={"event": "drain"})
        self.service.drain("the verifier is stopping", seconds)
        try:
            async with asyncio.timeout(seconds):
                while not self.service.idle:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.warning(
                "the time to drain is over: what runs is cut off, and devices go on elsewhere",
                extra={"event": "drain_over", "limit": "drain_seconds"},
            )
        await asyncio.sleep(0)  # let the writers send their last frames

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            with _goes_on():
                self.service.sweep()
            with _goes_on():
                self.admission.end_revoked()
            with _goes_on():
                if self._certificate is not None:
                    self._certificate.warn_of_its_end(time.time())

    async def _tell_progress(self) -> None:
        """While the engine works: edges that hear nothing of it are to help themselves."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS / 2)
            with _goes_on():
                if self.works():
                    self.service.tell_progress(self.read_for)

    def _post(self, reports: list[Report]) -> None:
        """Have the event loop take the engine's reports; called in the engine's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self.service.take, reports)

    def _post_death(self) -> None:
        """Have the event loop learn that the engine has ended by itself; called in its thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self.died.set)


@contextlib.contextmanager
def _goes_on() -> Iterator[None]:
    """A context for what is done again and again: a defect is logged, and the next time comes."""
    try:
        yield
    except Exception:
        log.exception("a look at all sessions failed", extra={"event": "sweep_failed"})
