"""Acceptance length by category, for chain and tree, greedy and sampled, every text checked against
plain decoding."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.baselines.registry import load_target, open_drafting
from benchmarks.baselines.train import finished
from benchmarks.kit.exactness import count_ties
from benchmarks.kit.figures import table, titled
from benchmarks.kit.options import one_of
from benchmarks.kit.pair import Compared
from benchmarks.kit.progress import Progress, say
from demo import held_out
from demo.skills import Example
from moa.errors import UsageError
from moa.sampling import SamplingSettings
from moa.target.torch_target import Target
from moa.tree import TreeShape
from testing.speculator import Generation, GenerationSettings, Speculator

PAPER = {"chain": TreeShape.chain(6), "tree": TreeShape(breadth=8, depth=6, nodes=62)}
"""The paper's shapes. Easy answers saturate them: with six levels no drafter gets more than seven
tokens a round."""
SHAPES = PAPER | {"long-chain": TreeShape.chain(16)}
"""Deeper ones, which separate good drafters on easy answers."""
YARDSTICK = "eagle2"
"""The drafter with which the others are compared, if it took part."""


@dataclass(frozen=True, kw_only=True)
class Drafted(Compared):
    """How it is drafted."""

    tokens: int = 128
    """Tokens of an answer at most."""
    batch: int = 16
    """Prompts at a time."""
    shapes: tuple[str, ...] = one_of(tuple(PAPER), SHAPES)
    """Shapes of drafts."""
    temperatures: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Options(Drafted):
    """What is drafted."""

    per_skill: int = 3
    """Held-out prompts of each skill."""
    code: int = 12
    """Pieces of Python to continue."""


def acceptance_length(generations: Sequence[Generation]) -> dict[str, float]:
    """Tokens won per verification over all rounds, and its standard error with prompts as the
    independent draws."""
    rounds = [len(g.won) for g in generations]
    tokens = [sum(g.won) for g in generations]
    tau = sum(tokens) / sum(rounds)
    n = len(generations)
    squares = sum((t - tau * r) ** 2 for t, r in zip(tokens, rounds, strict=True))
    error = math.sqrt(squares * n / max(1, n - 1)) / sum(rounds)
    return {"tau": tau, "se": error, "prompts": n, "rounds": sum(rounds), "tokens": sum(tokens)}


def by_position(generations: Sequence[Generation], depth: int) -> list[float | None]:
    """Share of right k-th drafted tokens, given that the k - 1 before them were right; last rounds,
    which the end of the text may have cut, are left out."""
    accepted = [won - 1 for g in generations for won in g.won[:-1]]
    reached = [sum(a >= k for a in accepted) for k in range(depth + 1)]
    return [now / before if before else None for before, now in pairwise(reached)]


def summary(
    categories: Sequence[str], generations: Sequence[Generation], depth: int
) -> dict[str, Any]:
    """All figures of one run. The mean is over categories, each weighing the same, as the paper's
    is over tasks."""
    groups: dict[str, list[Generation]] = defaultdict(list)
    for category, generation in sorted(
        zip(categories, generations, strict=True), key=lambda one: one[0]
    ):
        groups[category].append(generation)
    each = {category: acceptance_length(group) for category, group in groups.items()}
    error = math.sqrt(sum(c["se"] ** 2 for c in each.values())) / len(each)
    return {
        "mean": {"tau": sum(c["tau"] for c in each.values()) / len(each), "se": error},
        "categories": each,
        "by_position": by_position(generations, depth),
        "drafted_per_round": sum(g.drafted for g in generations)
        / sum(len(g.won) for g in generations),
    }


def measure(options: Options) -> dict[str, Any]:
    """Run every drafter over every shape and temperature."""
    examples = held_out.skill_prompts(options.per_skill, options.seed) + held_out.code_prompts(
        options.code
    )
    return compare(options, [(example.skill, example) for example in examples])


def compare(options: Drafted, examples: Sequence[tuple[str, Example]]) -> dict[str, Any]:
    """The same with prompts by category."""
    room: dict[str, Any] = {
        "slots": options.batch,
        "capacity": options.capacity,
        "device": options.device,
    }
    target = Target.load(options.target, **room)
    asked = [
        (held_out.encode(target.tokenizer, example), category) for category, example in examples
    ]
    asked = [one for one in asked if len(one[0]) + options.tokens <= options.capacity]
    if not asked:
        raise UsageError("no prompt and its answer fit in --capacity")
    asked.sort(key=lambda one: len(one[0]))  # sort by length, to avoid padding
    prompts = [prompt for prompt, _ in asked]
    categories = [category for _, category in asked]

    def generate(
        speculator: Speculator, sampling: SamplingSettings, shape: TreeShape | None
    ) -> list[Generation]:
        settings = GenerationSettings(max_new_tokens=options.tokens, sampling=sampling, shape=shape)
        return speculator.generate(prompts, settings)

    samplings = {
        t: SamplingSettings(temperature=t, seed=options.seed) for t in options.temperatures
    }
    say(f"plain decoding of {len(prompts)} prompts")
    plain = {
        t: [g.ids for g in generate(Speculator(target), s, None)] for t, s in samplings.items()
    }
    runs: list[dict[str, Any]] = []
    progress = Progress(len(options.folders) * len(samplings) * len(options.shapes), "runs")
    for folder in options.folders:
        target = load_target(options.target, drafter=folder, **room)
        trained = finished(folder) or {}
        for temperature, sampling in samplings.items():
            for name in options.shapes:
                found = generate(
                    Speculator(target, open_drafting(folder, target)), sampling, SHAPES[name]
                )
                ties = count_ties(
                    target, prompts, plain[temperature], [g.ids for g in found], sampling
                )
                run = {
                    "drafter": folder.name,
                    "parameters": trained.get("parameters"),
                    "steps": trained.get("steps"),
                    "says": trained.get("says", ""),
                    "shape": name,
                    "temperature": temperature,
                    **summary(categories, found, SHAPES[name].depth),
                    "texts_parted_at_a_tie": ties,
                }
                runs.append(run)
                progress.step(f"{folder.name} {name} T={temperature:g}: {run['mean']['tau']:.3f}")
    return {
        "prompts": len(prompts),
        "max_new_tokens": options.tokens,
        "seed": options.seed,
        "runs": runs,
    }


def tables(result: Mapping[str, Any]) -> str:
    """Acceptance by category and by position, one pair of tables for each shape and temperature."""
    parts = []
    for shape, temperature in dict.fromkeys(
        (run["shape"], run["temperature"]) for run in result["runs"]
    ):
        runs = [r for r in result["runs"] if (r["shape"], r["temperature"]) == (shape, temperature)]
        depth = len(runs[0]["by_position"])
        rows = [
            [r["drafter"], *("-" if p is None else f"{p:.2f}" for p in r["by_position"])]
            for r in runs
        ]
        positions = table(["drafter", *map(str, range(1, depth + 1))], rows)
        says = "Share of drafted tokens accepted at position k, given that all before it were:"
        title = f"Acceptance length (± standard error), {shape}, T = {temperature:g}"
        parts.append((title, f"{_by_category(runs)}\n\n{says}\n\n{positions}"))
    return f"{titled(*parts)}\n\n{checked(result)}"


def checked(result: Mapping[str, Any]) -> str:
    """How many texts were compared with plain decoding's."""
    ties = sum(run["texts_parted_at_a_tie"] for run in result["runs"])
    texts = len(result["runs"]) * result["prompts"]
    return f"All {texts:,} texts equal plain decoding" + (
        f", {ties} up to a numerical tie." if ties else "."
    )


def _by_category(runs: Sequence[Mapping[str, Any]]) -> str:
    yardstick = next((r["mean"]["tau"] for r in runs if r["drafter"] == YARDSTICK), None)
    rows = [["**mean**", *("**{tau:.2f}** ± {se:.2f}".format(**run["mean"]) for run in runs)]]
    if yardstick:
        rows.append(
            [f"vs {YARDSTICK}", *(f"{run['mean']['tau'] / yardstick:.2f}x" for run in runs)]
        )
    for category in runs[0]["categories"]:
        rows.append(
            [
                category,
                *("{tau:.2f} ± {se:.2f}".format(**run["categories"][category]) for run in runs),
            ]
        )
    return table(["category", *(run["drafter"] for run in runs)], rows)
