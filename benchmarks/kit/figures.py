"""Figures for a result, and tables of them in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Result = Mapping[str, Any]


def percentiles(values: Sequence[float] | NDArray[np.float64], *shares: int) -> dict[str, float]:
    """p50, p90 and p99, or those that are named; zeros when there are no values."""
    shares = shares or (50, 90, 99)
    found = np.percentile(values if len(values) else [0.0], shares, method="higher")
    return {f"p{share}": round(float(value), 3) for share, value in zip(shares, found, strict=True)}


def values_of(runs: Iterable[Result], key: str) -> list[Any]:
    """The values that a key has in the runs, in their order, each once."""
    return list(dict.fromkeys(run[key] for run in runs))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column is text, the others figures."""
    lines = [header, ["---", *(["---:"] * (len(header) - 1))], *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def pivot(
    runs: Sequence[Result],
    row: str,
    column: str,
    cell: str | Callable[[Result], str],
    corner: str = "",
    columns: Sequence[Any] = (),
) -> str:
    """A table of runs by the values of two keys. `cell` is a format over the run's fields, or makes
    the text itself."""
    columns = columns or values_of(runs, column)
    found = {
        (run[row], run[column]): cell.format(**run) if isinstance(cell, str) else cell(run)
        for run in runs
    }
    rows = [
        [str(name), *(found.get((name, at), "-") for at in columns)]
        for name in values_of(runs, row)
    ]
    return table([corner or row, *map(str, columns)], rows)


def right_by_cut(runs: Sequence[Result]) -> str:
    """Shares of right answers by way, and by the number of tokens after which the link died."""
    asked = runs[0]["asked"]
    shown = pivot(
        runs,
        "way",
        "cut",
        lambda run: f"{run['right'] / asked:.1%}",
        "right answers, cut after m tokens",
    )
    return f"{shown}\n\n{asked} held-out prompts, greedy; a share is good to about ±{50 / asked**0.5:.0f} points."


def listing(runs: Iterable[Result], columns: Mapping[str, str | Callable[[Result], str]]) -> str:
    """A table with a line for each run: by column its heading, and a format over the run's fields."""
    rows = [
        [cell.format(**run) if isinstance(cell, str) else cell(run) for cell in columns.values()]
        for run in runs
    ]
    return table(list(columns), rows)


def titled(*parts: tuple[str, str]) -> str:
    """Tables below their titles."""
    return "\n\n".join(f"**{title}**\n\n{body}" for title, body in parts)
