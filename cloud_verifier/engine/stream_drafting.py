"""Server-side drafting for stream rounds, with the same MoA drafter as the edge's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cloud_verifier.engine.recording import Recorder
from cloud_verifier.engine.work import Job, Lease, RecordRows
from moa.grammar.matcher import forced_draft
from moa.graph.load import LoadedGraph
from moa.model.accelerator.chains import ChainDrafting
from moa.model.drafter import Drafter
from moa.model.drafting import Drafting, DraftRequest, MoaDrafting
from moa.model.features import FeatureDrafting, FeatureModel
from moa.model.graph_drafting import LATE, GraphDrafting
from moa.model.target import Committed, Target
from moa.speculation.policy import Drafted, Policy, RoundTime, TextAcceptance
from moa.tree import DraftTree, TreeShape
from moa.wire.messages import Stream

FlatTree = tuple[Sequence[int], Sequence[int]]
"""Tokens and parents; node 0 is the pending token."""


class ServerDrafting:
    """The engine's interface to a drafter. This one drafts nothing: a stream is plain decoding, one
    token a forward."""

    def draft(self, jobs: Sequence[Job], beside: int = 0) -> list[FlatTree]:
        """A draft for the pending token of each of a batch's streams; `beside` other tokens are in
        its forward."""
        return [([job.ids[-1]], [-1]) for job in jobs]

    def ran(self, accepted: Mapping[Job, int], tokens: int, seconds: float) -> None:
        """The batch of the latest drafts has run: how many nodes were accepted of each stream's,
        the tokens of the forward, its seconds with those of what followed."""

    def matching(self, job: Job) -> float:
        """The accepted nodes that a draft of the edge must promise, to be verified in place of one
        of ours."""
        return 0.0

    def committed(self, lease: Lease, committed: Committed) -> None:
        """These are the latest tokens in the lease's slot now."""

    def shared(self, source: Lease, lease: Lease) -> None:
        """The lease's slot has begun as a copy of the first tokens of another's."""

    def close(self, lease: Lease) -> None:
        """The lease is given back."""


@dataclass
class _Text:
    """A session's text: how well drafts for it do, and what the drafter has read of it."""

    acceptance: TextAcceptance
    latest: int = 0
    """Tokens of its latest round: to read them is a part of any drafted round."""
    missed: int = 0
    """Tokens before these that the drafter has not read yet."""
    reading: float = 0.0
    """Seconds of reading these so far."""
    levels: int = 0
    """Levels asked for in the latest round; 0: none."""
    drafted: int = 0
    """Levels of the draft that came of it."""
    nodes: int = 0
    """And its nodes."""


