"""The server's own drafts for streams, by any drafter: whether and how deep, and how a session's text
gets to the drafter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.records import Recorder
from moa.drafters.contract import Drafter, Drafting, DraftRequest, RecordReader, StateReader
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.errors import DraftError
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
        """Returns a draft for each stream of a batch: tokens that may follow its pending token, the
        last one of its text, which the target has not run yet. `beside` other tokens are in the
        same forward."""
        return [([job.ids[-1]], [-1]) for job in jobs]

    def ran(self, accepted: Mapping[Job, int], tokens: int, seconds: float) -> None:
        """Learn from the forward over the latest drafts: how many drafted tokens were accepted of
        each stream, how many tokens the forward had, and its seconds with those of what
        followed."""

    def matching(self, job: Job) -> float:
        """The accepted nodes that a draft of the edge must promise, to be verified in place of one
        of ours."""
        return 0.0

    def committed(self, lease: Lease, committed: Committed) -> None:
        """Learn of the latest tokens that the lease's slot holds now."""

    def shared(self, source: Lease, lease: Lease) -> None:
        """Learn that the lease's slot has begun as a copy of the first tokens of another's."""

    def close(self, lease: Lease) -> None:
        """Give back what is kept for the lease."""


@dataclass
class _Text:
    """A session's text: how well drafts for it do, and what the drafter has read of it."""

    acceptance: TextAcceptance
    last_round_tokens: int = 0
    """Tokens of the latest round: to read them is a part of any drafted round."""
    unread_tokens: int = 0
    """Tokens before these that the drafter has not read yet."""
    read_seconds: float = 0.0
    """Seconds spent on reading these so far."""
    asked_levels: int = 0
    """Levels that a draft was asked to have in the latest round; 0: none was asked for."""
    drafted_levels: int = 0
    """Levels of the draft that came of it."""
    drafted_nodes: int = 0
    """Nodes of that draft."""


