"""A drafter of the target's states that `moa-train` has made of the target's own answers, beside the
sibling, along answers to prompts that the training has not seen.

Its guesses are those of the bundle's graph, as a device makes them: with the newest state of the
target at hand; with states that are some tokens late; and alone, with none since the prompt, as
without a link. A sibling reads no states: its guesses are the same in all three cases.
"""

from __future__ import annotations

import json
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.kit.figures import table
from benchmarks.kit.progress import Progress
from benchmarks.real.acceptance import DEPTHS, rounds, standard_error
from benchmarks.real.lines import Line, Lines, read
from benchmarks.real.prompts import KINDS
from export.runner import Float, OrtRunner, Runner, StepInput, empty_cache
from export.source import Source, load_source
from moa.bundle import Bundle
from moa.errors import UsageError
from moa.target.loading import load_model
from moa.target.torch_target import Committed
from moa.training.data import Batch
from moa.training.loop import fast_precision
from moa.training.teacher import Teacher

LATE = 8
"""Tokens by which states are late: a slow link's."""
_LATE_EVERY = 4
"""Of the places of a text every fourth is tried with late states: each takes `LATE` steps more."""
_HELD_OUT = 3
"""One prompt in so many is held out, with all answers to it."""


# ---- what is learnt, and what is held out


class Parts(NamedTuple):
    """Lines for `moa-train`, and the answers that it does not see."""

    train: list[Line]
    held: list[Line]


def split(answers: Lines, *, longest: int, tokens: int) -> Parts:
    """Answers of at most `longest` tokens with their prompts: the greedy ones to the prompts that
    are held out, and of the others as many as have `tokens` together."""
    train: list[Line] = []
    held: list[Line] = []
    seen = 0
    # In an order that is as good as random, so that the first ones are of every kind.
    for key in sorted(answers.found, key=lambda key: zlib.crc32(key.encode())):
        answer = answers.found[key]
        ids = answer["prompt"] + answer["ids"]
        prompt, _, temperature = key.rpartition("@")
        if len(ids) > longest:
            continue
        line = {"ids": ids, "prompt_tokens": len(answer["prompt"])}
        if zlib.crc32(prompt.encode()) % _HELD_OUT == 0:
            if float(temperature) == 0:
                held.append({"key": key, **line})
        elif seen + len(ids) <= tokens:
            train.append(line)
            seen += len(ids)
    return Parts(train, held)


def write_split(work: Path, parts: Parts) -> None:
    """Write them where `moa-train` and `measure` read them."""
    for name, lines in parts._asdict().items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (work / f"{name}.jsonl").write_text(text, encoding="utf-8")


# ---- what it guesses


@dataclass
class Chains:
    """Drafts of a graph along one text. `rows` are the rows of its cache that the target's states
    make, for every token of the text."""

    runner: Runner
    ids: Sequence[int]
    rows: Sequence[Float]

    def guesses(self, known: int, first: int) -> Iterator[int]:
        """Yield the guess after each token from `first` on, where the states of the text's first
        `known` tokens are there. Every token behind those reads what the one before it made."""
        cache = [rows[:, :known] for rows in self.rows]
        for place in range(known, len(self.ids) - 1):
            step = StepInput(
                ids=[self.ids[place]],
                queries=[0],
                positions=[place],
                mask=np.ones((1, place + 1), np.bool_),
                past=cache,
                feature_rows=[place - 1],
            )
            made = self.runner.step(step)
            cache = [np.concatenate(pair, axis=1) for pair in zip(cache, made.rows, strict=True)]
            if place >= first:
                yield int(made.top_tokens[0, 0])

    def reach(self, place: int, depth: int) -> int:
        """How many tokens of a draft after `place` are right, with the newest state: a target that
        is to judge this token has computed those before it."""
        right = 0
        guesses = self.guesses(place, place)
        for token in self.ids[place + 1 : place + 1 + depth]:
            if next(guesses) != token:
                break
            right += 1
        return right

    def right_when_late(self, place: int) -> bool:
        """Whether the guess after `place` is right where states are `LATE` tokens late."""
        return next(self.guesses(place - LATE, place)) == self.ids[place + 1]

    def right_alone(self, prompt: int) -> list[bool]:
        """For each place behind the answer's first token: whether the guess is right with no state
        since the prompt."""
        guesses = self.guesses(prompt, prompt)
        return [
            guess == token for guess, token in zip(guesses, self.ids[prompt + 1 :], strict=True)
        ]


