"""Pictures about the drafters: acceptance by position, offline answers, time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from matplotlib.figure import Figure

from benchmarks.kit.figures import Result, values_of
from benchmarks.kit.pair import shown_name
from benchmarks.kit.seeds import methods
from benchmarks.plots.kit import axes, bars, colour, legend_above, lines, picture


@picture("acceptance-by-position", "acceptance")
def by_position(result: Result) -> Figure:
    """Share of drafts that are right up to each position, by drafter, for chains and trees."""
    shapes = values_of(result["runs"], "shape")
    figure, panels = axes(len(shapes), width=9, sharey=True)
    for axis, shape in zip(panels, shapes, strict=True):
        runs = [run for run in result["runs"] if run["shape"] == shape and run["temperature"] == 0]
        names = {f"{shown_name(run['drafter'])} ({run['mean']['tau']:.2f})": run["by_position"] for run in runs}
        # The product of the conditional shares.
        series = {name: [100 * x for x in accumulate((p or 0.0 for p in found), mul)] for name, found in names.items()}
        lines(axis, range(1, 1 + max(map(len, series.values()))), series)
        axis.set(title=f"{shape}, greedy", xlabel="position in the draft", ylim=(0, 103))
        axis.legend(title="drafter (tokens won per verification)", title_fontsize=8, fontsize=9, loc="lower left")
    panels[0].set_ylabel("drafts right up to here, %")
    return figure


@picture("tokens-by-kind", "drafters_natural")
def by_kind(result: Result) -> Figure:
    """Tokens won a round by kind of text and drafter, greedy, in a chain of six, with standard errors."""
    found = methods(result, 0.0)
    kinds = list(found[0]["kinds"])
    figure, (axis,) = axes(width=10)
    series = {shown_name(one["drafter"]): [one["kinds"][k][0] for k in kinds] + [one["mean"]] for one in found}
    errors = {shown_name(one["drafter"]): [one["kinds"][k][1] for k in kinds] + [one["se"]] for one in found}
    bars(axis, [*kinds, "mean"], series, form="{:.2f}", errors=errors)
    axis.set(ylabel="tokens a round", title="Chain of six, greedy; ours embedded (MoA) was trained for longer")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@picture("accuracy-after-the-cut", "client_offline")
def client_cuts(result: Result) -> Figure:
    """Right answers against the token at which the link dies: the device with records, without, and an API client."""
    return _cuts(result, "Right answers when the link dies for good: this client")


@picture("drafters-after-the-cut", "drafters_offline")
def drafter_cuts(result: Result) -> Figure:
    """Right answers against the token at which the link dies, by drafter."""
    return _cuts(result, "Right answers when the link dies for good: all drafters")


def _cuts(result: Result, title: str) -> Figure:
    figure, (axis,) = axes(width=7.5)
    runs, cuts = result["runs"], values_of(result["runs"], "cut")
    shares = {(run["way"], run["cut"]): 100 * run["right"] / run["asked"] for run in runs}
    series = {way: [shares[way, cut] for cut in cuts] for way in values_of(runs, "way")}
    at = range(len(cuts))
    axis.plot(at, series.pop("target"), label="the target itself", color=colour("target"), linestyle="--")
    lines(axis, at, series)
    axis.set_xticks(at, [str(cut) for cut in cuts])
    xlabel, ylabel = "tokens that were verified before the link died", f"right answers, % of {runs[0]['asked']}"
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(-2, 103))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@picture("step-times", "export_steps")
def step_times(result: Result) -> Figure:
    """Time of a drafting step by quantized form and shape."""
    shapes: dict[str, Sequence[Result]] = result["shapes"]
    figure, panels = axes(len(shapes), width=1.5 + 3.6 * len(shapes), height=4.4)
    for axis, (shape, rows) in zip(panels, shapes.items(), strict=True):
        threads, forms = max(row["threads"] for row in rows), values_of(rows, "form")
        found = {(row["form"], row["tokens"]): row["ms"] for row in rows if row["threads"] == threads}
        widths = sorted({tokens for _, tokens in found})
        series = {f"{n} token{'s' * (n > 1)} a step": [found.get((form, n)) for form in forms] for n in widths}
        bars(axis, forms, series, form="{:.2g}")
        axis.set_xticks(range(len(forms)), [form.replace(", ", ",\n") for form in forms], rotation=30, ha="right")
        axis.set(title=f"drafter of the {shape} shape, {threads} threads", ylabel="ms a step")
    legend_above(figure, panels[0], ncols=2)
    return figure
