"""Which tokens the grammars of a batch allow, found beside its forward."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from cloud_verifier.engine.draft import FlatTree
from cloud_verifier.engine.job import Job
from moa.grammar.matcher import Bits, TextMask
from moa.grammar.spec import GrammarError
from moa.target.choosing import Judged


class MaskedRows(NamedTuple):
    """The rows of a batch, in the order of its jobs, as the accept rule takes them; and the jobs
    whose rows are there only to keep that order."""

    rows: Sequence[Judged]
    late: Collection[Job] = ()
    """Jobs for whose pending token there was no time: they run again."""
    failed: Mapping[Job, GrammarError] = MappingProxyType({})
    """Jobs whose grammar is given up."""


def mask_rows(jobs: Sequence[Job], rows: Sequence[Judged], until: float) -> MaskedRows:
    """Returns the rows of these jobs with the tokens that each grammar allows after the nodes of
    its draft. The masks of the pending tokens, which all rounds need, are made first, then those of
    the drafts, until the time `until` (of `time.perf_counter`).

    A draft ends where its masks do. A round without even the first mask runs again, so that
    expensive grammars do not hold up the rounds of others.
    """
    pending, late, failed = _pending_masks(jobs, until)
    masked = []
    for job, row in zip(jobs, rows, strict=True):
        tokens = row.tokens
        masks: list[Bits | None] | None = None  # every token is allowed
        if job in late or job in failed:
            # The row stands there to keep the order, with its pending token alone.
            tokens = tokens[:1]
            masks = [None]
        elif job in pending and job.mask is not None:
            tokens, masks = _judge(job.mask, (tokens, row.parents), pending[job], until)
        parents = row.parents[: len(tokens)]
        masked.append(row._replace(tokens=tokens, parents=parents, masks=masks))
    return MaskedRows(masked, late, failed)


def _judge(
    mask: TextMask, draft: FlatTree, after_pending: Bits, until: float
) -> tuple[Sequence[int], list[Bits | None]]:
    """Returns the tokens of a draft, and for each the mask of tokens that the grammar allows after
    it, as far as there is time until `until`. If the grammar raises at a drafted token, only the
    pending one is left, whose mask is `after_pending`."""
    tokens, parents = draft
    try:
        return mask.judge(tokens, parents, root=after_pending, until=until)
    except GrammarError:
        return tokens[:1], [after_pending]


def _pending_masks(
    jobs: Sequence[Job], until: float
) -> tuple[dict[Job, Bits], set[Job], dict[Job, GrammarError]]:
    """Returns which tokens each job's grammar allows after its pending token, the jobs for which
    there was no time, and those whose grammar raised. One mask is made whatever the time: else a
    batch of slow grammars would never move on."""
    masks = dict[Job, Bits]()
    late = set[Job]()
    failed = dict[Job, GrammarError]()
    for job in jobs:
        mask = job.mask
        if mask is None:
            continue
        is_first = not (masks or failed)
        if not is_first and time.perf_counter() >= until:
            late.add(job)
            continue
        try:
            masks[job] = mask.allowed()
        except GrammarError as error:
            failed[job] = error
    return masks, late, failed
