"""Turns the accepted part of a draft into a decision: cuts it where the turn ends. Does not touch slots."""

from __future__ import annotations

from typing import NamedTuple

from cloud_verifier.engine.stream_drafting import FlatTree
from cloud_verifier.engine.work import Job
from moa.tree import Accepted
from moa.wire.finish import Decode, cut_path
from moa.wire.messages import Finish, Stream


class Decision(NamedTuple):
    """The accepted nodes, node 0 first, the target's token after them, and the finish reason, if any."""

    path: list[int]
    next_token: int
    finish: Finish
    done: bool
    """Whether the round ends too: a verify always does."""


def decide(accepted: Accepted, job: Job, draft: FlatTree, decode: Decode | None) -> Decision:
    """Cut the accepted part of this job's draft where the turn ends, if it does."""
    path, next_token, finish = cut_path(job.rules, job.ids, draft[0], accepted.path, accepted.next_token, decode)
    return Decision(path, next_token, finish, not isinstance(job.request, Stream) or bool(finish) or job.cancelled)
