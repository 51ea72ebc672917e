"""What opportunistic sync costs: acceptance against lag, precision, and share of the prompt's records held.

The target answers once; then drafting is replayed against its text with records as late, coarse and sparse as asked.

python -m benchmarks.client_records --json benchmarks/results/client_records.json --plot client_records.png
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import client_kit, report
from benchmarks.client_kit import Heard
from benchmarks.provenance import write_result
from edge_client.device import Device
from edge_client.drafter.cache import RecordBuffer
from moa import records
from moa.errors import run_cli
from moa.tree import TreeShape

LAGS: tuple[int | None, ...] = (0, 1, 2, 4, 8, 16, 64, None)
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
SHAPES = {"chain": TreeShape.chain(6), "tree": TreeShape(8, 6, 62)}

Fill = Callable[[Heard, RecordBuffer], None]


def precision(name: str) -> Fill:
    """Records as they are after the wire."""

    def fill(heard: Heard, buffer: RecordBuffer) -> None:
        if name != "off":
            dtype: Any = name
            payload = records.encode(heard.keys, heard.values, dtype)
            buffer.put(0, *records.decode(payload, dtype, len(heard.keys), *heard.keys.shape[1:]))

    return fill


def prompt_share(share: float) -> Fill:
    """Records of the answer, and of so much of the prompt, its newest rows first, as they are sent."""

    def fill(heard: Heard, buffer: RecordBuffer) -> None:
        start = round(len(heard.prompt) * (1 - share))
        buffer.put(start, heard.keys[start:], heard.values[start:])

    return fill


def scattered(share: float) -> Fill:
    """Records of a random share of all positions: holes everywhere."""

    def fill(heard: Heard, buffer: RecordBuffer) -> None:
        rng = random.Random(0)
        for row in range(len(heard.keys)):
            if rng.random() < share:
                buffer.put(row, heard.keys[row : row + 1], heard.values[row : row + 1])

    return fill


def acceptance(device: Device, heard: Sequence[Heard], fill: Fill, lag: int | None, shape: TreeShape) -> float:
    """Tokens a round, the target's own included."""
    rounds: list[int] = []
    for one in heard:
        buffer = RecordBuffer(_heads(device))
        fill(one, buffer)
        rounds += client_kit.accepted_per_round(device, one, buffer, shape, lag=lag)
    return 1 + fmean(rounds)


def _heads(device: Device) -> Any:
    return client_kit.record_heads(device)


def measure(device: Device, heard: Sequence[Heard]) -> list[dict[str, Any]]:
    """Every condition, one thing changed at a time."""
    runs: list[dict[str, Any]] = []
    for shape_name, shape in SHAPES.items():
        for lag in LAGS:
            runs.append(
                {"what": "lag", "value": "prompt only" if lag is None else lag, "lag": lag, "fill": precision("fp16")}
            )
        for name in ("fp16", "int8", "int4", "off"):
            runs.append({"what": "precision", "value": name, "lag": 0, "fill": precision(name)})
        for share in SHARES:
            runs.append({"what": "prompt rows held", "value": share, "lag": 0, "fill": prompt_share(share)})
        for share in SHARES:
            runs.append({"what": "rows held", "value": share, "lag": 0, "fill": scattered(share)})
        for run in runs:
            if "tau" not in run:
                run |= {"shape": shape_name, "tau": acceptance(device, heard, run.pop("fill"), run.pop("lag"), shape)}
    return runs


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """One table for each thing that was changed."""
    parts = []
    for what in dict.fromkeys(run["what"] for run in runs):
        values = list(dict.fromkeys(run["value"] for run in runs if run["what"] == what))
        found = {(run["shape"], run["value"]): run["tau"] for run in runs if run["what"] == what}
        rows = [[shape, *(f"{found[shape, value]:.2f}" for value in values)] for shape in SHAPES]
        parts.append(report.table([what, *map(str, values)], rows) + "\n")
    return "\n".join(parts)


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The same as curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whats = list(dict.fromkeys(run["what"] for run in runs))
    figure, axes = pyplot.subplots(1, len(whats), figsize=(4 * len(whats), 3.2), sharey=True)
    for axis, what in zip(axes, whats, strict=True):
        for shape in SHAPES:
            points = [(str(r["value"]), r["tau"]) for r in runs if (r["what"], r["shape"]) == (what, shape)]
            axis.plot(*zip(*points, strict=True), marker="o", label=shape)
        axis.set_xlabel(what)
        axis.tick_params(axis="x", labelrotation=45)
    axes[0].set_ylabel("tokens a round")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


async def _heard(options: argparse.Namespace) -> tuple[Device, list[Heard]]:
    device, _, prompts = client_kit.load(options)
    async with client_kit.address(options) as url:
        return device, await client_kit.hear(url, device, prompts, options.tokens)


def main() -> int:
    """Measure, print tables, write result and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    client_kit.add_flags(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    device, heard = asyncio.run(_heard(options))
    runs = measure(device, heard)
    write_result(options.json, {"prompts": len(heard), "client_records": runs})
    print(tables(runs))
    if options.plot is not None:
        plot(runs, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_records", main))
