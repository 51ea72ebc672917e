"""Verifiers of a recorded target in a process of their own, one for each lane; with --drafter two,
the second of which drafts by that one.

python -m benchmarks.real.emulated WORK --bundle BUNDLE --step-ms 60 --lanes 5 --texts 12 --tokens 48
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real.recorded import (
    RecordedDrafting,
    RecordedDrafts,
    RecordedTarget,
    Text,
    texts,
)
from cloud_verifier import logs
from cloud_verifier.app import Verifier
from cloud_verifier.engine.draft import TreeDrafter
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.loop import Engine
from cloud_verifier.engine.records import Recorder
from cloud_verifier.model import Served, model_facts
from cloud_verifier.settings import Settings
from moa.wire.limits import Limits

_CONTEXT = 1024
LEVEL_SHARE = 0.3
"""A step of the 0.5B sibling beside the 1.5B target, of a forward of that: both are bound by reading
their weights."""
STATES_SHARE = 0.17
"""The same of a drafter of states: its 31M weights and the head's 233M, of 1,544M."""


class SiblingDrafter(TreeDrafter):
    """The server's own drafts, by the recorded sibling; to read a text costs nothing."""

    _drafting: RecordedDrafting  # type: ignore[assignment]

    def _known(self, lease: Lease) -> int:
        return 0 if lease.draft_slot is None else len(self._drafting.read[lease.draft_slot])

    def _catch_up(self, job: Job, stop: int) -> bool:
        lease = job.lease
        if lease.draft_slot is None:
            lease.draft_slot = self._drafting.open()
        self._drafting.read[lease.draft_slot] = list(job.ids[:stop])
        return True


class RecordedVerifier(Verifier):
    """A verifier of a recorded target, beside which streams are drafted."""

    def __init__(
        self, target: RecordedTarget, drafting: RecordedDrafting, settings: Settings
    ) -> None:
        served = Served(target, None, None, model_facts(target, None))
        super().__init__(served, settings)
        self.engine = Engine(
            target,
            Recorder(None, self._post, metrics=self.metrics),
            self.work,
            self._post,
            metrics=self.metrics,
            drafting=SiblingDrafter(target, drafting, settings.stream_shape),  # type: ignore[arg-type]
        )


async def serve(
    bundle: Path, known: Sequence[Text], *, step_ms: float, lanes: int, drafter: bool = False
) -> None:
    """Print the verifiers' addresses in a line, those beside the sibling and then those beside the
    other drafter, serve until SIGTERM, then print how many forwards there were, and how many were
    late."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    limits = Limits(max_context_tokens=_CONTEXT, max_prompt_tokens=768)
    settings = Settings(port=0, slots=8, limits=limits)
    seconds = step_ms / 1000
    drafting = [RecordedDrafting(known, level_seconds=LEVEL_SHARE * seconds) for _ in range(lanes)]
    if drafter:
        level_seconds = STATES_SHARE * seconds
        drafting += [RecordedDrafts(known, level_seconds=level_seconds) for _ in range(lanes)]
    targets = [
        RecordedTarget(bundle, known, seconds=seconds, slots=8, capacity=settings.slot_capacity)
        for _ in drafting
    ]
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for target, beside in zip(targets, drafting, strict=True):
            verifier = RecordedVerifier(target, beside, settings)
            await stack.enter_async_context(verifier.open())
            urls.append(verifier.transport.url)
        print(*urls, flush=True)
        await stop.wait()
    print(
        sum(target.forwards for target in targets),
        sum(target.late for target in targets),
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafter", default="", help="whose drafts are looked up")
    args = parser.parse_args(argv)
    logs.configure("error", Limits())
    sys.setswitchinterval(0.0005)  # a verdict should not wait for the default of 5 ms
    known = texts(args.work, args.texts, args.tokens, args.drafter)
    serving = serve(
        args.bundle,
        known,
        step_ms=args.step_ms,
        lanes=args.lanes,
        drafter=bool(args.drafter),
    )
    asyncio.run(serving)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
