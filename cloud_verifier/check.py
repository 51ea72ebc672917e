"""`cloud-verifier check`: capacity and speed of this machine, measured with real forwards."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import combinations, takewhile
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from moa.cli.working import Tell, roughly, untold
from moa.process.busy import slowdown
from moa.target.contract import KVCache, Target
from moa.target.identity import short_id
from moa.target.rows import Row

_TREES = (1, 8, 16, 32, 64)
"""Nodes of the trees that are timed."""
_CONTEXT = 128
"""Tokens before them, if reading them does not take too long."""
_PIECE = 2
"""Tokens of them that are read first: how long that takes tells of the others."""
_LENGTHS = (256, 1024, 4096, 16384)
"""Tokens of the sessions that are counted, besides those of a full context."""
_SECONDS = 1.0
"""How long each tree is timed, if its forwards are fast."""
_LEAST_TIMES = 3
"""Forwards of each tree, if they are not too slow."""
_LONGEST = 20.0
"""Seconds that timing one tree may take, or reading the context: a tree whose forward takes longer
is left out."""
_FEW = 8
"""Of fewer times than these all are told, from the shortest to the longest; of more the middle half."""
_QUIET_PERCENT = 20
"""By so much the time of a forward varies on a machine that does nothing else."""
_BUSY_SLOWDOWN = 3.0
"""A machine that is slowed down so much by its load does something else, too: a check on all cores
slows it down by 2."""


def measure(settings: Settings, tell: Tell = untold) -> dict[str, Any]:
    """Load the target and return the figures of this machine: memory, sessions, and how long a
    forward over trees of several sizes takes behind a short context. `tell` is told what is being
    done: with a real model each part takes long."""
    started = time.perf_counter()
    tell("loading the model")
    served = load(settings)
    loaded = time.perf_counter() - started
    target = served.target
    facts = served.facts
    full_context = settings.limits.context_within(facts.capacity)
    slot = target.cache.acquire()
    most = min(_CONTEXT, facts.capacity // 2)
    tell(f"reading a context of {most} tokens")
    context, a_token = _read_context(target, slot, most)
    fitting = [nodes for nodes in _TREES if context + nodes <= facts.capacity]
    trees = _time_trees(target, slot, fitting, a_token, tell)
    timed = [tree["nodes"] for tree in trees]
    variation = _variation(trees)
    cache = target.cache
    machine = target.machine
    memory = target.memory
    return {
        "target": target.facts.family,
        "decoder": target.capabilities.decoder,
        "batch_invariant": target.capabilities.batch_invariant,
        "verified_means": target.capabilities.promise,
        "computes": short_id(facts.computes),
        "device": machine.device,
        "machine": machine.hardware,
        "dtype": machine.dtype,
        "load_seconds": round(loaded, 2),
        "slots": facts.slots,
        "context_tokens": full_context,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "kv_tokens": cache.pages * cache.page_tokens,
        "kv_bytes": memory.kv_bytes,
        "buffer_bytes": memory.buffer_bytes,
        "fits": [
            {"tokens": length, "sessions": sessions_of(cache, length)}
            for length in [*takewhile(full_context.__gt__, _LENGTHS), full_context]
        ],
        "records": facts.records is not None,
        "drafts": served.drafts,
        "context": context,
        "trees": trees,
        "not_timed": [nodes for nodes in fitting if nodes not in timed],
        "times_vary_percent": variation,
        "busy": variation > _QUIET_PERCENT or _is_loaded(trees),
    }


def _read_context(target: Target, slot: int, most: int) -> tuple[int, float]:
    """Read a context of `most` tokens, or of as many as can be read in `_LONGEST` seconds. Returns
    their number, and how long a token of the last piece took."""
    read = 0
    piece = min(_PIECE, most)
    a_token = 0.0
    started = time.perf_counter()
    while piece and time.perf_counter() - started + piece * a_token <= _LONGEST:
        begun = time.perf_counter()
        # Which tokens these are makes no difference to the time.
        step = target.forward([Row.chain(slot, [1] * piece, judged="none")])
        target.commit(step, 0, range(piece))
        a_token = (time.perf_counter() - begun) / piece
        read += piece
        piece = min(read, most - read)
    return read, a_token


def _time_trees(
    target: Target, slot: int, sizes: Sequence[int], a_token: float, tell: Tell
) -> list[dict[str, float]]:
    """Time trees of these sizes, the smallest first, and tell how long the rest takes. Those are
    left out whose forward would take longer than `_LONGEST` seconds, by what smaller ones took and
    by what a token of the context did: once, perhaps while other programs had the processor, so
    that a tree which was timed counts more."""
    trees: list[dict[str, float]] = []
    last = 0.0
    for place, nodes in enumerate(sizes):
        forwards = [max(last, size * a_token) for size in sizes[place:]]
        if forwards[0] > _LONGEST:
            break  # larger ones take longer still
        rest = sum(
            min(_LONGEST, max(_SECONDS, _LEAST_TIMES * one)) for one in forwards if one <= _LONGEST
        )
        name = f"{nodes} {'tokens' if nodes > 1 else 'token'}"
        tell(f"timing forwards of {name}, about {roughly(rest)} s left")
        trees.append(_tree_figures(target, slot, nodes))
        last = trees[-1]["ms"] / 1000
        # A part of a forward is the same for all sizes: no token of a larger tree takes longer.
        a_token = min(a_token, last / nodes)
    return trees


def _tree_figures(target: Target, slot: int, nodes: int) -> dict[str, float]:
    """Returns how long a forward over a tree of so many nodes takes."""
    times = _times(target, slot, nodes)
    lower = middle = upper = times[0]
    if len(times) > 1:
        lower, middle, upper = quantiles(times, n=4, method="inclusive")
    if len(times) < _FEW:
        lower, upper = min(times), max(times)
    return {
        "nodes": nodes,
        "times": len(times),
        "ms": round(1000 * middle, 3),
        "from_ms": round(1000 * lower, 3),
        "to_ms": round(1000 * upper, 3),
        "verified_per_second": round(nodes / middle, 1),
    }


def _variation(trees: list[dict[str, float]]) -> int:
    """By how many per cent of its median the time of a forward varies in the tree whose times vary
    most; or, where that is more, by how many a tree took longer than a larger one. A forward over
    one token is left out there, which may run by other kernels."""
    shares = [(one["to_ms"] - one["from_ms"]) / one["ms"] for one in trees]
    several = [one["ms"] for one in trees if one["nodes"] > 1]
    shares += [smaller / larger - 1 for smaller, larger in combinations(several, 2)]
    return round(100 * max(shares, default=0.0))


def _is_loaded(trees: list[dict[str, float]]) -> bool:
    """Whether other programs have the processor, where that cannot be told from the times: a tree
    was timed once."""
    return any(tree["times"] == 1 for tree in trees) and slowdown() > _BUSY_SLOWDOWN


def sessions_of(cache: KVCache, tokens: int) -> int:
    """How many sessions of so many tokens the KV cache holds."""
    pages = -(-tokens // cache.page_tokens)
    return min(cache.slots, cache.pages // pages)


def show(figures: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures as JSON, or for people: a line each, lists as tables."""
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    console = Console()
    for name, figure in figures.items():
        if name in ("busy", "not_timed"):
            continue
        if isinstance(figure, list):
            if figure:
                console.print(_table(name, figure))
            continue
        is_number = type(figure) in (int, float)  # and no bool
        shown = f"{figure:,}" if is_number else figure
        console.print(f"{name.replace('_', ' ')}: {shown}")
    if figures["not_timed"]:
        left_out = ", ".join(map(str, figures["not_timed"]))
        console.print(
            f"not timed: {left_out} nodes, for a forward would take longer than {_LONGEST:.0f} s"
        )
    if figures["busy"]:
        why = "other programs use its processor"
        if figures["times_vary_percent"] > _QUIET_PERCENT:
            why = f"the time of a forward varied by {figures['times_vary_percent']} %"
        console.print(f"this machine was busy: {why}; check again when nothing else runs")


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows of figures as a table, whose columns are named as those of the first row."""
    table = Table(*(column.replace("_", " ") for column in rows[0]), title=title)
    for row in rows:
        table.add_row(*(f"{figure:,}" for figure in row.values()))
    return table


def _times(target: Target, slot: int, nodes: int) -> list[float]:
    """Seconds of forwards that verify a draft of `nodes` tokens: a tree where the target verifies
    trees, else a chain."""
    parents = [-1] + [max(0, node // 2 - 1) for node in range(1, nodes)]
    row = Row.chain(slot, [1] * nodes, judged="all")
    if target.capabilities.trees:
        row = Row(slot, [1] * nodes, parents)
    times: list[float] = []
    began = time.perf_counter()
    spent = 0.0
    while len(times) < _LEAST_TIMES or (spent < _SECONDS and len(times) < 200):
        if times and spent + times[-1] > _LONGEST:
            break
        started = time.perf_counter()
        target.forward([row]).argmax(0)  # reading the result waits for the accelerator
        ended = time.perf_counter()
        times.append(ended - started)
        spent = ended - began
    return times[1:] or times  # the first one may be slow
