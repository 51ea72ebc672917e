"""How many threads a drafter's step gets: measured once on this machine, and kept.

Half of the cores is a good guess: other work goes on beside a step, and siblings of one core share
its bandwidth. But where cores are few, or bandwidth is left, twice as many threads are up to 1.5
times as fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import onnxruntime

from moa.graph.step import Call, LayerRows, StepGraph, default_threads, usable_cores
from moa.process.memory import give_back_free_memory
from moa.process.user_folders import cache_folder

WORTH_MEASURING = 64 << 20
"""Bytes of a variant from which it is measured: a smaller one takes a millisecond or two in any case."""
_SECONDS = 0.4
"""For the steps of all candidates together; loading the second one comes on top."""
_LEAST_RUNS = 3
_FASTER = 0.9
"""Of the usual number's time: what another one must reach to be taken. So noise changes nothing."""
_BUSY = 0.5
"""Load of a core from which nothing is measured: others' work would decide."""
_PAST = 256
"""Rows of the cache in a measured step: a chat of some length."""


def fastest(model: Path, identity: str) -> StepGraph:
    """The graph with the number of threads that is the fastest here; `identity` stands for its
    content."""
    usual = default_threads()
    more = min(2 * usual, usable_cores())
    size = sum(file.stat().st_size for file in model.parent.iterdir() if file.is_file())
    if more <= usual or size < WORTH_MEASURING:
        return StepGraph(model, threads=usual)
    place = _place(identity)
    if (kept := _kept(place)) is not None:
        return StepGraph(model, threads=min(kept, usable_cores()))
    graph = StepGraph(model, threads=usual)
    if _is_busy():
        return graph
    graphs = {usual: graph, more: StepGraph(model, threads=more)}
    times = _measured(graphs)
    chosen = pick(times, usual)
    if not _is_busy():
        _keep(place, chosen, times)
    graph = graphs.pop(chosen)
    graphs.clear()
    give_back_free_memory()  # the other session's copy of the weights
    return graph


def pick(times: Mapping[int, float], usual: int) -> int:
    """The number of threads for these times of a step."""
    best = min(times, key=lambda threads: times[threads])
    return best if times[best] < _FASTER * times[usual] else usual


def _measured(graphs: Mapping[int, StepGraph]) -> dict[int, float]:
    """The median seconds of a step with each, taken in turns: what disturbs one disturbs the others."""
    calls = {threads: _call(graph) for threads, graph in graphs.items()}
    silence = np.zeros((1, 1, 1), np.float32)
    for call in calls.values():
        call.run(silence)
    taken: dict[int, list[float]] = {threads: [] for threads in calls}
    until = perf_counter() + _SECONDS
    while perf_counter() < until or len(next(iter(taken.values()))) < _LEAST_RUNS:
        for threads, call in calls.items():
            taken[threads].append(call.run(silence))
    return {threads: median(seconds) for threads, seconds in taken.items()}


def _call(graph: StepGraph) -> Call:
    cache = LayerRows(graph.cache, _PAST).arrays
    records: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    if graph.records is not None:
        shape = (1, graph.records.count, 1, graph.records.width)
        records = {name: np.zeros(shape, np.float32) for name in ("record_k", "record_v")}
        records["record_mask"] = np.zeros((1, 1, 1, 1), np.float32)
    call = Call(graph, 1, cache=cache, records=records, text=True)
    call.mask[..., :_PAST] = 0
    call.positions.fill(_PAST)
    return call


def _is_busy() -> bool:
    try:
        return os.getloadavg()[0] > _BUSY * usable_cores()
    except (OSError, AttributeError):  # Windows
        return False


def _place(identity: str) -> Path:
    """Where the answer for this graph, processor and runtime is kept."""
    words = [identity, str(usable_cores()), onnxruntime.__version__]
    return (
        cache_folder("threads")
        / f"{hashlib.sha256(' '.join(words).encode()).hexdigest()[:32]}.json"
    )


def _kept(place: Path) -> int | None:
    try:
        found = json.loads(place.read_bytes()[:10_000])["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if type(found) is int and 1 <= found <= 1024 else None


def _keep(place: Path, threads: int, times: Mapping[int, float]) -> None:
    """Without a place to write to, it is measured again."""
    found = {"threads": threads, "ms": {str(n): round(1000 * t, 3) for n, t in times.items()}}
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_name(f"{place.name}.{os.getpid()}")
        beside.write_text(json.dumps(found), encoding="ascii")
        beside.replace(place)