def figures_of(chains: Chains, prompt: int) -> dict[str, Any]:
    """What is counted of one text, from its answer's first token on, which comes with the prompt."""
    places = range(prompt, len(chains.ids) - 1)
    late = [chains.right_when_late(place) for place in places[LATE::_LATE_EVERY]]
    return {
        "reach": [chains.reach(place, max(DEPTHS)) for place in places],
        "late": late,
        "alone": chains.right_alone(prompt),
    }


def measure(target: str, drafter: Path, bundle: Path, held: Path, out: Lines) -> None:
    """How the drafter was trained, and every text that has no figures yet. A folder's lines are of
    one drafter."""
    opened = Bundle.open(bundle)
    about = _about(drafter, opened)
    if "drafter" in out and out.found["drafter"] != {"key": "drafter", **about}:
        raise UsageError(
            f"{out.path} is of another drafter than {drafter}", hint="take it out of WORK"
        )
    texts = [line for line in read(held) if line["key"] not in out]
    if "drafter" in out and not texts:
        return
    source = load_source(target, str(drafter))
    if not source.spec.features:
        raise UsageError(f"{drafter} reads no states of the target")
    if "drafter" not in out:
        out.add("drafter", **about)
    variant = opened.variant(opened.manifest.default_variant)
    runner = OrtRunner(opened.path(variant.model), source.spec)
    device = torch.device("cpu")
    dtype = torch.bfloat16 if fast_precision(device) == "bf16" else torch.float32
    teacher = Teacher(load_model(target, device=device, dtype=dtype).model)
    teacher.caches = False
    teacher.tap(source.module.taps)
    progress = Progress(len(texts), "texts")
    for text in texts:
        ids = text["ids"]
        chains = Chains(runner, ids, rows_of(teacher, source, ids))
        out.add(text["key"], **figures_of(chains, text["prompt_tokens"]))
        progress.step()


def _about(drafter: Path, bundle: Bundle) -> dict[str, Any]:
    """How a drafter was trained, and the size of its bundle."""
    made = json.loads((drafter / "training.json").read_text(encoding="utf-8"))
    result = made["result"]
    return {
        "steps": result["steps"],
        "seconds": result["seconds"],
        "parameters": result["parameters"],
        "rows": made["rows"],
        "tokens": made["tokens"],
        "answer_tokens": result["wanted_tokens"],
        "bundle_bytes": sum(entry.size for entry in bundle.manifest.files.values()),
    }


def rows_of(teacher: Teacher, source: Source, ids: Sequence[int]) -> list[Float]:
    """The rows of the drafter's cache that a verifier sends as records of this text: keys, then
    values, of each layer, `[heads, tokens, width]`."""
    count = len(ids)
    batch = Batch(
        ids=np.array([ids], np.int64),
        segments=np.ones((1, count), np.int64),
        positions=np.arange(count)[None],
        wanted=np.ones((1, count), np.bool_),
        rows=np.zeros(1, np.int64),
    )
    known = teacher(batch)
    pool: Any = None  # keys and values of the target, which a drafter of states does not read
    tapped = known.states[0].float()
    text = Committed(pool, 0, 0, hidden=known.hidden[0].float(), tapped=tapped, tokens=ids)
    layout = source.module.record_layout
    assert layout is not None
    rows: list[Float] = []
    for pair in zip(*map(layout.split, source.module.records([text])), strict=True):
        rows += [np.ascontiguousarray(half.transpose(1, 0, 2)) for half in pair]
    assert len(rows) == len(empty_cache(source.spec))
    return rows


