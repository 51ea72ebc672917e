"""Beside llama.cpp, in one process on the same cores, step by step in turn: the device's step, and
tokens a second with and without drafts.

Times are processor time, which other programs on the machine change little. With one thread it is
the time on a free core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil

from benchmarks.kit.figures import listing, titled
from benchmarks.kit.progress import say
from benchmarks.real import assisted
from benchmarks.real.lines import Line, Lines
from benchmarks.real.sibling import Sibling
from benchmarks.real.timing import Work, milliseconds_in_turn
from moa.bundle import Bundle
from moa.graph.cache import KVBuffer
from moa.graph.drafter import OnnxDrafter, run
from moa.graph.load import LoadedGraph
from moa.graph.step import Call
from moa.llama.library import find, load
from moa.llama.runtime import Run, Runtime, Shape
from moa.llama.target import LlamaTarget
from moa.sampling import SamplingSettings
from moa.target.contract import LoadOptions
from moa.target.rows import Row
from moa.text_stream import common_prefix
from moa.tree import TreeShape

_PAST = 256
"""Tokens before a step: a chat of some length."""
_PROMPT = 512
_TIMES = 9
STEPS = (1, 4, 8, 16)
_DRAFT = 7
"""Tokens of a draft: with the pending one a call of eight."""


def device_steps(bundle: Path, small: Path, out: Lines, *, threads: int) -> None:
    """Our graph's step and llama.cpp's on the same model."""
    sibling = Sibling(bundle, threads=threads)
    shape = Shape(
        sequences=1, capacity=1024, batch=_PROMPT, kv_type="f16", gpu_layers=0, threads=threads
    )
    theirs = Runtime(load(find("")), small, shape)
    rng = np.random.default_rng(0)
    text = rng.integers(sibling.vocabulary // 2, size=_PROMPT).tolist()  # no special tokens
    rows = KVBuffer(sibling.graph.cache)
    rows.reserve(2 * _PAST)
    silence = np.zeros((1, 1, 1), np.float32)
    theirs.run([Run(0, 0, text[:_PAST], [])])
    for count in STEPS:
        call = Call(sibling.graph, count, cache=rows.arrays, records={}, text=True)
        call.ids[0] = text[:count]
        call.positions[0] = np.arange(_PAST, _PAST + count)
        call.mask[..., :_PAST] = 0

        def llama(count: int = count) -> None:
            theirs.run([Run(0, _PAST, text[:count], [count - 1])])
            theirs.cut(0, _PAST)

        works: dict[str, Work] = {"ours": partial(call.run, silence), "llama.cpp": llama}
        found = milliseconds_in_turn(works, _TIMES)
        out.add(f"step/{count}", tokens=count, load=_load(), **found)
        say(f"step of {count}: {found}")

    loaded = LoadedGraph.load(Bundle.open(bundle), threads=threads)

    def read_ours() -> None:
        run(loaded.drafter().guess(text, SamplingSettings()))

    def read_theirs() -> None:
        theirs.clear(0)
        theirs.run([Run(0, 0, text, [len(text) - 1])])

    found = milliseconds_in_turn({"ours": read_ours, "llama.cpp": read_theirs}, 3)
    out.add("prompt", tokens=_PROMPT, load=_load(), **found)
    say(f"prompt of {_PROMPT}: {found}")
    theirs.close()


def _load() -> float:
    """Of the machine, in the last minute."""
    return round(psutil.getloadavg()[0], 1)


Drafting = Callable[[list[int]], list[int]]


def speeds(
    bundle: Path,
    big: Path,
    small: Path,
    prompts: Sequence[tuple[str, list[int]]],
    out: Lines,
    *,
    tokens: int,
    threads: int,
) -> None:
    """Tokens a second of answers to these prompts, by who drafts and who verifies."""
    prompts = [(key, ids) for key, ids in prompts if f"speed/{key}" not in out]
    if not prompts:
        return
    options = LoadOptions(slots=2, capacity=1024, threads=threads)  # the prompt's and the answer's
    exact = LlamaTarget.open(str(big), options)
    free = LlamaTarget.open(str(big), replace(options, exact=False))
    shape = Shape(
        sequences=1, capacity=1024, batch=_PAST, kv_type="f16", gpu_layers=0, threads=threads
    )
    theirs = Runtime(load(find("")), small, shape)
    ours = LoadedGraph.load(Bundle.open(bundle), threads=threads)
    for key, ids in prompts:
        drafter = ours.drafter()

        def sibling(log: list[int], drafter: OnnxDrafter = drafter) -> list[int]:
            tree = run(drafter.draft(log, TreeShape.chain(_DRAFT), SamplingSettings()))
            return tree.tokens[1:]

        ways: dict[str, tuple[LlamaTarget, Drafting | None]] = {
            "llama.cpp, plain": (free, None),
            "ours, plain": (exact, None),
            "llama.cpp, the small GGUF file drafts": (free, _Chains(theirs)),
            "ours, the sibling's bundle drafts": (exact, sibling),
            "llama.cpp's own batches, the sibling's bundle drafts": (free, sibling),
        }
        read = {target: _read(target, ids) for target in (exact, free)}
        figures = {}
        for way, (target, drafting) in ways.items():
            figures[way] = _answer(target, read[target], drafting, ids, tokens)
        for target, slot in read.items():
            target.cache.release(slot)
        out.add(f"speed/{key}", ways=figures)
        say(f"{key}: " + ", ".join(f"{way} {one['verify']:.2f}" for way, one in figures.items()))


class _Chains:
    """Greedy chains of a small model in llama.cpp, whose cache follows the text."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._held: list[int] = []

    def __call__(self, log: list[int]) -> list[int]:
        """What it guesses behind a text."""
        known = log[:-1]
        pairs = enumerate(zip(self._held, known, strict=False))
        most = min(len(self._held), len(known))
        same = next((n for n, (mine, theirs) in pairs if mine != theirs), most)
        self._runtime.cut(0, same)
        for at in range(same, len(known), _PAST):
            self._runtime.run([Run(0, at, known[at : at + _PAST], [])])
        self._held = known
        token = log[-1]
        found: list[int] = []
        for at in range(len(known), len(known) + _DRAFT):
            (logits,) = self._runtime.run([Run(0, at, [token], [0])])
            token = int(logits[0].argmax())
            found.append(token)
        self._runtime.cut(0, len(known))
        return found


