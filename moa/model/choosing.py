"""From a forward to the accepted nodes of each row's draft."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moa.errors import NumericalError
from moa.grammar.matcher import Bits, unpacked
from moa.logprobs import pack
from moa.model.accelerator.sampling import NO_NUMBER, Draw
from moa.model.accelerator.sampling import choose as choose_all
from moa.model.target import Step
from moa.sampling import NO_LOGITS, SamplingSettings, choose
from moa.tree import Accepted, accept, walk


class Judged(NamedTuple):
    """A row's draft, its log up to and including node 0, the sampling settings, and under a grammar
    the mask after each node (`moa.grammar.matcher.TextMask.judge`)."""

    tokens: Sequence[int]
    parents: Sequence[int]
    log: Sequence[int]
    sampling: SamplingSettings
    masks: Sequence[Bits | None] | None = None


def accept_rows(step: Step, rows: Sequence[Judged]) -> list[Accepted]:
    """The accepted nodes of each row of a forward, and the target's token after them."""
    found: dict[int, Accepted] = {}
    sampled: list[int] = []
    for b, row in enumerate(rows):
        if row.sampling.plain_greedy and row.masks is None:
            found[b] = accept(row.tokens, row.parents, step.argmax(b).tolist().__getitem__)
        else:
            sampled.append(b)
    if sampled:
        found |= (_at_once if step.samples_on_device else _by_level)(step, rows, sampled)
    return [found[b] for b in range(len(rows))]


def _at_once(step: Step, rows: Sequence[Judged], sampled: Sequence[int]) -> dict[int, Accepted]:
    """Choose after every node of these rows, on the device, then walk: logits never travel to the
    host."""
    nodes = []
    draws = []
    for b in sampled:
        row = rows[b]
        paths = list[list[int]]()
        for node, parent in enumerate(row.parents):
            paths.append([] if node == 0 else [*paths[parent], row.tokens[node]])
            allowed = row.masks[node] if row.masks is not None else None
            draws.append(
                Draw(row.sampling, len(row.log) + len(paths[node]), row.log, paths[node], allowed)
            )
            nodes.append((b, node))
    chosen = iter(choose_all(step.logits_of(nodes), draws))
    found = {}
    for b in sampled:
        tokens = [next(chosen) for _ in rows[b].tokens]
        if NO_NUMBER in tokens:
            raise NumericalError(NO_LOGITS)
        found[b] = accept(rows[b].tokens, rows[b].parents, tokens.__getitem__)
    return found


def _by_level(step: Step, rows: Sequence[Judged], sampled: Sequence[int]) -> dict[int, Accepted]:
    """Choose on the host, for the nodes that are reached alone: one product of the LM head for each
    level."""
    found: dict[int, Accepted] = {}
    walks: dict[int, tuple[Generator[int, int, Accepted], int]] = {}
    for b in sampled:
        steps = walk(rows[b].tokens, rows[b].parents)
        walks[b] = steps, next(steps)
    paths: dict[int, list[int]] = {b: [] for b in walks}  # the tokens after node 0
    seen = {b: _distinct(rows[b]) for b in walks}
    while walks:
        logits = step.logits_of([(b, node) for b, (_, node) in walks.items()]).cpu().numpy()
        for (b, (steps, _)), scores in zip(list(walks.items()), logits, strict=True):
            row = rows[b]
            path = paths[b]
            bits = row.masks[walks[b][1]] if row.masks is not None else None
            allowed = None if bits is None else unpacked(bits, len(scores))
            token = choose(scores, row.sampling, len(row.log) + len(path), seen[b], allowed)
            try:
                walks[b] = steps, steps.send(token)
                path.append(token)
                seen[b] = np.append(seen[b], token)
            except StopIteration as end:
                found[b] = end.value
                del walks[b]
    return found


def log_probabilities(
    step: Step, b: int, path: Sequence[int], chosen: Sequence[int], top: int
) -> bytes:
    """What row b's target gave the tokens it chose after the nodes of its path, and `top`
    likeliest: `moa.logprobs`."""
    logprobs = step.logits_of([(b, node) for node in path]).log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(chosen, device=logprobs.device).unsqueeze(1)).squeeze(1)
    best = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return pack(*(one.cpu().numpy() for one in (own, best.indices, best.values)))


def _distinct(row: Judged) -> NDArray[np.int64]:
    """The distinct tokens for the repetition penalty, computed once for a log and not for every
    node."""
    return np.unique(
        np.asarray(row.log if row.sampling.repetition_penalty != 1.0 else (), dtype=np.int64)
    )