# ---- tables


def figures(held: Sequence[Line], guessed: Lines, found: Lines) -> dict[str, Any]:
    """By kind of text; texts along which both have guessed."""
    cells: dict[str, list[dict[str, float]]] = {}
    for text in held:
        key = text["key"]
        if key not in found or key not in guessed:
            continue
        answer = text["ids"][text["prompt_tokens"] :]
        tops = [tokens[0] for tokens in guessed.found[key]["tokens"]]
        # The first token of an answer comes with its prompt, and is not drafted.
        sibling = [mine == theirs for mine, theirs in zip(tops, answer, strict=True)][1:]
        line = found.found[key]
        if not sibling or not line["late"]:
            continue  # too short to tell
        reach = line["reach"]
        one = {
            "sibling": statistics.fmean(sibling),
            "step": statistics.fmean(right > 0 for right in reach),
            "late": statistics.fmean(line["late"]),
            "alone": statistics.fmean(line["alone"]),
        }
        for depth in DEPTHS:
            one[f"sibling_{depth}"] = len(sibling) / len(rounds(sibling, depth))
            one[f"step_{depth}"] = len(reach) / _rounds_of(reach, depth)
        cells.setdefault(key.partition("/")[0], []).append(one)
    runs = []
    for kind in KINDS:
        if kind not in cells:
            continue
        run: dict[str, Any] = {"kind": kind, "texts": len(cells[kind])}
        for name in cells[kind][0]:
            values = [one[name] for one in cells[kind]]
            run[name] = statistics.fmean(values)
            run[f"{name}_se"] = standard_error(values)
        runs.append(run)
    return {"drafter": found.found.get("drafter", {}), "runs": runs}


def _rounds_of(reach: Sequence[int], depth: int) -> int:
    """How many rounds bring all tokens, where a draft at each place has so many right ones."""
    count = 0
    place = 0
    while place < len(reach):
        place += min(reach[place], depth) + 1
        count += 1
    return count


def tables(result: Mapping[str, Any]) -> str:
    """Right guesses by kind, and tokens a round."""
    header = ["right guesses; tokens a round with drafts of " + " and ".join(map(str, DEPTHS))]
    header += ["texts", "the sibling", "trained, newest state", f"{LATE} tokens late"]
    header.append("alone")
    rows = []
    for run in result["runs"]:
        sibling, step = (
            ", ".join([_share(run, who), *(_won(run, f"{who}_{depth}") for depth in DEPTHS)])
            for who in ("sibling", "step")
        )
        cells = [run["kind"], run["texts"], sibling, step, _share(run, "late")]
        rows.append([*cells, _share(run, "alone")])
    shown = table(header, rows)
    drafter = result["drafter"]
    if not drafter:
        return shown
    return (
        f"{shown}\n\nThe drafter has {drafter['parameters'] / 1e6:.0f} M numbers of its own and a"
        f" bundle of {drafter['bundle_bytes'] / 1e6:.0f} MB; it has learnt in {drafter['steps']}"
        f" steps from {drafter['answer_tokens']:,} tokens of the target's own answers, with their"
        f" prompts {drafter['tokens']:,}: {drafter['seconds'] / 60:.0f} minutes. Prompts of these"
        " texts are not among them. The answer's first token, which comes with the prompt, is not"
        " counted."
    )


def _share(run: Mapping[str, Any], name: str) -> str:
    return f"{100 * run[name]:.1f} ± {100 * run[f'{name}_se']:.1f} %"


def _won(run: Mapping[str, Any], name: str) -> str:
    return f"{run[name]:.2f} ± {run[f'{name}_se']:.2f}"
