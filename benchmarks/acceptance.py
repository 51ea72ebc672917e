"""Acceptance length by category, for chain and tree, greedy and sampled, every text checked against plain decoding.

python -m benchmarks.acceptance OUT/moa0 OUT/eagle2 --target moa/demo/target --json benchmarks/results/acceptance.json
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import prompts as held_out
from benchmarks import report
from benchmarks.baselines.registry import load_target, open_drafting
from benchmarks.baselines.train import finished
from benchmarks.exactness import count_ties
from benchmarks.provenance import write_result
from moa.errors import UsageError, run_cli
from moa.model.target import Target
from moa.sampling import SamplingSettings
from moa.speculate import Generation, GenerationSettings, Speculator
from moa.tree import TreeShape

SHAPES = {"chain": TreeShape.chain(6), "tree": TreeShape(breadth=8, depth=6, nodes=62)}
"""The paper's. Easy answers saturate them: with six levels nobody wins more than seven."""
LONG = {"long-chain": TreeShape.chain(16)}
"""Room to tell good drafters apart on easy answers."""
ALL = SHAPES | LONG


def acceptance_length(generations: Sequence[Generation]) -> dict[str, float]:
    """Tokens won per verification over all rounds, and its standard error with prompts as the independent draws."""
    rounds = [len(g.won) for g in generations]
    tokens = [sum(g.won) for g in generations]
    tau, n = sum(tokens) / sum(rounds), len(generations)
    squares = sum((t - tau * r) ** 2 for t, r in zip(tokens, rounds, strict=True))
    error = math.sqrt(squares * n / max(1, n - 1)) / sum(rounds)
    return {"tau": tau, "se": error, "prompts": n, "rounds": sum(rounds), "tokens": sum(tokens)}


def by_position(generations: Sequence[Generation], depth: int) -> list[float | None]:
    """Share of the k-th drafted tokens that were right where the k - 1 before them were; last rounds, which an end of
    the text may have cut, are left out."""
    accepted = [won - 1 for g in generations for won in g.won[:-1]]
    rates: list[float | None] = []
    for k in range(1, depth + 1):
        reached = sum(a >= k - 1 for a in accepted)
        rates.append(sum(a >= k for a in accepted) / reached if reached else None)
    return rates


def summary(categories: Sequence[str], generations: Sequence[Generation], depth: int) -> dict[str, Any]:
    """All figures of one run. The mean is over categories, each weighing the same, as the paper's is over tasks."""
    groups: dict[str, list[Generation]] = defaultdict(list)
    for category, generation in zip(categories, generations, strict=True):
        groups[category].append(generation)
    each = {category: acceptance_length(group) for category, group in groups.items()}
    error = math.sqrt(sum(c["se"] ** 2 for c in each.values())) / len(each)
    return {
        "mean": {"tau": sum(c["tau"] for c in each.values()) / len(each), "se": error},
        "categories": each,
        "by_position": by_position(generations, depth),
        "drafted_per_round": sum(g.drafted for g in generations) / sum(len(g.won) for g in generations),
    }


def generate(
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: SamplingSettings,
    shape: TreeShape | None,
) -> list[Generation]:
    """Continue every prompt by up to so many tokens."""
    return speculator.generate(
        prompts, GenerationSettings(max_new_tokens=tokens, sampling=sampling, shape=shape, adapt=False)
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every drafter over every shape and temperature; writes what there is after each."""
    examples = held_out.skill_prompts(args.per_skill, args.seed) + held_out.code_prompts(args.code)
    if not examples:
        raise UsageError("there are no prompts: --per-skill and --code are both 0")
    target = Target.load(args.target, slots=args.batch, capacity=args.capacity, device=args.device)
    prompts = [held_out.encode(target.tokenizer, example) for example in examples]
    longest = args.capacity - args.tokens
    kept = [i for i, prompt in enumerate(prompts) if len(prompt) <= longest]
    # Long and short prompts side by side waste padding.
    kept.sort(key=lambda i: len(prompts[i]))
    prompts, categories = [prompts[i] for i in kept], [examples[i].skill for i in kept]
    samplings = {t: SamplingSettings(temperature=t, seed=args.seed) for t in args.temperatures}
    plain = {}
    for temperature, sampling in samplings.items():
        began = time.perf_counter()
        plain[temperature] = [g.ids for g in generate(Speculator(target), prompts, args.tokens, sampling, None)]
        _say(f"plain decoding at T={temperature:g}: {len(prompts)} prompts in {time.perf_counter() - began:.0f} s")
    result: dict[str, Any] = {"prompts": len(prompts), "max_new_tokens": args.tokens, "seed": args.seed, "runs": []}
    for folder in args.drafters:
        target = load_target(args.target, slots=args.batch, capacity=args.capacity, drafter=folder, device=args.device)
        for temperature, sampling in samplings.items():
            for shape in args.shapes:
                began = time.perf_counter()
                speculator = Speculator(target, open_drafting(folder, target))
                generations = generate(speculator, prompts, args.tokens, sampling, ALL[shape])
                ties = count_ties(target, prompts, plain[temperature], [g.ids for g in generations], sampling)
                run = {
                    "drafter": folder.name,
                    "parameters": (finished(folder) or {}).get("parameters"),
                    "says": (finished(folder) or {}).get("says", ""),
                    "shape": shape,
                    "temperature": temperature,
                    **summary(categories, generations, ALL[shape].depth),
                    "texts_parted_at_a_tie": ties,
                }
                result["runs"].append(run)
                mean, seconds = run["mean"], time.perf_counter() - began
                _say(f"{folder.name} {shape} T={temperature:g}: {mean['tau']:.3f} ± {mean['se']:.3f}, {seconds:.0f} s")
        write_result(args.json, result)
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("drafters", nargs="+", type=Path, metavar="FOLDER", help="drafters: MoA's or a baseline's")
    parser.add_argument("--target", required=True)
    parser.add_argument("--per-skill", type=int, default=20, help="prompts of each skill (default 20)")
    parser.add_argument("--code", type=int, default=40, help="prompts of Python to continue (default 40)")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens per prompt (default 128)")
    parser.add_argument("--batch", type=int, default=16, help="prompts at a time (default 16)")
    parser.add_argument("--capacity", type=int, default=640, help="longest prompt and answer together (default 640)")
    parser.add_argument("--shapes", nargs="+", choices=sorted(ALL), default=sorted(SHAPES))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    args = parser().parse_args(argv)
    print(report.acceptance_tables(measure(args)))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.acceptance", main))
