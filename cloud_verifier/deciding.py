"""From a forward to a decision: the target's own choices along a draft, cut where the turn ends. Touches no slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cloud_verifier.streaming import Draft
from cloud_verifier.work import Job
from moa.model.target import Step
from moa.sampling import choose
from moa.tree import accept, depths
from moa.wire.finish import Decode, cut_path
from moa.wire.messages import Finish, Stream


class Decision(NamedTuple):
    """The accepted nodes, node 0 first, the target's own token after them, and why the turn ends there, if it does."""

    path: list[int]
    next_token: int
    finish: Finish
    done: bool
    """Whether the round ends too: a verify always does."""


def decide(step: Step, b: int, job: Job, draft: Draft, decode: Decode | None) -> Decision:
    """What the target says to row b of a forward, which is this job's draft."""
    tokens, parents = draft
    accepted = accept(tokens, parents, _chooser(step, b, job, tokens, parents))
    path, next_token, finish = cut_path(job.rules, job.ids, tokens, accepted.path, accepted.next_token, decode)
    if not isinstance(job.request, Stream):
        return Decision(path, next_token, finish, True)
    return Decision(path, next_token, finish, bool(finish) or job.cancelled)


def _chooser(step: Step, b: int, job: Job, tokens: Sequence[int], parents: Sequence[int]) -> Callable[[int], int]:
    if job.sampling.plain_greedy:
        best = step.argmax(b)
        return lambda node: int(best[node])
    depth = depths(parents)
    penalized = job.sampling.repetition_penalty != 1.0

    def chosen(node: int) -> int:
        context = [*job.ids[:-1], *_path_tokens(node, tokens, parents)] if penalized else ()
        logits = step.logits(b, [node])[0].cpu().numpy()
        return choose(logits, job.sampling, job.base + int(depth[node]) + 1, context)

    return chosen


def _path_tokens(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