def check_draft(draft: FlatTree, *, pending: int, vocabulary: int, room: int) -> None:
    """Raise a `DraftError` unless this is a tree of tokens after the token `pending`, with at most
    `room` nodes beside it. The target would take node 0 for the pending token whatever it is, and
    go on with another text."""
    tokens, parents = draft
    if len(tokens) != len(parents) or not tokens:
        raise DraftError("a drafter's tree has not one parent for each token")
    if tokens[0] != pending or parents[0] != -1:
        raise DraftError("node 0 of a drafter's tree is not the pending token, with the parent -1")
    if len(tokens) - 1 > max(0, room):
        raise DraftError(f"a drafter's tree has {len(tokens) - 1} nodes where {room} have room")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise DraftError(f"a drafter's tree has tokens outside of a vocabulary of {vocabulary}")
    comes_later = any(parent >= node for node, parent in enumerate(parents))
    if comes_later or min(parents[1:], default=0) < 0:
        raise DraftError("a parent in a drafter's tree does not come before its child")


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
        """Draft for `target` by `drafting`; `shape` is the largest tree."""
        self._target = target
        self._drafting = drafting
        self._shape = shape
        self._clock = clock
        self.policy = Policy(shape, varies=target.machine.weights_on_disk)
        """Decides whether and how deep to draft."""
        self._texts: dict[Lease, _Text] = {}
        """What is known of each session's text."""
        self._round: dict[Lease, _Text] = {}
        """The sessions of the latest round that may be drafted for."""
        self._draft_seconds = 0.0
        """Seconds of the latest drafts, without reading the text of earlier rounds."""
        self._reading_seconds = 0.0
        """Seconds that were spent on that."""

    def draft(self, jobs: Sequence[Job], beside: int = 0) -> list[FlatTree]:
        """Returns a tree of guessed tokens for each stream of a batch. Where drafting does not pay,
        or is not possible, the tree has only the pending token: plain decoding."""
        began = self._clock()
        self._reading_seconds = 0.0
        trees = self._trees([job for job in jobs if job.request.speculate], len(jobs) + beside)
        self._draft_seconds = self._clock() - began - self._reading_seconds
        drafts: list[FlatTree] = []
        for job in jobs:
            if job in trees:
                drafts.append((trees[job].tokens, trees[job].parents))
            else:
                drafts.append(([job.ids[-1]], [-1]))
        return drafts

    def _trees(self, jobs: Sequence[Job], plain_tokens: int) -> dict[Job, DraftTree]:
        """Returns trees for those of these rounds that are to have one, by measured cost and
        acceptance. A forward without any draft would have `plain_tokens` tokens."""
        self._round = {job.lease: self._text(job) for job in jobs}
        worth = worth_by_share([job.lease.principal for job in jobs])
        wanted_levels = self.policy.plan(
            [text.acceptance for text in self._round.values()],
            (self._missed(job) for job in jobs),
            plain_tokens - len(jobs),
            worth,
        )
        trees: dict[Job, DraftTree] = {}
        requests: dict[Job, DraftRequest] = {}
        for job, levels, token_worth in zip(jobs, wanted_levels, worth, strict=True):
            self._round[job.lease].asked_levels = 0
            mask = job.mask
            if mask is not None and mask.matcher.is_slow:
                continue  # a draft needs a mask after each node: here that takes too long
            room = self._target.cache.capacity - job.base - 1  # nodes that the KV cache can take
            if room < 1:
                continue
            forced = forced_draft(
                mask, job.ids[-1], least=levels, most=min(self._shape.nodes, room)
            )
            if forced is not None:
                # The grammar allows nothing else: no drafter could do better.
                trees[job] = forced
                continue
            request = self._request(job, levels, room, token_worth)
            if request is not None:
                requests[job] = request
        if requests:
            trees |= self._drafted(requests)
        return trees

    def _request(self, job: Job, levels: int, room: int, worth: float) -> DraftRequest | None:
        """Returns what to ask the drafter for: a tree of so many levels, with at most `room` nodes,
        for a text of which a token is `worth` so much. None if it is to make none, or cannot
        now."""
        text = self._round[job.lease]
        if not levels or not self._ready(job, text) or job.lease.draft_slot is None:
            return None
        text.asked_levels = levels
        shape = self.policy.shape(levels, worth)
        shape = replace(shape, nodes=min(shape.nodes, room))
        return DraftRequest(job.lease.draft_slot, job.ids[-1], shape, job.sampling, job.mask)

    def _drafted(self, requests: Mapping[Job, DraftRequest]) -> dict[Job, DraftTree]:
        """Have the drafter make these trees, and note how large they have become."""
        trees = self._drafting.draft(list(requests.values()))
        drafted = dict(zip(requests, trees, strict=True))
        for job, tree in drafted.items():
            text = self._round[job.lease]
            text.drafted_nodes = len(tree) - 1  # without the pending token
            text.drafted_levels = int(max(tree.depths()))
        return drafted

    def ran(self, accepted: Mapping[Job, int], tokens: int, seconds: float) -> None:
        """Teach the policy, which decides where to draft and how deep, what the round has cost and
        won."""
        drafts = []
        for job, count in accepted.items():
            text = self._round.get(job.lease)
            if text is None:
                continue
            text.last_round_tokens = count + 1  # the target's own token comes behind them
            if text.asked_levels:
                drafts.append(
                    Drafted(
                        text=text.acceptance,
                        asked=text.asked_levels,
                        levels=text.drafted_levels,
                        nodes=text.drafted_nodes,
                        accepted=count,
                    )
                )
        if self._round:
            self.policy.record(drafts, RoundTime(tokens, seconds, self._draft_seconds))

    def matching(self, job: Job) -> float:
        """The accepted nodes that our drafts win beyond plain decoding, in the same time."""
        return self.policy.matching(self._text(job).acceptance)

    def close(self, lease: Lease) -> None:
        """Give the drafting slot back."""
        self._texts.pop(lease, None)
        if lease.draft_slot is not None:
            self._drafting.close(lease.draft_slot)
            lease.draft_slot = None

    def _text(self, job: Job) -> _Text:
        """What is known of the session's text; a new one does as its temperature does elsewhere."""
        if job.lease not in self._texts:
            self._texts[job.lease] = _Text(self.policy.text(job.sampling.temperature))
        return self._texts[job.lease]

    def _missed(self, job: Job) -> int | None:
        """Returns how many tokens of earlier rounds the drafter has not read yet; None if it cannot
        draft for this session."""
        text = self._round[job.lease]
        behind = job.lease.length - self._known(job.lease)
        # Those of the latest round are read in any case, as a part of drafting.
        text.unread_tokens = max(0, behind - text.last_round_tokens)
        return text.unread_tokens if self._able(job.lease) else None

    def _ready(self, job: Job, text: _Text) -> bool:
        """Let the drafter read the session's text; returns whether it has read all of it now. The
        time for tokens of earlier rounds is measured by itself: the policy weighs it against what
        drafts win. To read the latest round's is a part of drafting."""
        if text.unread_tokens:
            began = self._clock()
            has_read = self._catch_up(job, self._known(job.lease) + text.unread_tokens)
            took = self._clock() - began
            self._reading_seconds += took
            text.read_seconds += took
            if not has_read:
                return False
            self.policy.read(text.unread_tokens, text.read_seconds)
            text.read_seconds = 0.0
        return self._catch_up(job, job.lease.length)

    def _able(self, lease: Lease) -> bool:
        """Whether the drafter has, or can get, memory for this session."""
        return True

    def _known(self, lease: Lease) -> int:
        """How many tokens of the session's text the drafter has read."""
        raise NotImplementedError

    def _catch_up(self, job: Job, stop: int) -> bool:
        """Let the drafter read the session's text up to `stop`, in `lease.draft_slot`; returns
        False when it cannot now."""
        raise NotImplementedError


