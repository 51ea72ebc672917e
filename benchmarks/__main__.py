"""`make bench`, or `python -m benchmarks`: every experiment on the embedded pair, one after another.

Each writes `benchmarks/results/NAME.json`, with hardware, commit and command, and its tables as `NAME.md`; `make docs`
puts them into docs/results.md and draws docs/pictures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moa.demo import paths
from moa.errors import UsageError, run_cli

RESULTS = Path(__file__).parent / "results"
WEIGHTS = Path(__file__).parent / "baselines" / "weights"
"""Drafters to compare with the embedded one, as `benchmarks.baselines.train --out` leaves them. They fit one target
alone, so none is kept here: train them for the pair at hand."""


@dataclass(frozen=True)
class Experiment:
    """A module of this package, its arguments, and about how long it takes on two idle cores."""

    name: str
    says: str
    command: tuple[str, ...]
    minutes: float
    on_request: bool = False
    """Run only when it is named: all the others together stay below half an hour."""


def experiments() -> list[Experiment]:
    """All of them, in the order of docs/results.md."""
    demo = paths()
    pair = ("--target", str(demo.target))
    baselines = [str(file.parent) for file in sorted(WEIGHTS.glob("*/config.json"))]
    # Drafters that also stand alone as a model: what the target's answers and assisted generation are compared with.
    alone = [folder for folder in baselines if Path(folder).name.startswith("independent")]
    independent = ("--independent", *alone) if alone else ()
    sizes = ("--per-skill", "3", "--code", "12")
    return [
        Experiment(
            "accuracy",
            "right answers of the target, and of an independent model of the drafter's size",
            ("accuracy", *pair, *independent),
            0.5,
        ),
        Experiment(
            "accuracy_asked",
            "the same in ways of asking that training lacked",
            ("accuracy", "--asked", *pair, *independent),
            0.5,
        ),
        Experiment(
            "accuracy_fresh",
            "the same in three skills that no training knew",
            ("accuracy", "--fresh", "16", *pair, *independent),
            0.3,
        ),
        Experiment(
            "acceptance",
            "tokens won per verification, by category",
            ("acceptance", str(demo.drafter), *baselines, *pair, *sizes),
            5,
        ),
        Experiment(
            "drafters_offline",
            "right answers after the link is cut, by drafter",
            ("drafters_offline", str(demo.drafter), *baselines, *pair),
            2,
        ),
        Experiment(
            "speed",
            "tokens per second on one device",
            ("speed", str(demo.drafter), *baselines, *pair, *independent[:2]),
            4,
        ),
        Experiment("client_links", "speed, calls and bytes by link", ("client_links", "--prompts", "4"), 5),
        Experiment("client_slow", "the same with a slow target", ("client_slow", "--prompts", "4"), 4.5),
        Experiment("client_records", "acceptance by lag, precision and rows held", ("client_records",), 0.5),
        Experiment("client_offline", "accuracy after the link is cut", ("client_offline", "--per-skill", "2"), 0.5),
        Experiment("client_reconnect", "the link returns after 1, 5, 20 s", ("client_reconnect",), 1),
        Experiment("client_many", "sixteen conversations over one connection", ("client_many",), 0.5),
        Experiment("client_cuts", "the link cut at random bytes", ("client_cuts", "--cuts", "200"), 1),
        Experiment("capacity", "readers that one verifier holds", ("capacity",), 4),
        Experiment("timeline", "one round as a trace", ("timeline",), 0.2),
        Experiment("client_exact", "1,400 answers over every link", ("client_exact",), 4, on_request=True),
        Experiment("server_load", "the verifier under load", ("server_load", "all"), 3, on_request=True),
        Experiment(
            "acceptance_long",
            "tokens won per verification, with room for sixteen",
            (
                "acceptance",
                str(demo.drafter),
                *baselines,
                *pair,
                *sizes,
                "--shapes",
                "long-chain",
                "--temperatures",
                "0",
            ),
            2,
            on_request=True,
        ),
        Experiment(
            "speed_1024",
            "tokens per second on one device, a larger random target",
            ("speed", "--random", "--tokens", "64"),
            2,
            on_request=True,
        ),
    ]


def run(experiment: Experiment, results: Path) -> float:
    """Run one in a process of its own, so that none warms or starves another; its minutes."""
    began = time.perf_counter()
    module, *arguments = experiment.command
    command = [
        sys.executable,
        "-m",
        f"benchmarks.{module}",
        *arguments,
        "--json",
        str(results / f"{experiment.name}.json"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{experiment.name} failed with exit code {done.returncode}", hint="what it said is above")
    (results / f"{experiment.name}.md").write_text(done.stdout.strip() + "\n", encoding="utf-8")
    return (time.perf_counter() - began) / 60


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="run only when named: " + ", ".join(e.name for e in experiments() if e.on_request),
    )
    parser.add_argument("only", nargs="*", metavar="NAME", help="run these alone; some run only so")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and for how long")
    parser.add_argument("--json", action="store_true", help="print the minutes each took as JSON")
    args = parser.parse_args()
    plan = experiments()
    if unknown := set(args.only) - {experiment.name for experiment in plan}:
        known = ", ".join(experiment.name for experiment in plan)
        raise UsageError(f"no experiment {sorted(unknown)[0]!r}", hint=f"there are {known}")
    plan = [e for e in plan if e.name in args.only or not (args.only or e.on_request)]
    if args.dry_run:
        for experiment in plan:
            print(f"{experiment.name:16} about {experiment.minutes:.1f} min  {experiment.says}")
        print(f"{'in all':16} about {sum(experiment.minutes for experiment in plan):.0f} min")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    took: dict[str, float] = {}
    for number, experiment in enumerate(plan, start=1):
        left = sum(other.minutes for other in plan[number - 1 :])
        print(f"[{number}/{len(plan)}] {experiment.says}; about {left:.0f} min to go", file=sys.stderr, flush=True)
        took[experiment.name] = round(run(experiment, args.out), 2)
    print(
        json.dumps(took)
        if args.json
        else f"done in {sum(took.values()):.1f} min; `make docs` puts it into the documents"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks", main))
