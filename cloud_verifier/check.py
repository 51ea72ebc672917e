"""`cloud-verifier check`: capacity and speed of this machine, measured with real forwards."""

from __future__ import annotations

import json
import time
from itertools import combinations, takewhile
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from moa.cli.working import Tell, untold
from moa.target.contract import KVCache, Target
from moa.target.identity import short_id
from moa.target.rows import Row

_TREES = (1, 8, 16, 32, 64)
"""Nodes of the trees that are timed."""
_CONTEXT = 128
"""Tokens before them."""
_LENGTHS = (256, 1024, 4096, 16384)
"""Tokens of the sessions that are counted, besides those of a full context."""
_SECONDS = 1.0
"""How long each tree is timed."""
_FEW = 8
"""Of fewer times than these all are told, from the shortest to the longest; of more the middle half."""
_QUIET_PERCENT = 20
"""By so much the time of a forward varies on a machine that does nothing else."""


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
    context = min(_CONTEXT, facts.capacity // 2)
    tell(f"reading a context of {context} tokens")
    # Which tokens these are makes no difference to the time.
    step = target.forward([Row.chain(slot, [1] * context, judged="none")])
    target.commit(step, 0, range(context))
    fitting = [nodes for nodes in _TREES if context + nodes <= facts.capacity]
    trees = []
    for nodes in fitting:
        tell(f"timing forwards of {nodes} {'tokens' if nodes > 1 else 'token'}")
        trees.append(_tree_figures(target, slot, nodes))
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
        "times_vary_percent": variation,
        "busy": variation > _QUIET_PERCENT,
    }


def _tree_figures(target: Target, slot: int, nodes: int) -> dict[str, float]:
    """Returns how long a forward over a tree of so many nodes takes."""
    times = _times(target, slot, nodes)
    lower, middle, upper = quantiles(times, n=4, method="inclusive")
    if len(times) < _FEW:
        lower, upper = min(times), max(times)
    return {
        "nodes": nodes,
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
        if name == "busy":
            continue
        if isinstance(figure, list):
            if figure:
                console.print(_table(name, figure))
            continue
        is_number = type(figure) in (int, float)  # and no bool
        shown = f"{figure:,}" if is_number else figure
        console.print(f"{name.replace('_', ' ')}: {shown}")
    if figures["busy"]:
        console.print(
            f"this machine was busy: the time of a forward varied by {figures['times_vary_percent']} %;"
            " check again when nothing else runs"
        )


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
    until = time.perf_counter() + _SECONDS
    while len(times) < 3 or (time.perf_counter() < until and len(times) < 200):
        started = time.perf_counter()
        target.forward([row]).argmax(0)  # reading the result waits for the accelerator
        times.append(time.perf_counter() - started)
    return times[1:]  # the first one may be slow
