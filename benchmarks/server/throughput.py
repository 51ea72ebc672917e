"""Gain of batching: verified tokens a second by the number of clients, and the overhead beside the
model."""

from __future__ import annotations

from itertools import product
from statistics import mean, median
from typing import Any

from benchmarks.kit.figures import listing, percentiles, table
from benchmarks.kit.progress import steps
from benchmarks.server.crowd import Run, crowd, scripts_for
from testing.metrics_page import Histogram, gained
from testing.verifier import Pair, verifier

Figures = dict[str, Any]


async def measure(pair: Pair, options: Any) -> Figures:
    """Every number of clients once in every repeat, so that a machine that slows down slows all of
    them."""
    clients = sorted(set(options.clients))
    runs: dict[int, list[Run]] = {count: [] for count in clients}
    with verifier(f"--slots={clients[-1] + 1}", pair=pair) as running:
        said = await scripts_for(running.url, clients[-1], options)
        await crowd(running.url, said[:1])  # warm
        for _, count in steps(product(range(options.repeats), clients), "crowds"):
            runs[count].append(await crowd(running.url, said[:count]))
    gains = [
        many.rate / one.rate for one, many in zip(runs[clients[0]], runs[clients[-1]], strict=True)
    ]
    rows = [_row(count, found) for count, found in runs.items()]
    return {
        "rows": rows,
        "gain": round(median(gains), 2),
        "gains": [round(gain, 2) for gain in gains],
    }


def _row(clients: int, found: list[Run]) -> Figures:
    rates = [run.rate for run in found]
    page = gained((run.before, run.after) for run in found)
    histograms = {
        name: Histogram.of(page, f"moa_{name}", label)
        for name, label in {
            "batch_rows": "",
            "forward_seconds": 'kind="draft"',
            "verify_overhead_seconds": "",
            "verify_seconds": "",
        }.items()
    }
    row = {
        "clients": clients,
        "verified_tokens_per_second": round(median(rates), 1),
        "range": [round(min(rates), 1), round(max(rates), 1)],
        "tokens_per_round": round(mean(run.tokens / run.rounds for run in found), 2),
        "client_ms": percentiles([ms for run in found for ms in run.round_ms]),
        "batch_rows": round(histograms["batch_rows"].mean, 2),
        "histograms": {name: histogram.shares() for name, histogram in histograms.items()},
    }
    for short, name in (
        ("verify", "verify"),
        ("forward", "forward"),
        ("overhead", "verify_overhead"),
    ):
        histogram = histograms[f"{name}_seconds"]
        row[f"{short}_ms"] = {
            f"p{q}": round(1000 * histogram.quantile(q / 100), 3) for q in (50, 90, 99)
        }
    return row


def tables(figures: Figures) -> str:
    """Throughput by clients, and the two histograms."""
    shown = listing(
        figures["rows"],
        {
            "clients": "{clients}",
            "verified tokens/s (median, range)": "{verified_tokens_per_second:.0f} ({range[0]:.0f}-{range[1]:.0f})",
            "tokens a round": "{tokens_per_round:.2f}",
            "rows a batch": "{batch_rows:.1f}",
            "forward p50 ms": "{forward_ms[p50]:.2f}",
            "verify in the server p50 / p99 ms": "{verify_ms[p50]:.2f} / {verify_ms[p99]:.2f}",
            "beside the forward p50 / p99 ms": "{overhead_ms[p50]:.2f} / {overhead_ms[p99]:.2f}",
            "seen by the client p50 / p99 ms": "{client_ms[p50]:.2f} / {client_ms[p99]:.2f}",
        },
    )
    one = figures["rows"][0]
    most = figures["rows"][-1]["clients"]
    share = one["overhead_ms"]["p50"] / one["verify_ms"]["p50"]
    told = (
        f"{most} clients have {figures['gain']:.2f} times the tokens/s of {one['clients']} (median of the pairs "
        f"{', '.join(f'{gain:.2f}' for gain in figures['gains'])}). Beside the forward is all from a draft's arrival "
        "on its socket to the writing of its verdict that is not its own forward: with one client what the server "
        f"adds ({share:.0%} of a verify), with more of them mostly the wait for the forward before."
    )
    rows = _distribution("Rows in a batch, at most", figures, "batch_rows", 1)
    times = _distribution(
        "Milliseconds of a verify in the server, at most", figures, "verify_seconds", 1000
    )
    return f"{shown}\n\n{told}\n\n{rows}\n\n{times}"


def _distribution(title: str, figures: Figures, name: str, scale: float) -> str:
    found = {row["clients"]: row["histograms"][name] for row in figures["rows"]}
    bounds = sorted({float(bound) for shares in found.values() for bound in shares})
    rows = [
        [f"{clients} clients", *(f"{shares.get(f'{bound:g}', 0):.0%}" for bound in bounds)]
        for clients, shares in found.items()
    ]
    return table([title, *(f"{scale * bound:g}" for bound in bounds)], rows)
