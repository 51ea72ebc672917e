"""Server-side drafting for stream rounds, with the same MoA drafter as the edge's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cloud_verifier.recording import Recorder
from cloud_verifier.work import Job, Lease
from moa.model.drafter import Drafter
from moa.model.drafting import Drafting, DraftRequest, MoaDrafting, append
from moa.model.target import Target
from moa.tree import TreeShape
from moa.utility import Costs, Utility
from moa.wire.messages import Stream

FlatTree = tuple[Sequence[int], Sequence[int]]
"""Tokens and parents; node 0 is the pending token."""


class ServerDrafting(Protocol):
    """The engine's interface to a drafter."""

    def draft(self, jobs: Sequence[Job]) -> list[FlatTree]:
        """A draft for the pending token of each stream round."""

    def matching(self, job: Job) -> float:
        """The accepted nodes that a draft of the edge must promise, to be verified in place of one of ours."""

    def passed_over(self) -> None:
        """A batch included drafts of edges: its time is no measurement of ours."""

    def close(self, lease: Lease) -> None:
        """The lease is given back."""


class NoDrafting:
    """Without a drafter a stream is plain decoding: one token a forward."""

    def draft(self, jobs: Sequence[Job]) -> list[FlatTree]:
        """Only the pending token."""
        return [([job.ids[-1]], [-1]) for job in jobs]

    def matching(self, job: Job) -> float:
        """Any draft is better than none."""
        return 0.0

    def passed_over(self) -> None:
        """There is nothing to measure."""

    def close(self, lease: Lease) -> None:
        """There is nothing to give back."""


@dataclass
class _Drafted:
    """A session's latest draft, evaluated by the session's position when the next one is requested."""

    utility: Utility
    base: int = 0
    levels: int = 0
    missed: int = 0
    """Tokens that the drafter has not read yet, without the latest round's."""

    def judge(self, base: int) -> None:
        """Evaluate: the session is now at `base`."""
        if base > self.base:
            self.utility.record(self.levels, max(0, min(self.levels, base - self.base - 1)))


