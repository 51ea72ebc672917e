"""Which tokens the grammars of a batch allow, made beside its forward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from cloud_verifier.engine.draft import FlatTree
from cloud_verifier.engine.job import Job
from moa.grammar.matcher import Bits
from moa.grammar.spec import GrammarError
from moa.target.choosing import Judged


class MaskedRows(NamedTuple):
    """The rows of a batch as the accept rule takes them, and those that are not to be judged: their
    mask was late, or their grammar is given up."""

    rows: list[Judged]
    late: set[Job]
    failed: dict[Job, GrammarError]


def mask_rows(jobs: Sequence[Job], drafts: Sequence[FlatTree], until: float) -> MaskedRows:
    """Make the masks of a batch: first of each pending token, then of the drafts, as far as these
    are there by `until`. A row without the first is run again, so that no crowd of dear grammars
    holds up the rounds of others."""
    late = set[Job]()
    failed = dict[Job, GrammarError]()
    roots = dict[Job, Bits]()
    for job in jobs:
        if (mask := job.mask) is not None:
            if (roots or failed) and time.perf_counter() >= until:
                late.add(job)
                continue
            try:
                roots[job] = mask.allowed()
            except GrammarError as error:
                failed[job] = error
    rows = []
    for job, (tokens, parents) in zip(jobs, drafts, strict=True):
        found: list[Bits | None] | None = None
        if job in late or job in failed:
            tokens = tokens[:1]
            parents = parents[:1]
            found = [None]
        elif job in roots and (mask := job.mask) is not None:
            try:
                tokens, found = mask.judge(tokens, parents, root=roots[job], until=until)
            except GrammarError:  # a node's: the draft ends before it
                tokens = tokens[:1]
                parents = parents[:1]
                found = [roots[job]]
        rows.append(Judged(tokens, parents, job.ids, job.sampling, found, start=job.rules.start))
    return MaskedRows(rows, late, failed)
