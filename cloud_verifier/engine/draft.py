"""The server's own drafts for streams, by any drafter: policy, and how a text gets to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.records import Recorder
from moa.drafters.contract import Drafter, Drafting, DraftRequest, RecordReader, StateReader
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.grammar.matcher import forced_draft
from moa.graph.load import LoadedGraph
from moa.speculation.policy import Drafted, Policy, RoundTime, TextAcceptance
from moa.target import contract
from moa.target.torch_target import Committed, with_states
from moa.tree import DraftTree, TreeShape

FlatTree = tuple[Sequence[int], Sequence[int]]
"""Tokens and parents; node 0 is the pending token."""


class StreamDrafter:
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
    last_round_tokens: int = 0
    """To read them is a part of any drafted round."""
    unread_tokens: int = 0
    """Tokens before these that the drafter has not read yet."""
    read_seconds: float = 0.0
    """Spent on reading these so far."""
    asked_levels: int = 0
    """Of the latest round; 0: none."""
    drafted_levels: int = 0
    """Of the draft that came of it."""
    drafted_nodes: int = 0


class TreeDrafter(StreamDrafter):
    """Trees by any drafter of the engine; who drafts, and how deep, follows measured cost and
    acceptance, down to none. Subclasses give the drafter a session's text: `_able`, `_known` and
    `_catch_up`."""

    def __init__(
        self,
        target: contract.Target,
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
        asked = [job for job in jobs if job.request.speculate]
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
            text.asked_levels = 0
            if mask is not None and mask.matcher.is_slow:
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
            text.asked_levels = levels
            shape = self.policy.shape(levels)
            shape = replace(shape, nodes=min(shape.nodes, room))
            requests.append(
                DraftRequest(job.lease.draft_slot, job.ids[-1], shape, job.sampling, mask)
            )
            able.append(job)
        for job, tree in zip(able, self._drafting.draft(requests) if requests else (), strict=True):
            trees[job], text = tree, self._round[job.lease]
            text.drafted_nodes = len(tree) - 1
            text.drafted_levels = int(max(tree.depths()))
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
                text.last_round_tokens = count + 1
                if text.asked_levels:
                    drafts.append(
                        Drafted(
                            text.acceptance,
                            text.asked_levels,
                            text.drafted_levels,
                            text.drafted_nodes,
                            count,
                        )
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
        text.unread_tokens = max(
            0, job.lease.length - self._known(job.lease) - text.last_round_tokens
        )
        return text.unread_tokens if self._able(job.lease) else None

    def _ready(self, job: Job, text: _Text) -> bool:
        """Whether the drafter knows the session's text now. Reading what the latest round said is a
        part of every drafted round; what was missed before that has a price of its own."""
        if text.unread_tokens:
            began = self._clock()
            read = self._catch_up(job, self._known(job.lease) + text.unread_tokens)
            took = self._clock() - began
            self._reading += took
            text.read_seconds += took
            if not read:
                return False
            self.policy.read(text.unread_tokens, text.read_seconds)
            text.read_seconds = 0.0
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


def drafting_slots(target: contract.Target) -> int:
    """As many full contexts as the target's KV cache holds; further sessions stream without
    drafts."""
    cache = target.cache
    pages_of_a_full_slot = -(-cache.capacity // cache.page_tokens)
    return max(1, min(cache.slots, cache.pages // pages_of_a_full_slot))


def stream_drafter(
    served_by: contract.Target,
    drafter: Drafter | None,
    graph: LoadedGraph | None,
    recorder: Recorder,
    *,
    shape: TreeShape,
    small: RecordReader | None = None,
) -> StreamDrafter:
    """Who drafts streams: nobody, a small model, the drafter's exported graph, or the drafter in
    torch, whose chains are captured graphs on an accelerator."""
    if small is not None:
        return RecordFollower(served_by, small, recorder, shape=shape)
    if drafter is None:
        return StreamDrafter()
    target = with_states(served_by)
    slots = drafting_slots(target)
    if graph is not None:
        reader = OnnxDrafting(drafter, graph, slots=slots)
        return RecordFollower(target, reader, recorder, shape=shape)
    drafting: Any = drafter.drafting(
        slots=slots,
        capacity=target.cache.capacity,
        scratch=shape.breadth * (shape.depth + 1) + 8,
        graphs=target.graphs,
    )
    if drafter.taps:
        return StateFollower(target, drafting, shape)
    return RecordFollower(target, drafting, recorder, shape=shape)


class StateFollower(TreeDrafter):
    """Trees by a drafter that reads the target's states. They are kept nowhere: it takes them from
    every forward, and a session that it could not follow from its first token on is not drafted
    for."""

    _drafting: StateReader

    def committed(self, lease: Lease, committed: Committed) -> None:
        """Take the states of these tokens."""
        if lease.draft_slot is None and not committed.start and self._drafting.free:
            lease.draft_slot = self._drafting.open()
        if lease.draft_slot is not None and self._known(lease) == committed.start:
            self._drafting.take(lease.draft_slot, committed.tokens, committed.states)

    def shared(self, source: Lease, lease: Lease) -> None:
        """Copy what is known of the shared tokens."""
        if (
            source.draft_slot is not None
            and self._drafting.free
            and self._known(source) >= lease.length
        ):
            lease.draft_slot = self._drafting.copy(source.draft_slot, lease.length)

    def _able(self, lease: Lease) -> bool:
        return lease.draft_slot is not None

    def _known(self, lease: Lease) -> int:
        return 0 if lease.draft_slot is None else self._drafting.known(lease.draft_slot)

    def _catch_up(self, job: Job, stop: int) -> bool:
        return job.lease.draft_slot is not None and self._known(job.lease) == stop


class RecordFollower(TreeDrafter):
    """Trees by a drafter that reads a text later, from its tokens and its activation records, if it
    reads any. A session's drafting state is built when its first stream begins, and caught up when
    another begins after rounds that the edge drafted."""

    _drafting: RecordReader

    def __init__(
        self,
        target: contract.Target,
        drafting: RecordReader,
        recorder: Recorder,
        *,
        shape: TreeShape,
    ) -> None:
        super().__init__(target, drafting, shape)
        self._recorder = recorder

    def _able(self, lease: Lease) -> bool:
        recorded = lease.records is not None or not self._drafting.reads_records
        return recorded and (lease.draft_slot is not None or self._drafting.free)

    def _known(self, lease: Lease) -> int:
        return 0 if lease.draft_slot is None else self._drafting.known(lease.draft_slot)

    def _catch_up(self, job: Job, stop: int) -> bool:
        lease = job.lease
        # Others may have taken the last slot in this round. And while records of a long prompt are
        # made in batches, the stream continues without drafts.
        if not self._able(lease) or lease.slot is None or not self._recorded(lease, stop):
            return False
        if lease.draft_slot is None:
            lease.draft_slot = self._drafting.open()
        self._give(lease, lease.draft_slot)
        self._drafting.read(lease.draft_slot, job.ids[self._known(lease) : stop])
        return True

    def _recorded(self, lease: Lease, stop: int) -> bool:
        """Whether records that the drafter needs to read up to `stop` are made; else a batch of
        them is."""
        if not self._drafting.reads_records or self._known(lease) == stop:
            return True
        late = lease.backlog[-1].stop - lease.backlog[0].start if lease.backlog else 0
        return late <= self._drafting.record_lag or self._recorder.finish(lease)

    def _give(self, lease: Lease, slot: int) -> None:
        """Give a slot of the drafter the records that have been made since."""
        if lease.records is None or not self._drafting.reads_records:
            return
        for start, stop in lease.made:
            while (new := self._drafting.missing(slot, start, stop)) is not None:
                self._drafting.give(slot, new[0], *lease.records.read(*new))
