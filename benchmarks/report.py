"""Tables in Markdown from the JSON results.

python -m benchmarks.report benchmarks/results/acceptance.json
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moa.errors import UsageError, run_cli

YARDSTICK = "eagle2"
"""The drafter that the others are measured against, where it took part."""

Result = Mapping[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column is text, the others figures."""
    lines = [header, ["---", *(["---:"] * (len(header) - 1))], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def acceptance_tables(result: Result) -> str:
    """Acceptance by category and by position, one pair of tables for each shape and temperature."""
    parts = []
    settings = dict.fromkeys((run["shape"], run["temperature"]) for run in result["runs"])
    for shape, temperature in settings:
        runs = [r for r in result["runs"] if (r["shape"], r["temperature"]) == (shape, temperature)]
        parts.append(f"**Acceptance length, {shape}, T = {temperature:g}** (± standard error)\n")
        parts.append(_by_category(runs) + "\n")
        depth = len(runs[0]["by_position"])
        rows = [[r["drafter"], *("-" if p is None else f"{p:.2f}" for p in r["by_position"])] for r in runs]
        parts.append("Share of drafted tokens accepted at position k, given that all before it were:\n")
        parts.append(table(["drafter", *map(str, range(1, depth + 1))], rows) + "\n")
    ties = sum(run["texts_parted_at_a_tie"] for run in result["runs"])
    checked = len(result["runs"]) * result["prompts"]
    parts.append(f"All {checked:,} texts equal plain decoding" + (f", {ties} up to a numerical tie." if ties else "."))
    return "\n".join(parts)


def _by_category(runs: Sequence[Result]) -> str:
    yardstick = next((r["mean"]["tau"] for r in runs if r["drafter"] == YARDSTICK), None)
    rows = [["**mean**", *(f"**{run['mean']['tau']:.2f}** ± {run['mean']['se']:.2f}" for run in runs)]]
    if yardstick:
        rows.append([f"vs {YARDSTICK}", *(f"{run['mean']['tau'] / yardstick:.2f}x" for run in runs)])
    for category in runs[0]["categories"]:
        cells = [run["categories"][category] for run in runs]
        rows.append([category, *(f"{cell['tau']:.2f} ± {cell['se']:.2f}" for cell in cells)])
    return table(["category", *(run["drafter"] for run in runs)], rows)


def accuracy_table(result: Result) -> str:
    """Right answers by skill."""
    models = [run["model"] for run in result["runs"]]
    skills = list(result["runs"][0]["skills"])
    rows = [[skill, *(_share(run["skills"][skill]) for run in result["runs"])] for skill in skills]
    rows.append(["**all**", *(f"**{_share(run['all'])}**" for run in result["runs"])])
    return table(["skill", *models], rows)


def _share(count: Result) -> str:
    return f"{count['right'] / count['asked']:.1%} ({count['right']}/{count['asked']})"


def speed_table(result: Result) -> str:
    """Tokens per second, and how that compares with `model.generate` and with plain decoding by the same engine."""
    parts = []
    for pair in result["pairs"]:
        for race in pair["races"]:
            parts.append(f"**{pair['says']}, T = {race['temperature']:g}**\n")
            parts += _race_tables(race["ways"])
        parts += [f"{note}\n" for note in pair.get("notes", [])]
    return "\n".join(parts).rstrip()


def _race_tables(ways: Sequence[Result]) -> list[str]:
    medians = {way["name"]: way["median"] for way in ways}
    rows = []
    for way in ways:
        relative = [
            f"{way['median'] / medians[name]:.2f}x" if name in medians else "-" for name in ("generate", "plain")
        ]
        tau = way.get("tau")
        spread = f"{way['median']:.1f} ({min(way['runs']):.1f}-{max(way['runs']):.1f})"
        rows.append([way["says"], spread, *relative, "-" if tau is None else f"{tau:.2f}"])
    parts = [table(["way", "tokens/s (range)", "vs generate", "vs our plain", "tau"], rows) + "\n"]
    categories = list(ways[0]["times_plain"])
    if len(categories) > 1:
        others = [way for way in ways if way["name"] != "plain"]
        rows = [[name, *(f"{way['times_plain'][name]:.2f}x" for way in others)] for name in categories]
        parts.append("The same by category, as times our plain decoding:\n")
        parts.append(table(["category", *(way["name"] for way in others)], rows) + "\n")
    return parts


def training_table(results: Sequence[Result]) -> str:
    """What each run was and how it ended."""
    rows = [
        [
            r["recipe"]["preset"],
            f"{r['parameters']:,}",
            f"{r['steps']:,}",
            f"{r['last']['loss']:.4f}",
            f"{r['last'].get('agree', float('nan')):.3f}",
            f"{r['tokens_per_s']:,.0f}",
            r["says"],
        ]
        for r in results
    ]
    return table(["preset", "parameters", "steps", "loss", "agreement", "tokens/s", "what it is"], rows)


_BY_MODULE = ("capacity", "client_links", "client_many", "client_reconnect", "client_slow", "drafters_offline")
"""Results under the name of the module that made them, which also knows their tables."""


def _tables_of(result: Result) -> str:
    for name in _BY_MODULE:
        if name in result:
            return str(importlib.import_module(f"benchmarks.{name}").tables(result))
    kinds: dict[str, Callable[[Result], str]] = {
        "by_position": acceptance_tables,
        "skills": accuracy_table,
    }
    if "pairs" in result:
        return speed_table(result)
    if "recipe" in result:
        return training_table([result])
    for key, make in kinds.items():
        if result.get("runs") and key in result["runs"][0]:
            return make(result)
    raise UsageError("this JSON is no result of ours")


def provenance_line(result: Result) -> str:
    """Hardware, commit and command, as they stand beside a table."""
    p = result["provenance"]
    hardware = p["hardware"]
    where = f"{hardware.get('gpu') or hardware['processor']}, {hardware['cores']} cores, {hardware['threads']} threads"
    return f"{where}; commit {p['commit']}; torch {p['versions'].get('torch')}; `{p['command']}`"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="JSON")
    results = []
    for path in parser.parse_args(argv).results:
        try:
            results.append(json.loads(path.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise UsageError(f"{path} is not valid JSON") from None
    if len(results) > 1 and all("recipe" in result for result in results):
        print(training_table(results))
        return 0
    for result in results:
        print(_tables_of(result) + "\n\n" + provenance_line(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.report", main))