def drafting_slots(target: contract.Target) -> int:
    """The slots of a drafter: as many full contexts as the target's KV cache holds. Further
    sessions stream without drafts."""
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
    """Returns what drafts for streams: a small model, the exported graph of the target's drafter,
    that drafter in torch, or nothing, which is plain decoding."""
    if small is not None:
        return RecordFollower(served_by, small, recorder, shape=shape)
    if drafter is None:
        return StreamDrafter()
    target = with_states(served_by)
    slots = drafting_slots(target)
    if graph is not None:
        reader = OnnxDrafting(drafter, graph, slots=slots)
        return RecordFollower(target, reader, recorder, shape=shape)
    # Cache rows for the nodes of one draft: the likeliest of each level, and a few more.
    scratch = shape.breadth * (shape.depth + 1) + 8
    drafting: Any = drafter.drafting(
        slots=slots, capacity=target.cache.capacity, scratch=scratch, graphs=target.graphs
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
        """Give the drafter the target's hidden states of tokens that have joined the text. It must
        have read those of all tokens before: without them it cannot follow."""
        is_first = committed.start == 0
        if lease.draft_slot is None and is_first and self._drafting.free:
            lease.draft_slot = self._drafting.open()
        if lease.draft_slot is not None and self._known(lease) == committed.start:
            self._drafting.take(lease.draft_slot, committed.tokens, committed.states)

    def shared(self, source: Lease, lease: Lease) -> None:
        """Copy what the drafter knows of the shared tokens, if it knows all of them."""
        knows_all = source.draft_slot is not None and self._known(source) >= lease.length
        if knows_all and source.draft_slot is not None and self._drafting.free:
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
        """Draft for `target` by `drafting`, which may read the activation records that `recorder`
        makes."""
        super().__init__(target, drafting, shape)
        self._recorder = recorder

    def _able(self, lease: Lease) -> bool:
        recorded = lease.records is not None or not self._drafting.reads_records
        return recorded and (lease.draft_slot is not None or self._drafting.free)

    def _known(self, lease: Lease) -> int:
        return 0 if lease.draft_slot is None else self._drafting.known(lease.draft_slot)

    def _catch_up(self, job: Job, stop: int) -> bool:
        """Let the drafter read the session's text up to `stop`, with the activation records that it
        needs for that; returns False if it cannot now."""
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
        """Whether the records are there that the drafter needs to read the text up to `stop`. If
        they are not, a batch of them is made now."""
        if not self._drafting.reads_records or self._known(lease) == stop:
            return True
        missing = lease.backlog[-1].stop - lease.backlog[0].start if lease.backlog else 0
        if missing <= self._drafting.record_lag:
            return True  # it drafts well without the latest ones
        return self._recorder.finish(lease)

    def _give(self, lease: Lease, slot: int) -> None:
        """Give a slot of the drafter the records that have been made since it was given the last."""
        if lease.records is None or not self._drafting.reads_records:
            return
        for start, stop in lease.made:
            while (new := self._drafting.missing(slot, start, stop)) is not None:
                self._drafting.give(slot, new[0], *lease.records.read(*new))


def worth_by_share(principals: Sequence[str]) -> list[float]:
    """What a token of each text counts, by the text's principal: all principals together the same,
    and 1 on average. So who reads one answer beside one who reads sixty keeps the drafts that a
    share of the engine pays for."""
    texts = Counter(principals)
    share = len(principals) / max(1, len(texts))
    return [share / texts[principal] for principal in principals]