class TreeDrafting:
    """Trees by any drafter of the engine; their depth follows measured cost and acceptance, down to none. Subclasses
    give the drafter a session's text: `_known` and `_catch_up`."""

    def __init__(
        self,
        target: Target,
        drafting: Drafting,
        shape: TreeShape,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target, self._drafting, self._shape, self._clock = target, drafting, shape, clock
        self._costs: dict[float, Costs] = {}
        """By temperature, which decides how well drafts do."""
        self._drafted: dict[Lease, _Drafted] = {}
        self._began, self._reading = 0.0, 0.0
        """When the latest round began, and how much of it was spent on reading what earlier ones had said."""
        self._before: dict[Lease, _Drafted] = {}
        """The sessions of the latest round."""

    def draft(self, jobs: Sequence[Job]) -> list[FlatTree]:
        """Trees for all stream rounds of a batch, level by level together."""
        worth = self._worth(jobs)
        requests, able = [], []
        for job, levels in zip(jobs, worth, strict=True):
            room = self._target.pool.capacity - job.base - 1
            if not levels or room < 1 or not self._ready(job):
                continue
            shape = replace(self._shape, depth=levels, nodes=min(self._shape.nodes, room))
            requests.append(DraftRequest(job.lease.drafting, job.ids[-1], shape, job.sampling))
            able.append(job)
        trees = dict(zip(able, self._drafting.draft(requests), strict=True)) if requests else {}
        for job, tree in trees.items():
            self._drafted[job.lease].levels = int(max(tree.depths()))
        return [(trees[job].tokens, trees[job].parents) if job in trees else ([job.ids[-1]], [-1]) for job in jobs]

    def matching(self, job: Job) -> float:
        """As many as ours win beyond plain decoding, in the same time."""
        one = self._drafted.get(job.lease)
        return one.utility.matching() if one is not None else 1.0

    def passed_over(self) -> None:
        """The edge drafted for some sessions: discard the measurement of the latest round."""
        self._before = {}

    def close(self, lease: Lease) -> None:
        """Give the drafting slot back."""
        self._drafted.pop(lease, None)
        self._before.pop(lease, None)
        if lease.drafting is not None:
            self._drafting.close(lease.drafting)
            lease.drafting = None

    def _worth(self, jobs: Sequence[Job]) -> list[int]:
        """How many levels to draft for each; first learns from the latest round."""
        now, before = self._clock(), self._before
        asked = {job.lease: job for job in jobs if not isinstance(job.request, Stream) or job.request.speculate}
        if before and all(lease in asked for lease in before):
            # If the same sessions take part again, the time between the calls is the time of a round.
            levels = sum(one.levels for one in before.values()) / len(before)
            won = sum(asked[lease].base - one.base for lease, one in before.items()) / len(before)
            for costs in {id(one.utility.costs): one.utility.costs for one in before.values()}.values():
                costs.add(now - self._began - self._reading, levels, won)
        self._began, self._reading, self._before = now, 0.0, {}
        for lease, job in asked.items():
            if lease not in self._drafted:
                costs = self._costs.setdefault(job.sampling.temperature, Costs())
                self._drafted[lease] = _Drafted(Utility(costs, self._shape.depth), job.base)
            one = self._before[lease] = self._drafted[lease]
            latest = 0
            if lease in before:  # else the session has gone on in other ways since
                one.judge(job.base)
                latest = max(0, job.base - one.base)
            one.missed = max(0, lease.length - self._known(lease) - latest)
            one.base, one.levels = job.base, 0
        drafted = [self._drafted[job.lease] if job.lease in asked else None for job in jobs]
        return [one.utility.levels(one.missed) if one else 0 for one in drafted]

    def _ready(self, job: Job) -> bool:
        """Whether the drafter knows the session's text now. Reading what the latest round said is a part of every
        drafted round; what was missed before that has a price of its own."""
        one = self._drafted[job.lease]
        if one.missed:
            began = self._clock()
            read = self._catch_up(job, self._known(job.lease) + one.missed)
            took = self._clock() - began
            self._reading += took
            if not read:
                return False
            one.utility.costs.read(took, one.missed)
        return self._catch_up(job, job.lease.length)

    def _known(self, lease: Lease) -> int:
        """How much of the session's text the drafter has read."""
        raise NotImplementedError

    def _catch_up(self, job: Job, stop: int) -> bool:
        """Let the drafter know the session's text up to `stop`, in `lease.drafting`; False when it cannot draft for
        this one."""
        raise NotImplementedError


class MoaServerDrafting(TreeDrafting):
    """Trees by the MoA drafter. A session's drafting state is built when its first stream begins, from its token log,
    its slot and its activation records, and caught up when another begins after rounds that the edge drafted."""

    _drafting: MoaDrafting

    def __init__(self, target: Target, drafter: Drafter, recorder: Recorder, *, shape: TreeShape) -> None:
        drafting = MoaDrafting(
            drafter,
            # As many full contexts as the target's KV cache holds; further sessions stream without drafts.
            slots=max(1, min(target.pool.slots, target.pool.pages // target.pool.per_slot)),
            capacity=target.pool.capacity,
            scratch=shape.breadth * (shape.depth + 1) + 8,
        )
        super().__init__(target, drafting, shape)
        self._drafter, self._recorder = drafter, recorder

    def _known(self, lease: Lease) -> int:
        return 0 if lease.drafting is None else self._drafting.pool.lengths[lease.drafting]

    @torch.inference_mode()
    def _catch_up(self, job: Job, stop: int) -> bool:
        lease, drafting = job.lease, self._drafting
        if lease.records is None:
            return False
        if lease.drafting is None:
            if not drafting.pool.free:
                return False
            lease.drafting = drafting.open()
        slot, start = lease.drafting, drafting.pool.lengths[lease.drafting]
        if start == stop or lease.slot is None:
            return True
        if not self._recorder.finish(lease):
            return False  # a long prompt: the stream continues without drafts while its records are made in batches
        if drafting.records is not None:
            # A row that could not be made stays zero.
            halves = [self._drafter.layout.split(half)[0] for half in lease.records.read(start, stop)]
            rows = [torch.from_numpy(half).to(drafting.records.k) for half in halves]
            append(drafting.records, slot, *(half.transpose(0, 1).unsqueeze(0) for half in rows))
        if drafting.borrowed is not None:
            last = slice(-self._drafter.config.tli, None)
            keys, values = self._target.pool.read(lease.slot, start, stop)
            append(drafting.borrowed, slot, keys[last].transpose(1, 2), values[last].transpose(1, 2))
        drafting.read(slot, job.ids[start:stop])
        return True
