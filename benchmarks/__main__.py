"""The experiments: `python -m benchmarks NAME... --out DIR`. Without a name all of them but those
on request.

A single experiment has its own options: `python -m benchmarks client_links --help`. Several run one
after another, each in its own process, so that they do not affect each other. With --out each
writes NAME.json, with hardware, commit and command, and its tables as NAME.md; `make docs` puts
them into docs/results.md.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks.experiments import EXPERIMENTS, ON_REQUEST, Experiment
from benchmarks.kit.options import add_flags, options_from
from benchmarks.kit.progress import say
from benchmarks.provenance import origin, write_result
from moa.errors import MoaError, UsageError, run_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    named = list(takewhile(lambda word: not word.startswith("-"), argv))
    alone = chosen(named)[0] if len(named) == 1 else None
    parser = parser_for(alone)
    args = parser.parse_args(argv[len(named) :])
    plan = chosen([*named, *args.NAME]) or [
        e for e in EXPERIMENTS.values() if e.name not in ON_REQUEST
    ]
    if args.dry_run:
        for experiment in plan:
            print(f"{experiment.name:18} about {experiment.minutes:4.1f} min  {experiment.says}")
        print(f"{'in all':18} about {sum(experiment.minutes for experiment in plan):4.1f} min")
        return 0
    if alone is not None:
        run(alone, args)
        return 0
    return run_each(plan, args)


def parser_for(alone: Experiment | None) -> argparse.ArgumentParser:
    """The runner's flags, and those of a single experiment."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks{f' {alone.name}' if alone else ''}",
        description=alone.load().__doc__ if alone else __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=None
        if alone
        else f"there are {', '.join(EXPERIMENTS)}; only when named: {', '.join(sorted(ON_REQUEST))}",
    )
    if alone:
        add_flags(parser, alone.load().Options)
        parser.set_defaults(NAME=[], **alone.preset)
    else:
        parser.add_argument("NAME", nargs="*")
    own = parser.add_argument_group("the runner")
    own.add_argument(
        "--out", type=Path, metavar="DIR", help="write NAME.json and NAME.md there; else only print"
    )
    own.add_argument(
        "--dry-run", action="store_true", help="say what would run, and for about how long"
    )
    own.add_argument(
        "--json", action="store_true", help="print results by name as JSON instead of tables"
    )
    return parser


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names, in the order of the list."""
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise UsageError(
            f"no experiment {unknown[0]!r}", hint=f"there are {', '.join(EXPERIMENTS)}"
        )
    return [experiment for name, experiment in EXPERIMENTS.items() if name in names]


def run(experiment: Experiment, args: argparse.Namespace) -> None:
    """Measure here, print, write, and report faults."""
    module = experiment.load()
    result = module.measure(options_from(module.Options, args))
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    result = {"provenance": origin(), **result}
    text = module.tables(result)
    print(json.dumps({experiment.name: result}) if args.json else text)
    if args.out is not None:
        write_result(args.out / experiment.name, result, text)
    if faults := result.get("faults"):
        raise MoaError(f"{faults} texts are not the target's own")


async def _awaited(result: Any) -> Any:
    return await result


def run_each(plan: Sequence[Experiment], args: argparse.Namespace) -> int:
    """Run each in its own process; after a failure the others still run."""
    results: dict[str, Any] = {}
    failed = []
    for number, experiment in enumerate(plan):
        left = sum(other.minutes for other in plan[number:])
        until = datetime.now() + timedelta(minutes=left)
        where = f"[{number + 1}/{len(plan)}] {experiment.name}: {experiment.says}"
        say(f"{where}; about {left:.0f} min to go, until {until:%H:%M}")
        command = [sys.executable, "-m", "benchmarks", experiment.name]
        command += [f"--out={args.out}"] * (args.out is not None) + ["--json"] * args.json
        done = subprocess.run(
            command, stdout=subprocess.PIPE if args.json else None, text=True, check=False
        )
        if done.returncode:
            failed.append(experiment.name)
        elif args.json:
            results |= json.loads(done.stdout)
    if args.json:
        print(json.dumps(results))
    if failed:
        raise MoaError(
            f"{len(failed)} of {len(plan)} failed: {', '.join(failed)}",
            hint="what they said is above",
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks", main))
