"""`cloud-verifier check`: capacity and speed of this machine, measured with real forwards."""

from __future__ import annotations

import json
import platform
import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from moa.model.pages import PAGE
from moa.model.target import Row, Target

_TREES = (1, 8, 16, 32, 64)
_CONTEXT = 128
_LENGTHS = (256, 1024, 4096, 16384)
_SECONDS = 1.0


def measure(settings: Settings) -> dict[str, Any]:
    """Load the target, then time trees of several sizes behind a short context."""
    started = time.perf_counter()
    served = load(settings)
    loaded = time.perf_counter() - started
    target = served.target
    facts = served.facts
    slot = target.pool.acquire()
    context = min(_CONTEXT, facts.capacity // 2)
    step = target.forward([Row.chain(slot, [1] * context, judged="none")])
    target.commit(step, 0, range(context))
    trees = []
    for nodes in _TREES:
        if context + nodes <= facts.capacity:
            ms = 1000 * _time(target, slot, nodes)
            trees.append(
                {
                    "nodes": nodes,
                    "ms": round(ms, 3),
                    "verified_per_second": round(1000 * nodes / ms, 1),
                }
            )
    return {
        "target": target.facts.family,
        "device": str(target.device),
        "machine": _machine(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "load_seconds": round(loaded, 2),
        "slots": facts.slots,
        "context_tokens": facts.capacity
        - max(settings.limits.max_tree_nodes, settings.limits.max_chain_tokens),
        "kv_bytes_per_token": target.pool.bytes_per_token,
        "kv_tokens": target.pool.pages * PAGE,
        "kv_bytes": target.pool.nbytes,
        "buffer_bytes": 0 if target.runner is None else target.runner.nbytes,
        "fits": [
            {"tokens": n, "sessions": min(target.pool.slots, target.pool.pages // -(-n // PAGE))}
            for n in _LENGTHS
            if n <= target.pool.capacity
        ],
        "records": facts.records is not None,
        "drafts": served.drafts,
        "context": context,
        "trees": trees,
    }


def show(figures: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    console = Console()
    for name, found in figures.items():
        if not isinstance(found, list):
            console.print(
                f"{name.replace('_', ' ')}: {f'{found:,}' if type(found) in (int, float) else found}"
            )
        elif found:
            table = Table(*(column.replace("_", " ") for column in found[0]), title=name)
            for row in found:
                table.add_row(*(f"{figure:,}" for figure in row.values()))
            console.print(table)


def _time(target: Target, slot: int, nodes: int) -> float:
    """Median seconds of verifying a tree of `nodes`."""
    row = Row(slot, [1] * nodes, [-1] + [max(0, node // 2 - 1) for node in range(1, nodes)])
    times: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(times) < 3 or (time.perf_counter() < until and len(times) < 200):
        started = time.perf_counter()
        target.forward([row]).argmax(0)  # reading the result waits for the accelerator
        times.append(time.perf_counter() - started)
    return median(times[1:])


def _machine(target: Target) -> str:
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} {'thread' if threads == 1 else 'threads'}"
