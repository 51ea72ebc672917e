"""Pictures about device and server: speed by link, who wins where, what late and coarse records cost, reconnection."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.plots.kit import MARKERS, Picture, Result, Results, axes, bars, colour

AUTO, PROMPT_ONLY = "auto", "prompt only"


def speed_by_link(results: Results) -> Figure:
    """Tokens a second of every way over every link."""
    runs = results["client_links"]["client_links"]
    links = list(dict.fromkeys(run["link"] for run in runs))
    ways = list(dict.fromkeys(run["way"] for run in runs))
    found = {(run["link"], run["way"]): run["tokens_per_second"] for run in runs}
    figure, (axis,) = axes(width=9.5, height=4.4)
    bars(axis, links, {way: [found.get((link, way)) for link in links] for way in ways}, form="{:.0f}")
    axis.set(title="Speed by link (target beside it on the same two cores)", ylabel="tokens/s", xlabel="emulated link")
    axis.legend(ncols=2)
    return figure


def _cells(result: Result) -> dict[tuple[str, float], dict[str, Any]]:
    """(link, step time) -> way -> run."""
    cells: dict[tuple[str, float], dict[str, Any]] = {}
    for run in result["client_slow"]:
        cells.setdefault((run["link"], run["step_ms"]), {})[run["way"]] = run
    return cells


def _axes_of(result: Result) -> tuple[list[str], list[float]]:
    """Links by round trip, and step times."""
    round_trips = result["rtt_ms"]
    links = sorted({run["link"] for run in result["client_slow"]}, key=lambda link: (round_trips[link], link))
    return links, sorted({run["step_ms"] for run in result["client_slow"]})


def who_wins(results: Results) -> Figure:
    """The fastest way in each cell of round trip x step time, and how near `auto` comes to it."""
    result = results["client_slow"]
    cells, (links, steps) = _cells(result), _axes_of(result)
    figure, (axis,) = axes(width=1.9 * len(steps) + 3.2, height=0.95 * len(links) + 1.9)
    winners: dict[str, None] = {}
    for y, link in enumerate(links):
        for x, step in enumerate(steps):
            runs = cells.get((link, step))
            if not runs:
                continue
            fixed = {way: run["tokens_per_second"] for way, run in runs.items() if way != AUTO}
            best = max(fixed, key=lambda way: fixed[way])
            winners[best] = None
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor=colour(best), alpha=0.35, edgecolor="white", linewidth=3))
            lines = [f"{fixed[best]:.0f} tokens/s"]
            if plain := fixed.get("plain API streaming"):
                lines.append(f"{fixed[best] / plain:.1f} x plain")
            if AUTO in runs:
                lines.append(f"auto: {100 * runs[AUTO]['tokens_per_second'] / fixed[best]:.0f} %")
            axis.text(x + 0.5, y + 0.5, "\n".join(lines), ha="center", va="center", fontsize=8.5)
    axis.set(xlim=(0, len(steps)), ylim=(0, len(links)), title="Who is fastest where, and how near auto comes")
    axis.set_xticks([x + 0.5 for x in range(len(steps))], [f"{step:g}" for step in steps])
    axis.set_yticks([y + 0.5 for y in range(len(links))], [f"{link}\n{result['rtt_ms'][link]:g} ms" for link in links])
    axis.set(xlabel="emulated milliseconds of a forward of the target", ylabel="link and its mean round trip")
    axis.grid(visible=False)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour(way), alpha=0.35) for way in winners]
    figure.legend(handles, list(winners), loc="outside upper center", ncols=2, title="fastest of the fixed ways")
    return figure


def speed_by_step(results: Results) -> Figure:
    """Tokens a second against the target's step time, a panel for each link."""
    result = results["client_slow"]
    cells, (links, steps) = _cells(result), _axes_of(result)
    figure, panels = axes(len(links), width=2.5 * len(links) + 1, height=4.4, sharey=True)
    ways = list(dict.fromkeys(run["way"] for run in result["client_slow"]))
    for axis, link in zip(panels, links, strict=True):
        for way, marker in zip(ways, MARKERS, strict=False):
            points = [
                (step, cells[link, step][way]["tokens_per_second"])
                for step in steps
                if way in cells.get((link, step), {})
            ]
            axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, color=colour(way), label=way)
        axis.set(title=f"{link}, {result['rtt_ms'][link]:g} ms", xscale="log", yscale="log")
        axis.set_xticks(steps, [f"{step:g}" for step in steps])
        axis.minorticks_off()
        axis.set_xlabel("ms a forward")
    panels[0].set_yticks([2, 5, 10, 20, 50, 100, 200], ["2", "5", "10", "20", "50", "100", "200"])
    panels[0].set_ylabel("tokens/s")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9)
    return figure