class TreeDrafting(ServerDrafting):
    """Trees by any drafter of the engine; who drafts, and how deep, follows measured cost and
    acceptance, down to none. Subclasses give the drafter a session's text: `_able`, `_known` and
    `_catch_up`."""

    def __init__(
        self,
        target: Target,
        drafting: Drafting,
        shape: TreeShape,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._drafting = drafting
        self._shape = shape
        self._clock = clock
        self.policy = Policy(shape)
        self._texts: dict[Lease, _Text] = {}
        self._round: dict[Lease, _Text] = {}
        """The sessions of the latest round that may draft."""
        self._took, self._reading = 0.0, 0.0
        """Seconds of the latest drafts, and those spent on reading the text of earlier rounds."""

    def draft(self, jobs: Sequence[Job], beside: int = 0) -> list[FlatTree]:
        """Trees for all stream rounds of a batch, level by level together."""
        began = self._clock()
        self._reading = 0.0
        asked = [job for job in jobs if isinstance(job.request, Stream) and job.request.speculate]
        self._round = {job.lease: self._text(job) for job in asked}
        wanted = self.policy.plan(
            [text.acceptance for text in self._round.values()],
            (self._missed(job) for job in asked),
            beside + len(jobs) - len(asked),
        )
        requests = []
        able = []
        trees: dict[Job, DraftTree] = {}
        for job, levels in zip(asked, wanted, strict=True):
            text = self._round[job.lease]
            mask = job.mask
            text.levels = 0
            if mask is not None and mask.matcher.dear:
                continue
            room = self._target.cache.capacity - job.base - 1
            forced = forced_draft(
                mask, job.ids[-1], least=levels, most=min(self._shape.nodes, room)
            )
            if room > 0 and forced is not None:
                trees[job] = forced
                continue
            if not levels or room < 1 or not self._ready(job, text) or job.lease.draft_slot is None:
                continue
            text.levels = levels
            shape = self.policy.shape(levels)
            shape = replace(shape, nodes=min(shape.nodes, room))
            requests.append(
                DraftRequest(job.lease.draft_slot, job.ids[-1], shape, job.sampling, mask)
            )
            able.append(job)
        for job, tree in zip(able, self._drafting.draft(requests) if requests else (), strict=True):
            trees[job], text = tree, self._round[job.lease]
            text.nodes = len(tree) - 1
            text.drafted = int(max(tree.depths()))
        self._took = self._clock() - began - self._reading
        return [
            (trees[job].tokens, trees[job].parents) if job in trees else ([job.ids[-1]], [-1])
            for job in jobs
        ]

    def ran(self, accepted: Mapping[Job, int], tokens: int, seconds: float) -> None:
        """Learn what the round cost and won."""
        drafts = []
        for job, count in accepted.items():
            if (text := self._round.get(job.lease)) is not None:
                text.latest = count + 1
                if text.levels:
                    drafts.append(
                        Drafted(text.acceptance, text.levels, text.drafted, text.nodes, count)
                    )
        if self._round:
            self.policy.record(drafts, RoundTime(tokens, seconds, self._took))

    def matching(self, job: Job) -> float:
        """As many as ours win beyond plain decoding, in the same time."""
        return self.policy.matching(self._text(job).acceptance)

    def close(self, lease: Lease) -> None:
        """Give the drafting slot back."""
        self._texts.pop(lease, None)
        if lease.draft_slot is not None:
            self._drafting.close(lease.draft_slot)
            lease.draft_slot = None

    def _text(self, job: Job) -> _Text:
        if job.lease not in self._texts:
            self._texts[job.lease] = _Text(self.policy.text(job.sampling.temperature))
        return self._texts[job.lease]

    def _missed(self, job: Job) -> int | None:
        """What the drafter has to read of earlier rounds; None if it cannot draft for this one."""
        text = self._round[job.lease]
        text.missed = max(0, job.lease.length - self._known(job.lease) - text.latest)
        return text.missed if self._able(job.lease) else None

    def _ready(self, job: Job, text: _Text) -> bool:
        """Whether the drafter knows the session's text now. Reading what the latest round said is a
        part of every drafted round; what was missed before that has a price of its own."""
        if text.missed:
            began = self._clock()
            read = self._catch_up(job, self._known(job.lease) + text.missed)
            took = self._clock() - began
            self._reading += took
            text.reading += took
            if not read:
                return False
            self.policy.read(text.missed, text.reading)
            text.reading = 0.0
        return self._catch_up(job, job.lease.length)

    def _able(self, lease: Lease) -> bool:
        """Whether the drafter has, or can get, memory for this session."""
        return True

    def _known(self, lease: Lease) -> int:
        """How much of the session's text the drafter has read."""
        raise NotImplementedError

    def _catch_up(self, job: Job, stop: int) -> bool:
        """Let the drafter know the session's text up to `stop`, in `lease.draft_slot`; False when
        it cannot draft for this one."""
        raise NotImplementedError


def drafting_slots(target: Target) -> int:
    """As many full contexts as the target's KV cache holds; further sessions stream without drafts."""
    return max(1, min(target.cache.slots, target.cache.pages // target.cache.pages_per_slot))


class FeatureServerDrafting(TreeDrafting):
    """Trees by a drafter that reads states between the target's layers. They are kept nowhere: it
    takes them from every forward, and a session that it could not follow from its first token on is
    not drafted for."""

    _drafting: FeatureDrafting

    def __init__(self, target: Target, model: FeatureModel, *, shape: TreeShape) -> None:
        scratch = shape.breadth * (shape.depth + 1) + 8
        drafting = FeatureDrafting(
            model, slots=drafting_slots(target), capacity=target.cache.capacity, scratch=scratch
        )
        super().__init__(target, drafting, shape)

    def committed(self, lease: Lease, committed: Committed) -> None:
        """Take the states of these tokens."""
        if lease.draft_slot is None and not committed.start and self._drafting.pool.free:
            lease.draft_slot = self._drafting.open()
        if lease.draft_slot is not None and self._known(lease) == committed.start:
            self._drafting.take(lease.draft_slot, committed.tokens, committed.states)

    def shared(self, source: Lease, lease: Lease) -> None:
        """Copy what is known of the shared tokens."""
        if (
            source.draft_slot is not None
            and self._drafting.pool.free
            and self._known(source) >= lease.length
        ):
            lease.draft_slot = self._drafting.copy(source.draft_slot, lease.length)

    def _able(self, lease: Lease) -> bool:
        return lease.draft_slot is not None

    def _known(self, lease: Lease) -> int:
        return 0 if lease.draft_slot is None else self._drafting.pool.lengths[lease.draft_slot]

    def _catch_up(self, job: Job, stop: int) -> bool:
        return job.lease.draft_slot is not None and self._known(job.lease) == stop


class RecordDrafting(TreeDrafting):
    """Trees by the MoA drafter. A session's drafting state is built when its first stream begins,
    from its token log, its slot and its activation records, and caught up when another begins after
    rounds that the edge drafted. Subclasses give it what it has missed: `_give`."""

    _drafting: MoaDrafting | GraphDrafting

    def __init__(
        self,
        target: Target,
        drafting: MoaDrafting | GraphDrafting,
        recorder: Recorder,
        *,
        shape: TreeShape,
    ) -> None:
        super().__init__(target, drafting, shape)
        self._recorder = recorder

    def _able(self, lease: Lease) -> bool:
        return lease.records is not None and (lease.draft_slot is not None or self._drafting.free)

    def _known(self, lease: Lease) -> int:
        return 0 if lease.draft_slot is None else self._drafting.known(lease.draft_slot)

    def _catch_up(self, job: Job, stop: int) -> bool:
        lease = job.lease
        # Others may have taken the last slot in this round. And while records of a long prompt are
        # made in batches, the stream continues without drafts.
        if (
            not self._able(lease)
            or lease.records is None
            or lease.slot is None
            or not self._recorded(lease, stop)
        ):
            return False
        if lease.draft_slot is None:
            lease.draft_slot = self._drafting.open()
        self._give(job, lease.draft_slot, lease.records, stop)
        return True

    def _recorded(self, lease: Lease, stop: int) -> bool:
        """Whether records that the drafter needs to read up to `stop` are made; else a batch of
        them is."""
        return self._known(lease) == stop or self._recorder.finish(lease)

    def _give(self, job: Job, slot: int, records: RecordRows, stop: int) -> None:
        """Give a slot of the drafter the session's records and tokens up to `stop`."""
        raise NotImplementedError


class MoaServerDrafting(RecordDrafting):
    """By torch."""

    _drafting: MoaDrafting

    def __init__(
        self, target: Target, drafter: Drafter, recorder: Recorder, *, shape: TreeShape
    ) -> None:
        make: Callable[..., MoaDrafting] = partial(MoaDrafting, drafter)
        if target.graphs is not None:
            make = partial(ChainDrafting, drafter, target.graphs)
        drafting = make(
            slots=drafting_slots(target),
            capacity=target.cache.capacity,
            scratch=shape.breadth * (shape.depth + 1) + 8,
        )
        if isinstance(drafting, ChainDrafting):
            drafting.prepare()
        super().__init__(target, drafting, recorder, shape=shape)
        self._drafter = drafter

    @torch.inference_mode()
    def _give(self, job: Job, slot: int, records: RecordRows, stop: int) -> None:
        drafting = self._drafting
        start = self._drafting.known(slot)
        if start == stop or job.lease.slot is None:
            return
        if drafting.records is not None:
            # A row that could not be made stays zero.
            halves = [self._drafter.layout.split(half)[0] for half in records.read(start, stop)]
            rows = [torch.from_numpy(half).to(drafting.records.k) for half in halves]
            drafting.records.append(slot, *(half.transpose(0, 1).unsqueeze(0) for half in rows))
        if drafting.borrowed is not None:
            last = slice(-self._drafter.config.tli, None)
            keys, values = self._target.cache.read(job.lease.slot, start, stop)
            drafting.borrowed.append(slot, keys[last].transpose(1, 2), values[last].transpose(1, 2))
        drafting.read(slot, job.ids[start:stop])


class GraphServerDrafting(RecordDrafting):
    """By the drafter's exported graph: on a CPU a level takes a tenth of the time that torch takes."""

    _drafting: GraphDrafting

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        loaded: LoadedGraph,
        recorder: Recorder,
        *,
        shape: TreeShape,
    ) -> None:
        super().__init__(
            target,
            GraphDrafting(drafter, loaded, slots=drafting_slots(target)),
            recorder,
            shape=shape,
        )

    def _recorded(self, lease: Lease, stop: int) -> bool:
        late = lease.backlog[-1].stop - lease.backlog[0].start if lease.backlog else 0
        return late <= LATE or self._recorder.finish(lease)

    def _give(self, job: Job, slot: int, records: RecordRows, stop: int) -> None:
        drafting = self._drafting
        held = drafting.held(slot)
        for start, end in job.lease.made:
            while (new := held.newest_missing(end, end - start, start)) is not None:
                drafting.give(slot, new[0], *records.read(*new))
        drafting.read(slot, job.ids[drafting.known(slot) : stop])
