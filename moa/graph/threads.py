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

from moa.graph.step import Call, StepGraph, default_threads, layer_rows, usable_cores
from moa.process.memory import give_back_free_memory
from moa.process.user_folders import cache_folder

WORTH_MEASURING = 64 << 20
"""Bytes of a variant from which it is measured: a smaller one takes a millisecond or two in any case."""
_SECONDS = 0.4
"""Seconds for the steps of all candidates together; loading the second one comes on top."""
_LEAST_RUNS = 3
"""Steps of each candidate at least, however long they take."""
_FASTER = 0.9
"""Another number of threads is taken if its steps take less than this share of the usual number's
time. So noise changes nothing."""
_BUSY = 0.5
"""Load of a core from which nothing is measured: others' work would decide."""
_CACHED_ROWS = 256
"""Rows of the cache in a measured step: a chat of some length."""
_LARGEST_ANSWER = 10_000
"""Bytes that are read of a kept answer: it is a line."""
_MOST_THREADS = 1024
"""A kept answer with more is damaged."""


def fastest(model: Path, identity: str) -> StepGraph:
    """Load a graph with the number of threads that is the fastest on this machine. It is measured
    once, between the usual number and twice as many, and kept under the graph's `identity`; not
    for small graphs, and not while other work would disturb the measurement."""
    usual = default_threads()
    more = min(2 * usual, usable_cores())
    size = sum(file.stat().st_size for file in model.parent.iterdir() if file.is_file())
    if more <= usual or size < WORTH_MEASURING:
        return StepGraph(model, threads=usual)
    answer_file = _answer_file(identity)
    known = _read_answer(answer_file)
    if known is not None:
        return StepGraph(model, threads=min(known, usable_cores()))
    graph = StepGraph(model, threads=usual)
    if _is_busy():
        return graph
    graphs = {usual: graph, more: StepGraph(model, threads=more)}
    chosen = _measure(graphs, usual, answer_file)
    graph = graphs.pop(chosen)
    graphs.clear()
    give_back_free_memory()  # the other session's copy of the weights
    return graph


def _measure(graphs: Mapping[int, StepGraph], usual: int, answer_file: Path) -> int:
    """Measure graphs by their number of threads, and keep which is the fastest. Returns that
    number."""
    times = _measured(graphs)
    chosen = pick(times, usual)
    if not _is_busy():  # else the times may be those of others' work: measured again next time
        _write_answer(answer_file, chosen, times)
    return chosen


def pick(times: Mapping[int, float], usual: int) -> int:
    """The number of threads for these times of a step."""
    best = min(times, key=lambda threads: times[threads])
    return best if times[best] < _FASTER * times[usual] else usual


def _measured(graphs: Mapping[int, StepGraph]) -> dict[int, float]:
    """The median seconds of a step with each number of threads. Steps are run in turns, so that
    what disturbs one disturbs the others, too."""
    calls = {threads: _call(graph) for threads, graph in graphs.items()}
    no_noise = np.zeros((1, 1, 1), np.float32)
    for call in calls.values():
        call.run(no_noise)  # the first run also allocates: it does not count
    samples: dict[int, list[float]] = {threads: [] for threads in calls}
    runs = 0
    deadline = perf_counter() + _SECONDS
    while runs < _LEAST_RUNS or perf_counter() < deadline:
        for threads, call in calls.items():
            samples[threads].append(call.run(no_noise))
        runs += 1
    return {threads: median(seconds) for threads, seconds in samples.items()}


def _call(graph: StepGraph) -> Call:
    """A call to be measured: one token after a chat of some length, with empty caches."""
    cache = layer_rows(graph.cache, _CACHED_ROWS)
    records: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    if graph.records is not None:
        shape = (1, graph.records.count, 1, graph.records.width)
        records = {name: np.zeros(shape, np.float32) for name in ("record_k", "record_v")}
        records["record_mask"] = np.zeros((1, 1, 1, 1), np.float32)
    call = Call(graph, 1, cache=cache, records=records, text=True)
    call.mask[..., :_CACHED_ROWS] = 0
    call.positions.fill(_CACHED_ROWS)
    return call


def _is_busy() -> bool:
    """Whether other work on this machine would disturb a measurement."""
    try:
        return os.getloadavg()[0] > _BUSY * usable_cores()
    except (OSError, AttributeError):  # Windows
        return False


def _answer_file(identity: str) -> Path:
    """The file that keeps the answer for this graph, processor and runtime."""
    words = [identity, str(usable_cores()), onnxruntime.__version__]
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
    return cache_folder("threads") / f"{digest[:32]}.json"


def _read_answer(file: Path) -> int | None:
    """The number of threads that an earlier measurement kept in this file; None where there is
    none, or a damaged one."""
    try:
        found = json.loads(file.read_bytes()[:_LARGEST_ANSWER])["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if type(found) is not int or not 1 <= found <= _MOST_THREADS:
        return None
    return found


def _write_answer(file: Path, threads: int, times: Mapping[int, float]) -> None:
    """Keep the answer. Where it cannot be written it is measured again next time."""
    milliseconds = {str(count): round(1000 * seconds, 3) for count, seconds in times.items()}
    answer = {"threads": threads, "ms": milliseconds}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps(answer), encoding="ascii")
        partial.replace(file)  # so that nobody reads half of it