def records(results: Results) -> Figure:
    """Tokens won per verification against lag, precision and rows held."""
    runs = results["client_records"]["client_records"]
    whats = list(dict.fromkeys(run["what"] for run in runs))
    titles = {
        "lag": "newest records late by",
        "precision": "precision on the wire",
        "prompt rows held": "share of the prompt's\nrows held",
        "rows held": "share of all rows held,\nat random",
    }
    figure, panels = axes(
        len(whats), width=11.5, height=4.0, sharey=True, width_ratios=[1.5, *([1] * (len(whats) - 1))]
    )
    shades = {"chain": colour("auto"), "tree": colour("eagle")}
    for axis, what in zip(panels, whats, strict=True):
        values = list(dict.fromkeys(str(run["value"]) for run in runs if run["what"] == what))
        for shape, marker in (("chain", "o"), ("tree", "s")):
            found = {str(r["value"]): r["tau"] for r in runs if (r["what"], r["shape"]) == (what, shape)}
            line = [value for value in values if value != PROMPT_ONLY]
            axis.plot(
                range(len(line)), [found[v] for v in line], marker=marker, label=shape, color=shades[shape]
            )  # fmt: skip
            if PROMPT_ONLY in found:  # no lag, so no part of the line
                axis.plot(len(line) + 0.4, found[PROMPT_ONLY], marker=marker, color=shades[shape])
        ticks = [len(values) - 0.6 if value == PROMPT_ONLY else place for place, value in enumerate(values)]
        axis.set_xticks(ticks, [value.replace(" ", "\n") for value in values])
        axis.set(title=titles.get(what, what), xlabel="tokens" if what == "lag" else "")
    panels[0].set(ylabel="tokens won per verification", ylim=(1, None))
    panels[0].legend()
    return figure


def reconnection(results: Results) -> Figure:
    """Right answers, time and withdrawn tokens by the length of the outage, for both policies."""
    result = results["client_reconnect"]
    runs = result["client_reconnect"]
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    gaps = sorted({run["gap_seconds"] for run in runs})
    cuts = sorted({run["cut"] for run in runs})
    found = {(run["policy"], run["cut"], run["gap_seconds"]): run for run in runs}
    figure, panels = axes(3, width=11, height=4.0)
    shades = {"rewind": colour("auto"), "keep": colour("eagle")}
    for axis, (key, title) in zip(
        panels,
        (("right_share", "right answers, %"), ("seconds", "seconds to the end"), ("retracted", "tokens withdrawn")),
        strict=True,
    ):
        for policy in policies:
            for cut, line, marker in zip(cuts, ("-", "--", ":"), "os^", strict=False):
                values = [_reconnected(found[policy, cut, gap], key) for gap in gaps]
                axis.plot(
                    range(len(gaps)), values, marker=marker, linestyle=line, color=shades.get(policy, colour(policy)),
                    label=f"{policy}, cut after {cut}",
                )  # fmt: skip
        axis.set_xticks(range(len(gaps)), [f"{gap:g}" for gap in gaps])
        axis.set(title=title, xlabel="seconds without a link", ylim=(0, 105 if key == "right_share" else None))
    panels[0].legend(fontsize=8)
    return figure


def _reconnected(run: Result, key: str) -> float:
    if key == "right_share":
        return 100 * run["right"] / run["asked"]
    return float(run[key])


PICTURES = (
    Picture(
        "speed-by-link",
        ("client_links",),
        "Tokens a second of every way of decoding over five emulated links.",
        speed_by_link,
    ),
    Picture(
        "who-wins-where",
        ("client_slow",),
        "The fastest way of decoding by round trip of the link and step time of the target.",
        who_wins,
    ),
    Picture(
        "speed-by-step-time",
        ("client_slow",),
        "Tokens a second against the target's step time, by way of decoding, for each link.",
        speed_by_step,
    ),
    Picture(
        "acceptance-by-records",
        ("client_records",),
        "Tokens won per verification when records are late, coarse or missing.",
        records,
    ),
    Picture(
        "reconnection",
        ("client_reconnect",),
        "Right answers, time and withdrawn tokens when the link returns after 1, 5 and 20 seconds.",
        reconnection,
    ),
)
