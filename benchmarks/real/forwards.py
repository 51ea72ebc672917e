"""A verifier's forward beside llama.cpp's own call on the same tokens, in turn in one process; and
what each of the two takes of memory.

llama.cpp is told nothing of ours here: one call for the whole batch, its own kernels, keys and
values in float16. Times are processor time, which other programs on the machine change little; with
one thread it is the time on a free core.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.figures import listing, titled
from benchmarks.kit.progress import say
from benchmarks.real.lines import Lines
from benchmarks.real.timing import Work, milliseconds_in_turn
from moa.llama.library import find, load
from moa.llama.runtime import Run, Runtime, Shape
from moa.llama.target import LlamaTarget
from moa.process.memory import resident_bytes
from moa.target.contract import LoadOptions
from moa.target.rows import Row

SHAPES = (
    *((1, tokens) for tokens in (1, 2, 3, 4, 8, 16, 32)),
    *((sessions, 1) for sessions in (4, 8)),
    *((sessions, 8) for sessions in (4, 8)),
)
"""Sessions, and tokens of each."""
_SESSIONS = 8
_PAST = 128
"""Tokens of each session before the forward."""
_CAPACITY = 1024
_PROMPT = 64
"""Tokens that are read before memory is looked at; all buffers are there from the start."""
_UBATCH = 512
"""llama.cpp's own most tokens of a call."""
_TIMES = 7
_LONG = 8192
"""Tokens of a session where memory is compared: the verifier's own capacity."""
_PLACES = 2
"""Sessions there: those whose memory a verifier takes at its start."""


def measure(target: str, out: Lines, *, threads: int, library: str = "") -> None:
    """Forwards that are not in `out` yet. `library` is a build of llama.cpp other than the
    installed one."""
    shapes = [shape for shape in SHAPES if _key(*shape) not in out]
    if shapes:
        options = LoadOptions(slots=_SESSIONS, capacity=_CAPACITY, threads=threads, library=library)
        ours = LlamaTarget.open(target, options)
        theirs = _plain(target, library, sequences=_SESSIONS, capacity=_CAPACITY, threads=threads)
        pair = _Pair(ours, theirs)
        for sessions, tokens in shapes:
            pair.forward(out, sessions, tokens)
        ours.close()
        theirs.close()
    for way, taken in (("ours", _taken_by_ours), ("llama.cpp", _taken_by_llama)):
        if f"memory/{way}" not in out:
            facts = _elsewhere(taken, target, library, threads)
            out.add(f"memory/{way}", way=way, **facts)
            say(f"memory, {way}: {facts}")


def _key(sessions: int, tokens: int) -> str:
    return f"{sessions}/{tokens}"


def _plain(target: str, library: str, *, sequences: int, capacity: int, threads: int) -> Runtime:
    """llama.cpp as it is by itself."""
    shape = Shape(
        sequences=sequences,
        capacity=capacity,
        batch=_UBATCH,
        kv_type="f16",
        gpu_layers=0,
        threads=threads,
    )
    return Runtime(load(find(library)), Path(target), shape)


def _text(vocab_size: int) -> list[int]:
    """Tokens as they come: a forward takes as long for any."""
    found: list[int] = np.random.default_rng(0).integers(0, vocab_size, _PAST).tolist()
    return found


