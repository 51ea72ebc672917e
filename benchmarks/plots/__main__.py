"""Draw every picture whose results are there: `python -m benchmarks.plots`.

Reads benchmarks/results/*.json and writes PNG and SVG files to docs/pictures. `--check` draws nothing and says which
pictures are out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.plots import client, drafters, server, timeline
from benchmarks.plots.kit import Picture, Results, digest, drawn_from, read, save
from moa.errors import MoaError, UsageError, run_cli

_ROOT = Path(__file__).parents[2]
RESULTS, PICTURES = _ROOT / "benchmarks" / "results", _ROOT / "docs" / "pictures"


def pictures() -> list[Picture]:
    """All there are."""
    return [*drafters.PICTURES, *client.PICTURES, *server.PICTURES, *timeline.PICTURES]


def stale(results: Results, folder: Path, plan: Iterable[Picture]) -> list[str]:
    """Pictures that are missing, or drawn from other results than these."""
    return [
        picture.name
        for picture in plan
        if picture.drawable(results)
        and (
            drawn_from(folder / f"{picture.name}.svg") != digest(results, picture.sources)
            or not (folder / f"{picture.name}.png").exists()
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, or check."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", metavar="NAME", help="draw these alone")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="DIR")
    parser.add_argument("--check", action="store_true", help="draw nothing; exit code 1 when a picture is out of date")
    args = parser.parse_args(argv)
    plan = pictures()
    known = [picture.name for picture in plan]
    if unknown := set(args.only) - set(known):
        raise UsageError(f"no picture {sorted(unknown)[0]!r}", hint=f"there are {', '.join(known)}")
    plan = [picture for picture in plan if not args.only or picture.name in args.only]
    try:
        results = read(args.results)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"a result in {args.results} is not valid JSON: {error}") from None
    if args.check:
        if old := stale(results, args.out, plan):
            raise MoaError(f"out of date: {', '.join(old)}", hint="draw them again: python -m benchmarks.plots")
        return 0
    for picture in plan:
        if picture.drawable(results):
            print(*save(picture, results, args.out), sep="\n")
        else:
            missing = ", ".join(source for source in picture.sources if source not in results)
            print(f"{picture.name}: not drawn, {missing} was not measured", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.plots", main))