def _read(target: LlamaTarget, ids: list[int]) -> int:
    """Returns a slot with all of a prompt but its last token."""
    slot = target.cache.acquire()
    for at in range(0, len(ids) - 1, 128):
        piece = ids[at : min(at + 128, len(ids) - 1)]
        target.commit(target.forward([Row.chain(slot, piece, judged="none")]), 0, range(len(piece)))
    return slot


def _answer(
    target: LlamaTarget, prompt: int, drafting: Drafting | None, ids: list[int], tokens: int
) -> dict[str, float]:
    """Seconds of drafting and of verifying an answer, its prompt not counted, which the slot
    `prompt` holds, and its rounds."""
    slot = target.cache.share(prompt, len(ids) - 1)
    log = list(ids)
    if drafting is not None:
        drafting(log)  # it reads the prompt
    seconds = {"draft": 0.0, "verify": 0.0}
    rounds = 0
    while len(log) < len(ids) + tokens:
        began = time.process_time()
        draft = drafting(log) if drafting is not None else []
        drafted = time.process_time()
        step = target.forward([Row.chain(slot, [log[-1], *draft], judged="all")])
        said = step.argmax(0).tolist()
        right = common_prefix(draft, said)
        target.commit(step, 0, range(right + 1))
        log += said[: right + 1]
        rounds += 1
        seconds["draft"] += drafted - began
        seconds["verify"] += time.process_time() - drafted
    target.cache.release(slot)
    return {**seconds, "rounds": rounds, "tokens": len(log) - len(ids)}


def figures(out: Lines) -> dict[str, Any]:
    """As they were found, and means of speeds."""
    found = out.found.values()
    return {
        "steps": [line for line in found if line["key"].startswith(("step/", "prompt"))],
        "ways": _means([line for line in found if line["key"].startswith("speed/")]),
        "library": _of_library(assisted.answers(out)),
    }


def _means(answers: Sequence[Line]) -> list[dict[str, Any]]:
    """Of each way, over all answers."""
    ways = []
    for way in answers[0]["ways"] if answers else ():
        ones = [answer["ways"][way] for answer in answers]
        tokens = sum(one["tokens"] for one in ones)
        ways.append(
            {
                "way": way,
                "answers": len(ones),
                "tokens_a_round": tokens / sum(one["rounds"] for one in ones),
                "own_machine": tokens / sum(one["verify"] for one in ones),
                "shared": tokens / sum(one["verify"] + one["draft"] for one in ones),
            }
        )
    return ways


def _of_library(answers: Sequence[Line]) -> dict[str, Any]:
    """Means of what transformers answered; nothing where it was not asked."""
    if not answers:
        return {}
    dtypes = " and ".join(sorted({answer["dtype"] for answer in answers}))
    return {"dtype": dtypes, "ways": _means(answers), "said": assisted.said(answers)}


def _step_name(step: Mapping[str, Any]) -> str:
    """What a timed step of the device was over."""
    if step["key"] == "prompt":
        return f"prompt of {step['tokens']}"
    return f"{step['tokens']} tokens"


_STEP_COLUMNS: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "the 0.5B sibling on one core": _step_name,
    "our int4 bundle": "{ours:.1f} ms",
    "llama.cpp, Q4_K_M": lambda step: f"{step['llama.cpp']:.1f} ms",
    "times": lambda step: f"{step['llama.cpp'] / step['ours']:.2f}",
    "load of the machine": lambda step: f"{step.get('load', '-')}",
}


def tables(result: dict[str, Any]) -> str:
    """Steps and speeds, each as far as it was measured."""
    parts = []
    said = []
    if steps := result["steps"]:
        parts.append(("A step of the device", listing(steps, _STEP_COLUMNS)))
        mean = fmean(one["llama.cpp"] / one["ours"] for one in steps if one["key"] != "prompt")
        said.append(f"Steps: {mean:.2f} times in the mean.")
    if ways := result["ways"]:
        title = f"Greedy answers of one core, {ways[0]['answers']} prompts"
        parts.append((title, _speeds(ways)))
    if library := result["library"]:
        count = library["ways"][0]["answers"]
        title = f"The same in transformers, weights in {library['dtype']}, {count} of the prompts"
        parts.append((title, _speeds(library["ways"])))
        said.append(library["said"])
    return f"{titled(*parts)}\n\n{' '.join(said)}".strip()


def _speeds(ways: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second by way, beside the first that decodes plainly."""
    plain = next((way for way in ways if way["tokens_a_round"] == 1), None)

    def times_plain(way: Mapping[str, Any]) -> str:
        if plain is None:
            return "-"
        return f"{way['own_machine'] / plain['own_machine']:.2f}"

    columns: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
        "": "{way}",
        "tokens a round": "{tokens_a_round:.2f}",
        "tokens/s, drafts made elsewhere": "{own_machine:.1f}",
        "times plain": times_plain,
        "tokens/s, drafts made on the same core": "{shared:.1f}",
    }
    return listing(ways, columns)