class _Pair:
    """The two of them, with the same texts in as many sessions."""

    def __init__(self, ours: LlamaTarget, theirs: Runtime) -> None:
        self._ours = ours
        self._theirs = theirs
        self._text = _text(ours.facts.vocab_size)
        self._slots: list[int] = []

    def _begin(self, sessions: int) -> None:
        """Have so many sessions, each with a text before the forward."""
        for session in range(len(self._slots), sessions):
            slot = self._ours.cache.acquire()
            self._slots.append(slot)
            step = self._ours.forward([Row.chain(slot, self._text, "none")])
            self._ours.commit(step, 0, range(_PAST))
            self._theirs.run([Run(session, 0, self._text, [])])

    def forward(self, out: Lines, sessions: int, tokens: int) -> None:
        """Every token's logits, of a row in each session."""
        self._begin(sessions)
        ids = self._text[:tokens]
        rows = [Row.chain(slot, ids, "all") for slot in self._slots[:sessions]]
        runs = [Run(session, _PAST, ids, list(range(tokens))) for session in range(sessions)]

        def ours() -> None:
            step = self._ours.forward(rows)
            for row in range(sessions):
                step.argmax(row)

        def back() -> None:
            for session in range(sessions):
                self._theirs.cut(session, _PAST)

        works: dict[str, Work] = {"ours": ours, "llama.cpp": partial(self._theirs.run, runs)}
        found = milliseconds_in_turn(works, _TIMES, undo={"llama.cpp": back})
        out.add(_key(sessions, tokens), sessions=sessions, tokens=tokens, **found)
        say(f"forward of {sessions} x {tokens}: {found}")


# ---- memory


_Taken = Callable[[str, str, int], dict[str, float]]


def _elsewhere(taken: _Taken, target: str, library: str, threads: int) -> dict[str, float]:
    """What a process of its own finds."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(taken, (target, library, threads))


def _taken_by_ours(target: str, library: str, threads: int) -> dict[str, float]:
    before = resident_bytes()
    options = LoadOptions(slots=_PLACES, capacity=_LONG, threads=threads, library=library)
    ours = LlamaTarget.open(target, options)
    slot = ours.cache.acquire()
    text = _text(ours.facts.vocab_size)
    ours.commit(ours.forward([Row.chain(slot, text[:_PROMPT], "none")]), 0, range(_PROMPT))
    ours.forward([Row.chain(slot, text[:8], "all")]).argmax(0)
    return _megabytes(before)


def _taken_by_llama(target: str, library: str, threads: int) -> dict[str, float]:
    before = resident_bytes()
    theirs = _plain(target, library, sequences=_PLACES, capacity=_LONG, threads=threads)
    text = _text(theirs.vocab_size)
    theirs.run([Run(0, 0, text[:_PROMPT], [_PROMPT - 1])])
    theirs.run([Run(0, _PROMPT, text[:8], list(range(8)))])
    return _megabytes(before)


def _megabytes(before: int) -> dict[str, float]:
    now = resident_bytes()
    return {"before": before / 1e6, "model": (now - before) / 1e6, "process": now / 1e6}


# ---- tables


_COLUMNS: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "sessions x tokens": "{sessions} x {tokens}",
    "forward": "{ours:.0f} ms",
    "llama.cpp's own call": lambda one: f"{one['llama.cpp']:.0f} ms",
    "times": lambda one: f"{one['ours'] / one['llama.cpp']:.2f}",
}
_MEMORY: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "resident": "{way}",
    "the model, its sessions and buffers": "{model:.0f} MB",
    "the process": "{process:.0f} MB",
}


def figures(out: Lines) -> dict[str, Any]:
    """As they were found."""
    found = list(out.found.values())
    return {
        "runs": [line for line in found if "sessions" in line],
        "memory": [line for line in found if line["key"].startswith("memory/")],
    }


def tables(result: dict[str, Any]) -> str:
    """A line for each forward, and memory."""
    parts = [("A forward, one core", listing(result["runs"], _COLUMNS))]
    if result["memory"]:
        title = f"Memory, {_PLACES} sessions of {_LONG:,} tokens"
        parts.append((title, listing(result["memory"], _MEMORY)))
    least = min((one["ours"] / one["llama.cpp"] for one in result["runs"]), default=math.nan)
    most = max((one["ours"] / one["llama.cpp"] for one in result["runs"]), default=math.nan)
    return f"{titled(*parts)}\n\nForwards: {least:.2f} to {most:.2f} times llama.cpp's own call."
