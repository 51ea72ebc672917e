"""Pictures about the drafters: how far a draft holds, what is left of an answer without a link, what a step costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots.kit import MARKERS, Picture, Result, Results, axes, bars, colour


def by_position(results: Results) -> Figure:
    """The share of drafts that is still right at position k: the product of the conditional shares."""
    result = results["acceptance"]
    shapes = list(dict.fromkeys(run["shape"] for run in result["runs"]))
    figure, panels = axes(len(shapes), width=9, sharey=True)
    for axis, shape in zip(panels, shapes, strict=True):
        runs = [run for run in result["runs"] if run["shape"] == shape and run["temperature"] == 0]
        for run, marker in zip(runs, MARKERS, strict=False):
            reached, points = 1.0, []
            for share in run["by_position"]:
                reached *= share or 0.0
                points.append(100 * reached)
            name = "MoA" if run["drafter"] == "drafter" else run["drafter"]
            label = f"{name} ({run['mean']['tau']:.2f})"
            axis.plot(range(1, len(points) + 1), points, marker=marker, label=label, color=colour(name))
        axis.set(title=f"{shape}, greedy", xlabel="position in the draft", ylim=(0, 103))
        axis.legend(title="drafter (tokens won per verification)", title_fontsize=8, fontsize=9, loc="lower left")
    panels[0].set_ylabel("drafts right up to here, %")
    return figure


def _cuts(result: Result, key: str, title: str) -> Figure:
    figure, (axis,) = axes(width=7.5)
    runs = result[key]
    ways = list(dict.fromkeys(run["way"] for run in runs))
    cuts = list(dict.fromkeys(run["cut"] for run in runs))
    for way, marker in zip(ways, MARKERS, strict=False):
        found = {run["cut"]: 100 * run["right"] / run["asked"] for run in runs if run["way"] == way}
        style: dict[str, Any] = {"linestyle": "--", "marker": ""} if way == "target" else {"marker": marker}
        label = "the target itself" if way == "target" else way
        axis.plot(range(len(cuts)), [found[cut] for cut in cuts], label=label, color=colour(way), **style)
    axis.set_xticks(range(len(cuts)), [str(cut) for cut in cuts])
    asked = runs[0]["asked"]
    axis.set(
        title=title,
        xlabel="tokens that were verified before the link died",
        ylabel=f"right answers, % of {asked}",
        ylim=(-2, 103),
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def step_times(results: Results) -> Figure:
    """Milliseconds of a drafting step by form, for one token and for eight."""
    result = results["export_steps"]
    shapes: dict[str, Sequence[Result]] = result["shapes"]
    figure, panels = axes(len(shapes), width=1.5 + 3.6 * len(shapes), height=4.4)
    for axis, (shape, rows) in zip(panels, shapes.items(), strict=True):
        threads = max(row["threads"] for row in rows)
        forms = list(dict.fromkeys(row["form"] for row in rows))
        found = {(row["form"], row["tokens"]): row["ms"] for row in rows if row["threads"] == threads}
        widths = sorted({tokens for _, tokens in found})
        series = {f"{n} token{'s' * (n > 1)} a step": [found.get((form, n)) for form in forms] for n in widths}
        bars(axis, forms, series, form="{:.2g}")
        axis.set_xticks(range(len(forms)), [form.replace(", ", ",\n") for form in forms], rotation=30, ha="right")
        axis.set(title=f"drafter of the {shape} shape, {threads} threads", ylabel="ms a step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


PICTURES = (
    Picture(
        "acceptance-by-position",
        ("acceptance",),
        "Share of drafts that are right up to each position, by drafter, for chains and trees.",
        by_position,
    ),
    Picture(
        "accuracy-after-the-cut",
        ("client_offline",),
        "Right answers against the token at which the link dies: the device with records, without, and an API client.",
        lambda results: _cuts(
            results["client_offline"], "client_offline", "Right answers when the link dies for good: this client"
        ),
    ),
    Picture(
        "drafters-after-the-cut",
        ("drafters_offline",),
        "Right answers against the token at which the link dies, by drafter.",
        lambda results: _cuts(
            results["drafters_offline"], "drafters_offline", "Right answers when the link dies for good: all drafters"
        ),
    ),
    Picture("step-times", ("export_steps",), "Time of a drafting step by quantized form and shape.", step_times),
)
