"""An engine without a thread: a test steps it by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cloud_verifier.engine.contract import Report
from cloud_verifier.engine.draft import stream_drafter
from cloud_verifier.engine.job import Guesses, Job, Lease, RecordRows
from cloud_verifier.engine.loop import Engine, Workload
from cloud_verifier.engine.records import Recorder
from cloud_verifier.engine.schedule import Scheduler
from cloud_verifier.model import Served
from moa.sampling import SamplingSettings
from moa.tree import TreeShape
from moa.wire import Limits
from moa.wire.finish import TurnRules
from moa.wire.messages import Foresee, Stream, StreamTokens
from testing.client import NEVER
from tests.verifier import kit


def new_lease(name: int, principal: str = "p", **more: Any) -> Lease:
    """One that wants records."""
    return Lease(bytes([name] * 16), principal, records=RecordRows(1, 16), **more)


def new_job(
    lease: Lease,
    ids: list[int],
    draft: list[int] | None,
    rules: TurnRules | None = None,
    now: float = 0.0,
) -> Job:
    """A stream: one that waits for more behind the answer to a draft, or, without one, that the
    server drafts. Of an empty draft comes one token."""
    base = len(ids) - 1
    waits = draft is not None
    guesses = Guesses(waits)
    if draft is not None:
        tree = [ids[-1], *(draft or [NEVER])]
        parents = list(range(-1, len(tree) - 1))
        guesses.add(Foresee(lease.session, 1, base, tree, parents, [0] * len(tree)))
    return Job(
        lease=lease,
        request=Stream(lease.session, 1, base, waits=waits),
        ids=list(ids),
        rules=rules or TurnRules(len(ids), 100, 150),
        sampling=SamplingSettings(),
        guesses=guesses,
        enqueued=now,
        deadline=1e12,
    )


class Bench:
    """The engine, and what it has reported."""

    def __init__(
        self,
        served: Served | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        prefill_tokens: int = 32,
        rows: int = 16,
        **settings: Any,
    ) -> None:
        self.served = served or kit.served()
        self.reports: list[Report] = []
        self.scheduler = Scheduler(
            Limits(), batch_wait=0.0, prefill_tokens=prefill_tokens, now=clock()
        )
        self.work = Workload(self.scheduler, clock)
        target = self.served.target
        drafter = self.served.drafter
        self.recorder = Recorder(drafter, self.post, rows=rows, clock=clock)
        self.drafting = stream_drafter(
            target, drafter, None, self.recorder, shape=TreeShape.chain(3)
        )
        self.engine = Engine(
            target,
            self.recorder,
            self.work,
            lambda reports: self.post(reports),
            drafting=self.drafting,
            clock=clock,
            **settings,
        )

    def post(self, reports: list[Report]) -> None:
        """What the event loop does with reports: here it keeps them."""
        self.reports += reports

    def of(self, kind: type) -> list[Any]:
        """The reports of one kind."""
        return [
            report
            for report in self.reports
            if isinstance(getattr(report, "message", report), kind)
        ]

    def submit(self, lease: Lease, ids: list[int], draft: list[int] | None) -> Job:
        """A stream; see `new_job`."""
        self.work.submit(job := new_job(lease, ids, draft))
        return job

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.engine.turn(0) or self.scheduler._prompts:  # they may wait a moment for rounds
            pass

    def next(self, lease: Lease, ids: list[int]) -> list[int]:
        """The log after one more round without a draft."""
        job = self.submit(lease, ids, [])
        while not (settled := [report for report in self.of(StreamTokens) if report.job is job]):
            self.engine.turn(0)
        return [*ids, *settled[0].message.tokens]
