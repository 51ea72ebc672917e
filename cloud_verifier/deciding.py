"""From what the target accepts of a draft to a decision: it is cut where the turn ends. Touches no slot."""

from __future__ import annotations

from typing import NamedTuple

from cloud_verifier.stream_drafting import FlatTree
from cloud_verifier.work import Job
from moa.tree import Accepted
from moa.wire.finish import Decode, cut_path
from moa.wire.messages import Finish, Stream


class Decision(NamedTuple):
    """The accepted nodes, node 0 first, the target's own token after them, and why the turn ends there, if it does."""

    path: list[int]
    next_token: int
    finish: Finish
    done: bool
    """Whether the round ends too: a verify always does."""


def decide(accepted: Accepted, job: Job, draft: FlatTree, decode: Decode | None) -> Decision:
    """Where this job's turn ends, if it does, in what the target has accepted of its draft."""
    path, next_token, finish = cut_path(job.rules, job.ids, draft[0], accepted.path, accepted.next_token, decode)
    return Decision(path, next_token, finish, not isinstance(job.request, Stream) or bool(finish) or job.cancelled)
