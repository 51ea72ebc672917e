"""Whether batching pays: verified tokens a second by the number of clients, and its cost beside the model."""

from __future__ import annotations

import sys
from statistics import mean, median
from typing import Any

from benchmarks.report import table
from benchmarks.server.crowd import Run, crowd, speeches
from benchmarks.server.options import Options
from benchmarks.server.scrape import Histogram
from benchmarks.server_kit import Pair, percentiles, server

Figures = dict[str, Any]


async def measure(pair: Pair, options: Options) -> Figures:
    """Every number of clients once in every repeat, so that a machine that slows down slows all of them."""
    runs: dict[int, list[Run]] = {clients: [] for clients in options.clients}
    flags = ("--slots", str(max(options.clients) + 1), *options.flags)
    with server(pair, *flags, threads=options.threads) as process:
        said = await speeches(
            process.url, max(options.clients), length=options.prompt, tokens=options.tokens, rate=options.rate
        )
        await crowd(process.url, said[:1], options.nodes)  # warm
        for repeat in range(options.repeats):
            for clients, found in runs.items():
                run = await crowd(process.url, said[:clients], options.nodes)
                found.append(run)
                print(f"repeat {repeat + 1}, {clients} clients: {run.rate:.0f} tokens/s", file=sys.stderr, flush=True)
    rows = [_row(clients, found) for clients, found in runs.items()]
    first, last = runs[options.clients[0]], runs[options.clients[-1]]
    gains = [many.rate / one.rate for one, many in zip(first, last, strict=True)]
    return {"rows": rows, "gain": round(median(gains), 2), "gains": [round(gain, 2) for gain in gains]}


def _row(clients: int, found: list[Run]) -> Figures:
    rates = [run.rate for run in found]
    batch, forward, overhead, whole = (
        _sum([Histogram.between(run.before, run.after, f"moa_{name}", label) for run in found])
        for name, label in (
            ("batch_rows", ""),
            ("forward_seconds", 'kind="draft"'),
            ("verify_overhead_seconds", ""),
            ("verify_seconds", ""),
        )
    )
    return {
        "clients": clients,
        "verified_tokens_per_second": round(median(rates), 1),
        "range": [round(min(rates), 1), round(max(rates), 1)],
        "tokens_per_round": round(mean(run.tokens / run.rounds for run in found), 2),
        "client_ms": percentiles([ms for run in found for ms in run.round_ms]),
        "verify_ms": _quantiles(whole),
        "forward_ms": _quantiles(forward),
        "overhead_ms": _quantiles(overhead),
        "batch_rows": round(batch.mean, 2),
        "histograms": {
            "batch_rows": batch.shares(),
            "forward_seconds": forward.shares(),
            "verify_seconds": whole.shares(),
            "verify_overhead_seconds": overhead.shares(),
        },
    }


def _sum(parts: list[Histogram]) -> Histogram:
    counts = tuple(sum(column) for column in zip(*(part.counts for part in parts), strict=True))
    return Histogram(parts[0].bounds, counts, sum(part.total for part in parts))


def _quantiles(histogram: Histogram) -> dict[str, float]:
    return {f"p{q}": round(1000 * histogram.quantile(q / 100), 3) for q in (50, 90, 99)}


def tables(figures: Figures) -> str:
    """Throughput by clients, and the two histograms."""
    header = [
        "clients",
        "verified tokens/s (median, range)",
        "tokens a round",
        "rows a batch",
        "forward p50 ms",
        "verify in the server p50 / p99 ms",
        "beside the forward p50 / p99 ms",
        "seen by the client p50 / p99 ms",
    ]
    rows = [
        [
            str(row["clients"]),
            f"{row['verified_tokens_per_second']:.0f} ({row['range'][0]:.0f}-{row['range'][1]:.0f})",
            f"{row['tokens_per_round']:.2f}",
            f"{row['batch_rows']:.1f}",
            f"{row['forward_ms']['p50']:.2f}",
            *(f"{row[name]['p50']:.2f} / {row[name]['p99']:.2f}" for name in ("verify_ms", "overhead_ms", "client_ms")),
        ]
        for row in figures["rows"]
    ]
    most = figures["rows"][-1]["clients"]
    one = figures["rows"][0]
    share = one["overhead_ms"]["p50"] / one["verify_ms"]["p50"]
    return "\n".join(
        [
            table(header, rows),
            "",
            f"{most} clients have {figures['gain']:.2f} times the tokens/s of {one['clients']} (median of the pairs "
            f"{', '.join(f'{gain:.2f}' for gain in figures['gains'])}). Beside the forward is all from a draft's "
            "arrival on its socket to the writing of its verdict that is not its own forward: with one client what "
            f"the server adds ({share:.0%} of a verify), with more of them mostly the wait for the forward before.",
            "",
            _distribution("Rows in a batch, at most", figures, "batch_rows", 1),
            "",
            _distribution("Milliseconds of a verify in the server, at most", figures, "verify_seconds", 1000),
        ]
    )


def _distribution(title: str, figures: Figures, name: str, scale: float) -> str:
    found = {row["clients"]: row["histograms"][name] for row in figures["rows"]}
    bounds = sorted({float(bound) for shares in found.values() for bound in shares})
    rows = [
        [f"{clients} clients", *(f"{shares.get(f'{bound:g}', 0):.0%}" for bound in bounds)]
        for clients, shares in found.items()
    ]
    return table([title, *(f"{scale * bound:g}" for bound in bounds)], rows)
