"""How many of the sibling's guesses are right along the target's own answers, and how many tokens a
round would bring: counted from its guess at every place, so that no round has to be run.

A chain is right as far as its guesses are the answer's tokens. Each guess follows right ones, so the
guess at a place is what a device would draft there, greedy or with the position's noise.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from typing import Any

from benchmarks.kit.figures import table
from benchmarks.kit.progress import Progress
from benchmarks.real.answers import sampling_of_answer
from benchmarks.real.lines import Lines
from benchmarks.real.prompts import KINDS
from benchmarks.real.sibling import Sibling
from moa.errors import UsageError

DEPTHS = (4, 10)
"""Tokens of a draft."""


def guess(sibling: Sibling, answers: Lines, out: Lines) -> None:
    """The guesses along every answer that has none yet."""
    missing = [key for key in answers.found if key not in out]
    # Answers to one prompt together, prompts in an order that is as good as random.
    missing.sort(key=lambda key: (zlib.crc32(key.partition("@")[0].encode()), key))
    progress = Progress(len(missing), "answers")
    for key in missing:
        line = answers.found[key]
        text = line["prompt"] + line["ids"]
        found = sibling.guesses(text, len(line["prompt"]), sampling_of_answer(key))
        out.add(
            key,
            variant=sibling.variant,
            tokens=[guesses.tokens for guesses in found],
            logp=[[round(one, 3) for one in guesses.logp] for guesses in found],
        )
        progress.step()


def rounds(right: Sequence[bool], depth: int) -> list[int]:
    """Tokens that each round brings: the right ones of a draft, and the target's own."""
    won = []
    at = 0
    while at < len(right):
        run = 0
        while run < depth and at + run < len(right) and right[at + run]:
            run += 1
        won.append(min(run + 1, len(right) - at))
        at += run + 1
    return won


def check(answers: Lines, guessed: Lines) -> None:
    """Raise a `UsageError` where there are guesses along answers that are not there."""
    unknown = [key for key in guessed.found if key not in answers]
    if unknown:
        raise UsageError(
            f"{guessed.path} has guesses along answers that {answers.path} lacks:"
            f" {len(unknown)}, such as {unknown[0]}",
            hint="run the verb `answers` into this WORK, or take the guesses out of it",
        )


def figures(answers: Lines, guessed: Lines) -> dict[str, Any]:
    """By kind and temperature."""
    cells: dict[tuple[str, str], list[list[bool]]] = {}
    for key, line in guessed.found.items():
        name, _, temperature = key.rpartition("@")
        own = answers.found[key]["ids"]
        right = [mine[0] == theirs for mine, theirs in zip(line["tokens"], own, strict=True)]
        cells.setdefault((name.partition("/")[0], temperature), []).append(right)
    runs = []
    for (kind, temperature), texts in cells.items():
        share = [sum(right) / len(right) for right in texts]
        run: dict[str, Any] = {
            "kind": kind,
            "temperature": float(temperature),
            "texts": len(texts),
            "tokens": sum(map(len, texts)),
            "right": statistics.fmean(share),
            "right_se": standard_error(share),
        }
        for depth in DEPTHS:
            a_round = [len(right) / len(rounds(right, depth)) for right in texts]
            run[f"won_{depth}"] = statistics.fmean(a_round)
            run[f"won_{depth}_se"] = standard_error(a_round)
        runs.append(run)
    runs.sort(key=lambda run: (KINDS.index(run["kind"]), run["temperature"]))
    return {"runs": runs}


def tables(result: dict[str, Any]) -> str:
    """A line for each kind and temperature."""
    rows = [
        [
            run["kind"],
            f"{run['temperature']:g}",
            run["texts"],
            f"{100 * run['right']:.1f} ± {100 * run['right_se']:.1f} %",
            *(f"{run[f'won_{d}']:.2f} ± {run[f'won_{d}_se']:.2f}" for d in DEPTHS),
        ]
        for run in result["runs"]
    ]
    header = ["text", "T", "texts", "right guesses"]
    header += [f"tokens a round, drafts of {depth}" for depth in DEPTHS]
    return table(header, rows)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; 0 of a single one."""
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values))
