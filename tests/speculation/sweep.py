"""What the numbers of `moa.speculation.tuning` are worth: the policy on simulated servers, with
them and with others, in virtual time.

python -m tests.speculation.sweep                           beside the numbers before decision 38
python -m tests.speculation.sweep --set HOPE=0.85           beside others; may be repeated
python -m tests.speculation.sweep --all                     beside every set of decision 38: minutes

A figure is the speed with other numbers in that with the present ones: below 1 the present ones are
faster. The first line is of the present numbers with other random ones: so much is chance alone.
What follows from a number keeps its value, so give it, too: `FEW=4,RETRY=8,AGAIN=16,LONGEST=64`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import fmean, median

from tests.speculation.cells import CELLS, LONGEST_READING, places_of, value

BEFORE = (
    "WEIGHT_IF_FASTER=0.3,KEEP=0.93,LONGEST_READING=0.5,UNMEASURED_SLOPE=0.01,LEAST_EXPLAINED=0.2"
)
"""The numbers before decision 38, where they differ."""
ALL = (
    BEFORE,
    *BEFORE.split(","),
    "WEIGHT_IF_FASTER=0.125",
    "WEIGHT_IF_SLOWER=0.0625",
    "WEIGHT_IF_SLOWER=0.25",
    "OUTLIER=1e9",
    "OUTLIER=4",
    "MARGIN=1",
    "PRIOR=0.8",
    "PRIOR=0.64",
    "HOPE=0.85",
    "PRIOR_WEIGHT=8",
    "PRIOR_WEIGHT=4",
    "PRIOR=0.64,PRIOR_WEIGHT=4",
)
"""The sets of decision 38."""
CHANCE = "chance alone"
WORST = 3
"""Cells that are named for each set."""


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.speculation.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--set",
        dest="sets",
        metavar="NAME=VALUE,...",
        action="append",
        default=[],
        help="other numbers; may be repeated",
    )
    parser.add_argument("--all", action="store_true", help="the sets of decision 38: minutes")
    parser.add_argument("--only", default="", metavar="WORD", help="cells with this in their name")
    parser.add_argument("--runs", type=int, default=16, help="of a cell, by other random numbers")
    parser.add_argument("--cells", action="store_true", help="print every cell")
    options = parser.parse_args()
    names = [name for name in CELLS if options.only in name]
    if not names:
        parser.error(f"no cell has {options.only!r} in its name")
    sets = list(options.sets) + list(ALL if options.all else ())
    try:
        numbers = {text: numbers_of(text) for text in sets or [BEFORE]}
    except ValueError as error:
        parser.error(str(error))
    shares: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as processes:

        def speeds(other: Mapping[str, float], first_seed: int = 0) -> dict[str, float]:
            seeds = range(first_seed, first_seed + options.runs)
            speed = partial(value, numbers=other, seeds=seeds)
            return dict(zip(names, processes.map(speed, names), strict=True))

        def show(title: str, known: Mapping[str, float]) -> None:
            shares[title] = {name: known[name] / now[name] for name in names}
            print(_line(title, shares[title]), flush=True)

        print(
            f"{len(names)} cells of {options.runs} runs: speed in that with the present numbers\n"
        )
        print("| other numbers | median | mean | least | most | the slowest cells |")
        print("|---|---:|---:|---:|---:|---|", flush=True)
        now = speeds({})
        show(CHANCE, speeds({}, first_seed=options.runs))
        for text, other in numbers.items():
            show(text, speeds(other))
    if options.cells:
        _print_cells(now, shares)


def numbers_of(text: str) -> dict[str, float]:
    """The numbers of `NAME=VALUE,NAME=VALUE`."""
    numbers = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name != LONGEST_READING and not places_of(name):
            raise ValueError(f"no module of the policy has a number {name!r}")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise ValueError(f"{number!r} is no number for {name}") from None
    return numbers


def _line(title: str, shares: Mapping[str, float]) -> str:
    slowest = sorted(shares, key=shares.__getitem__)
    figures = [
        f"{median(shares.values()):.3f}",
        f"{fmean(shares.values()):.4f}",
        f"{shares[slowest[0]]:.3f}",
        f"{shares[slowest[-1]]:.3f}",
    ]
    named = "; ".join(f"{shares[name]:.3f} {name}" for name in slowest[:WORST])
    return f"| {title} | {' | '.join(figures)} | {named} |"


def _print_cells(now: Mapping[str, float], shares: Mapping[str, Mapping[str, float]]) -> None:
    """Each cell: its speed in that of plain decoding, and the figure of each set."""
    print(f"\n| cell | times plain | {' | '.join(shares)} |")
    print(f"|---|{'---:|' * (1 + len(shares))}")
    for name, speed in now.items():
        figures: Sequence[str] = [f"{of_cells[name]:.3f}" for of_cells in shares.values()]
        print(f"| {name} | {speed:.2f} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
