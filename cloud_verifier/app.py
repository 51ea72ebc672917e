"""Connects the parts of a verifier: model, engine, scheduler, service."""

from __future__ import annotations

import asyncio
import time

from cloud_verifier.engine.draft import stream_drafter
from cloud_verifier.engine.loop import Engine, Workload
from cloud_verifier.engine.records import Recorder
from cloud_verifier.engine.schedule import Scheduler
from cloud_verifier.metrics import Metrics
from cloud_verifier.model import Served
from cloud_verifier.server import Server
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.sessions.service import Service
from cloud_verifier.settings import Settings
from moa.target.identity import short_id
from moa.tree import TreeShape
from moa.version import running_version


class Verifier(Server):
    """One verifier: everything between a loaded model and an open port."""

    def __init__(
        self, served: Served, settings: Settings, auth: Authenticator | None = None
    ) -> None:
        metrics = Metrics()
        machine = served.target.machine
        metrics.info.labels(
            version=running_version(),
            model=settings.served_name,
            dtype=machine.dtype,
            device=machine.device,
            decoder=served.target.capabilities.decoder,
            computes=short_id(served.facts.computes),
        ).set(1)
        metrics.pages.set(served.target.cache.pages)
        scheduler = Scheduler(
            settings.limits,
            max_batch_rows=settings.max_batch_rows,
            max_batch_tokens=settings.max_batch_tokens,
            prefill_tokens=settings.prefill_tokens,
            batch_wait=settings.batch_wait_ms / 1000,
            now=time.monotonic(),
        )
        self.work = Workload(scheduler)
        service = Service(
            served.facts,
            settings.limits,
            self.work,
            metrics=metrics,
            free_pages=lambda: served.target.cache.free_pages,
            grammars=served.target.grammars,
        )
        recorder = Recorder(served.drafter, self._post, metrics=metrics)
        shape = settings.stream_shape
        if not served.target.capabilities.trees:
            shape = TreeShape.chain(shape.depth, min_score=shape.min_score)
        drafting = stream_drafter(
            served.target,
            served.stream_drafter,
            served.graph,
            recorder,
            shape=shape,
            small=served.small.drafting if served.small is not None else None,
        )
        self.engine: Engine = Engine(
            served.target,
            recorder,
            self.work,
            self._post,
            decode=served.decode,
            metrics=metrics,
            drafting=drafting,
            most_guesses=settings.limits.max_tree_nodes - 1,
            died=self._post_death,
        )
        super().__init__(service, settings, auth)

    def wrong(self) -> str:
        """The model's problem; empty if it is healthy."""
        return self.engine.wrong()

    async def start_engine(self) -> None:
        """Start the model's thread."""
        self.engine.start()

    async def stop_engine(self) -> None:
        """Stop it, without holding up the loop."""
        await asyncio.to_thread(self.engine.stop)
