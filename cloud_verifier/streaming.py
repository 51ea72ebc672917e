"""How the server drafts for itself in stream rounds: the same MoA drafter as the edge's, beside the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from cloud_verifier.recording import Recorder
from cloud_verifier.work import Job, Lease
from moa.model.drafter import Drafter
from moa.model.drafting import Drafting, DraftRequest, MoaDrafting, append
from moa.model.target import Target
from moa.tree import TreeShape
from moa.wire.messages import Stream

Draft = tuple[Sequence[int], Sequence[int]]
"""Tokens and parents; node 0 is the pending token."""


class ServerDrafting(Protocol):
    """What the engine asks for drafts."""

    def draft(self, jobs: Sequence[Job]) -> list[Draft]:
        """A draft for the pending token of each stream round."""

    def close(self, lease: Lease) -> None:
        """The lease is given back."""


class NoDrafting:
    """Without a drafter a stream is plain decoding: one token a forward."""

    def draft(self, jobs: Sequence[Job]) -> list[Draft]:
        """The pending token alone."""
        return [([job.ids[-1]], [-1]) for job in jobs]

    def close(self, lease: Lease) -> None:
        """There is nothing to give back."""


class TreeDrafting:
    """Trees by any drafter of the engine. How a drafter comes to know a session's text is its own: `_catch_up`."""

    def __init__(self, target: Target, drafting: Drafting, shape: TreeShape) -> None:
        self._target, self._drafting, self._shape = target, drafting, shape

    def draft(self, jobs: Sequence[Job]) -> list[Draft]:
        """Trees for all stream rounds of a batch, level by level together."""
        requests, able = [], []
        for job in jobs:
            room = self._target.pool.capacity - job.base - 1
            plain = isinstance(job.request, Stream) and not job.request.speculate
            if plain or room < 1 or not self._catch_up(job):
                continue
            shape = replace(self._shape, nodes=min(self._shape.nodes, room))
            requests.append(DraftRequest(job.lease.drafting, job.ids[-1], shape, job.sampling))
            able.append(job)
        trees = dict(zip(able, self._drafting.draft(requests), strict=True)) if requests else {}
        return [(trees[job].tokens, trees[job].parents) if job in trees else ([job.ids[-1]], [-1]) for job in jobs]

    def close(self, lease: Lease) -> None:
        """Give the drafting slot back."""
        if lease.drafting is not None:
            self._drafting.close(lease.drafting)
            lease.drafting = None

    def _catch_up(self, job: Job) -> bool:
        """Let the drafter know the session's text, in `lease.drafting`; False when it cannot draft for this one."""
        raise NotImplementedError


class MoaServerDrafting(TreeDrafting):
    """Trees by the MoA drafter. A session's drafting state is built when its first stream begins, from its token log,
    its slot and its activation records, and caught up when another begins after rounds that the edge drafted."""

    _drafting: MoaDrafting

    def __init__(self, target: Target, drafter: Drafter, recorder: Recorder, *, shape: TreeShape) -> None:
        drafting = MoaDrafting(
            drafter,
            slots=target.pool.slots,
            capacity=target.pool.capacity,
            scratch=shape.breadth * (shape.depth + 1) + 8,
        )
        super().__init__(target, drafting, shape)
        self._drafter, self._recorder = drafter, recorder

    @torch.inference_mode()
    def _catch_up(self, job: Job) -> bool:
        lease, drafting = job.lease, self._drafting
        if lease.records is None:
            return False
        if lease.drafting is None:
            lease.drafting = drafting.open()
        slot, start, stop = lease.drafting, drafting.pool.lengths[lease.drafting], lease.length
        if start == stop or lease.slot is None:
            return True
        self._recorder.finish(lease)
        if drafting.records is not None:
            # A row that could not be made stays zero, and says nothing to the attention.
            halves = [self._drafter.layout.split(half)[0] for half in lease.records.read(start, stop)]
            rows = [torch.from_numpy(half).to(drafting.records.k) for half in halves]
            append(drafting.records, slot, *(half.transpose(0, 1).unsqueeze(0) for half in rows))
        if drafting.borrowed is not None:
            last = slice(-self._drafter.config.tli, None)
            pool = self._target.pool
            keys, values = (half[last, lease.slot, :, start:stop] for half in (pool.k, pool.v))
            append(drafting.borrowed, slot, keys, values)
        drafting.read(slot, job.ids[start:stop])
        return True
