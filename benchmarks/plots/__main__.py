"""Draw every picture whose results are there: `python -m benchmarks.plots`.

Reads benchmarks/results/*.json and writes PNG and SVG files to docs/pictures. `--check` draws
nothing and says which pictures are out of date.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.kit.figures import Result
from benchmarks.kit.progress import say
from benchmarks.plots import pictures  # noqa: F401 - it registers them
from benchmarks.plots.kit import PICTURES, Picture, digest, drawn_from, save
from moa.errors import MoaError, UsageError, run_cli

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results"
FOLDER = _ROOT / "docs" / "pictures"


def stale(results: Mapping[str, Result], folder: Path, plan: Iterable[Picture]) -> list[str]:
    """Pictures that are missing, or drawn from other results than these; and those whose result is
    gone."""
    found = []
    for picture in plan:
        drawn = drawn_from(folder / f"{picture.name}.svg")
        wanted = digest(results[picture.source]) if picture.source in results else ""
        if drawn != wanted or bool(wanted) != (folder / f"{picture.name}.png").exists():
            found.append(picture.name)
    return found


def read(folder: Path) -> dict[str, Result]:
    """All results of a folder, by name."""
    try:
        return {
            path.stem: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(folder.glob("*.json"))
        }
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"a result in {folder} is not valid JSON: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, or check."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("only", nargs="*", metavar="NAME", help="draw these alone")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR")
    parser.add_argument(
        "--check",
        action="store_true",
        help="draw nothing; exit code 1 when a picture is out of date",
    )
    args = parser.parse_args(argv)
    if unknown := set(args.only) - set(PICTURES):
        raise UsageError(
            f"no picture {sorted(unknown)[0]!r}", hint=f"there are {', '.join(PICTURES)}"
        )
    plan = [picture for name, picture in PICTURES.items() if name in args.only or not args.only]
    results = read(args.results)
    if args.check:
        if old := stale(results, args.out, plan):
            raise MoaError(
                f"out of date: {', '.join(old)}", hint="draw them again: python -m benchmarks.plots"
            )
        return 0
    for picture in plan:
        if picture.source in results:
            print(*save(picture, results[picture.source], args.out), sep="\n")
        else:
            say(f"{picture.name}: not drawn, {picture.source} was not measured")
            for kind in ("png", "svg"):  # a picture of a removed result is stale
                (args.out / f"{picture.name}.{kind}").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.plots", main))
