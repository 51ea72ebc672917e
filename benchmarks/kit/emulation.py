"""Emulated targets: verifiers whose forwards take as long as those of a larger model would.

python -m benchmarks.kit.emulation --step-ms 60 --lanes 4 --port 0 --slots 8

Only time is emulated: a forward of the real small target runs, and then its thread sleeps until the
stated time is over, for any number of tokens, as on an accelerator that is limited by reading its
weights. With recorded texts target and baseline only read (see benchmarks.witness.replayed). Every
lane is a verifier of its own, with its own port and engine, over one copy of the weights:
conversations in different lanes share only the processor. With a baseline, the server drafts with
that instead of the MoA drafter. All other flags are those of `cloud-verifier serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.registry import open_drafting
from benchmarks.kit.options import add_flags, options_from
from benchmarks.witness.replayed import (
    Chains,
    Recorded,
    ReplayedDrafting,
    ReplayedTarget,
    known_chains,
    recorded,
)
from cloud_verifier import cli, logs
from cloud_verifier.app import Verifier
from cloud_verifier.engine.draft import TreeDrafter
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.loop import Engine
from cloud_verifier.engine.records import Recorder
from cloud_verifier.model import Served, load, model_facts
from cloud_verifier.settings import Settings
from moa.drafters.contract import Drafting
from moa.errors import MoaError, run_cli
from moa.target.torch_target import Committed, Row, Step, with_states
from moa.tree import TreeShape
from testing.verifier import Emulated


class SlowTarget(ReplayedTarget):
    """A target whose every forward takes `step_seconds`; it remembers what was committed, for
    drafters that observe."""

    pieces = 1  # time is emulated for whole forwards

    def __init__(
        self, *arguments: Any, step_seconds: float = 0.0, watching: bool = False, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.step_seconds = step_seconds
        self.watching = watching
        self.forwards = self.late = 0
        """Forwards so far, and those that took longer than the stated time."""
        self.seen: dict[int, list[Committed]] = {}
        """By slot: committed and not yet observed tokens, if there is an observer."""

    def forward(self, rows: Sequence[Row]) -> Step:
        """Run, and sleep for the rest of the time."""
        began = time.perf_counter()
        step = super().forward(rows)
        left = began + self.step_seconds - time.perf_counter()
        self.forwards += 1
        self.late += left < 0
        if left > 0:
            time.sleep(left)
        return step

    def commit(self, step: Step, b: int, path: Sequence[int]) -> Committed:
        """Commit, and keep it for whoever drafts."""
        committed = super().commit(step, b, path)
        if self.watching:
            self.seen.setdefault(step.batch.slots[b], []).append(committed)
        return committed


class BaselineDrafter(TreeDrafter):
    """Server-side drafts by any drafter that the engine of `testing.speculator` knows."""

    _target: SlowTarget

    def __init__(self, target: SlowTarget, drafting: Drafting, shape: TreeShape) -> None:
        super().__init__(target, drafting, shape)
        self._rows: dict[int, int] = {}
        """By drafting slot: how much the drafter has read."""

    def close(self, lease: Lease) -> None:
        """Give the drafting slot back, and forget what was seen of the other."""
        if lease.slot is not None:
            self._target.seen.pop(lease.slot, None)
        if lease.draft_slot is not None:
            self._rows.pop(lease.draft_slot, None)
        super().close(lease)

    def _known(self, lease: Lease) -> int:
        return 0 if lease.draft_slot is None else self._rows[lease.draft_slot]

    def _catch_up(self, job: Job, stop: int) -> bool:
        lease = job.lease
        if lease.draft_slot is None:
            lease.draft_slot = self._drafting.open()
            self._rows[lease.draft_slot] = 0
        seen = self._target.seen.get(lease.slot, []) if lease.slot is not None else []
        while seen and self._rows[lease.draft_slot] < stop:
            committed = seen.pop(0)
            start = self._rows[lease.draft_slot]
            count = len(committed.positions)
            if count and int(committed.positions[0]) != start:
                raise MoaError("the drafter missed a part of the text: a prefix was shared")
            self._drafting.observe(lease.draft_slot, job.ids[start : start + count], committed)
            self._rows[lease.draft_slot] += count
        if self._rows[lease.draft_slot] < stop:
            raise MoaError("the drafter missed a part of the text: a prefix was shared")
        return True


class ReplayedDrafter(BaselineDrafter):
    """Server-side drafts that are known; to read a text costs nothing."""

    _drafting: ReplayedDrafting

    def _catch_up(self, job: Job, stop: int) -> bool:
        lease = job.lease
        if lease.draft_slot is None:
            lease.draft_slot = self._drafting.open()
        self._drafting.read[lease.draft_slot] = job.ids[:stop]
        self._rows[lease.draft_slot] = stop
        return True


class BaselineVerifier(Verifier):
    """A verifier whose server-drafted streams come from a baseline."""

    def __init__(
        self, served: Served, target: SlowTarget, drafting: Drafting, settings: Settings
    ) -> None:
        super().__init__(served, settings)
        known = isinstance(drafting, ReplayedDrafting)
        drafts = (ReplayedDrafter if known else BaselineDrafter)(
            target, drafting, settings.stream_shape
        )
        self.engine = Engine(
            target,
            Recorder(served.drafter, self._post, metrics=self.metrics),
            self.work,
            self._post,
            decode=served.decode,
            metrics=self.metrics,
            drafting=drafts,
        )


def lane(
    first: Served,
    settings: Settings,
    options: Emulated,
    texts: Sequence[Recorded] = (),
    chains: Chains | None = None,
) -> tuple[Verifier, SlowTarget]:
    """One more verifier over the weights that `first` has loaded."""
    loaded = with_states(first.target)
    target = SlowTarget(
        loaded.model,
        loaded.facts,
        slots=settings.slots,
        capacity=settings.slot_capacity,
        folder=loaded.folder,
        step_seconds=options.step_ms / 1000,
        watching=bool(options.baseline) and chains is None,
        texts=texts,
    )
    streams = first.stream_drafter
    taps = streams.taps if streams is not None and streams is first.drafter else ()
    if taps:
        target.tap(taps)
    facts = model_facts(
        target,
        first.drafter,
        first.facts.drafter,
        stream_records=not taps or first.graph is not None,
    )
    if not options.baseline:
        served = Served(target, first.drafter, first.decode, facts, first.drafter, first.graph)
        return Verifier(served, settings), target
    drafting: Drafting
    if chains is not None:
        drafting = ReplayedDrafting(chains, level_seconds=options.level_ms / 1000)
    else:
        drafting = open_drafting(Path(options.baseline), target, graph=options.graph)
    return BaselineVerifier(
        Served(target, first.drafter, first.decode, facts), target, drafting, settings
    ), target


async def serve(settings: Settings, options: Emulated) -> None:
    """Open the lanes, print their addresses in a line, and serve until SIGTERM; then how many
    forwards were late."""
    first = load(replace(settings, slots=1))
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    texts = recorded(Path(options.texts), options.known) if options.texts else ()
    known = texts and options.baseline
    depth = settings.stream_shape.depth
    chains = (
        known_chains(Path(options.baseline), with_states(first.target), texts, depth)
        if known
        else None
    )
    opened = [lane(first, settings, options, texts, chains) for _ in range(options.lanes)]
    async with contextlib.AsyncExitStack() as stack:
        for verifier, _ in opened:
            await stack.enter_async_context(verifier.open())
        print(*(verifier.transport.url for verifier, _ in opened), flush=True)
        await stop.wait()
    print(
        sum(target.forwards for _, target in opened),
        sum(target.late for _, target in opened),
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser, Emulated)
    arguments, others = parser.parse_known_args(argv)
    options = options_from(Emulated, arguments)
    settings = cli.settings_from(cli.parser().parse_args(["serve", *others]))
    logs.configure("error", settings.limits)
    torch.set_num_threads(1)
    # A verdict should not wait for the default thread switch interval of 5 ms.
    sys.setswitchinterval(0.0005)
    asyncio.run(serve(settings, options))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.kit.emulation", main))
