"""The pictures of README.md and docs/results.md: speed by link, the fastest way, answers after a
cut."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.device.winners import AUTO, PLAIN, places
from benchmarks.kit.figures import Result, values_of
from benchmarks.plots.kit import axes, bars, colour, lines, picture


@picture("speed-by-link", "client_links")
def speed_by_link(result: Result) -> Figure:
    """Tokens a second of every way of decoding over emulated links, with standard errors."""
    found = places(result)
    figure, (axis,) = axes(width=9.5, height=4.4)
    speeds = {
        way: [place.speed(way) for place in found] for way in values_of(result["runs"], "way")
    }
    series = {way: [one.value for one in of_way] for way, of_way in speeds.items()}
    errors = {way: [one.error for one in of_way] for way, of_way in speeds.items()}
    bars(axis, [place.link for place in found], series, form="{:.0f}", errors=errors)
    axis.set(
        title="A target of 7M parameters on a CPU: speed by link",
        ylabel="tokens/s",
        xlabel="emulated link",
    )
    axis.legend(ncols=2)
    return figure


@picture("who-wins-where", "client_slow")
def who_wins(result: Result) -> Figure:
    """The fastest way of decoding by round trip of the link and step time of the target, who is as
    fast within a standard error, and how near `auto` comes."""
    return _winners(result, "Who is fastest where, and how near auto comes")


@picture("a-real-pair-by-link", "real_links")
def a_real_pair(result: Result) -> Figure:
    """Where a device that drafts pays, for a real pair of 1.5B and 0.5B: the fastest way of decoding
    by round trip of the link and step time of the target, and how near `auto` comes."""
    return _winners(
        result, "A pair of 1.5B and 0.5B: who is fastest where, and how near auto comes"
    )


def _winners(result: Result, title: str) -> Figure:
    """A square for each link and time of a forward."""
    found = places(result)
    links = list(dict.fromkeys(place.link for place in found))
    steps = values_of(result["runs"], "step_ms")
    figure, (axis,) = axes(width=2.1 * len(steps) + 3.2, height=1.15 * len(links) + 2.1)
    winners: dict[str, None] = {}
    for place in found:
        x = steps.index(place.step_ms)
        y = links.index(place.link)
        best = place.best_other
        winners[best] = None
        axis.add_patch(
            Rectangle(
                (x, y), 1, 1, facecolor=colour(best), alpha=0.35, edgecolor="white", linewidth=3
            )
        )
        words = [f"{place.speed(best):.0f} tokens/s"]
        words += [f"{place.times(best, PLAIN):.1f} x plain"] if PLAIN in place.runs else []
        words += [f"auto: {place.times(AUTO, best):.2f} x"] if AUTO in place.runs else []
        words += [f"= {way}" for way in place.level if way not in (best, AUTO)]
        axis.text(x + 0.5, y + 0.5, "\n".join(words), ha="center", va="center", fontsize=8.5)
    axis.set(
        xlim=(0, len(steps)),
        ylim=(0, len(links)),
        title=title,
    )
    axis.set_xticks([x + 0.5 for x in range(len(steps))], [f"{step:g}" for step in steps])
    axis.set_yticks(
        [y + 0.5 for y in range(len(links))],
        [f"{link}\n{result['rtt_ms'][link]:g} ms" for link in links],
    )
    axis.set(
        xlabel="emulated milliseconds of a forward of the target",
        ylabel="link and its mean round trip",
    )
    axis.grid(visible=False)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour(way), alpha=0.35) for way in winners]
    heading = "fastest of the fixed ways; = as fast within a standard error"
    figure.legend(handles, list(winners), loc="outside upper center", ncols=2, title=heading)
    return figure


@picture("a-real-pair-after-the-cut", "real_cuts")
def a_real_pair_cut(result: Result) -> Figure:
    """Problems that are solved against the token at which the link dies: a device with the 0.5B
    sibling of a 1.5B target, and an API client."""
    figure, (axis,) = axes(width=7.5)
    problems = result["problems"]
    cuts = list(result["client"])
    at = range(len(cuts))
    series = {
        f"device: {way}": [100 * of_way[cut]["right"] / of_way[cut]["of"] for cut in cuts]
        for way, of_way in result["ways"].items()
        if all(of_way[cut]["of"] for cut in cuts)
    }
    series["API client"] = [100 * result["client"][cut] / problems for cut in cuts]
    target = 100 * result["target"] / problems
    axis.plot(at, [target] * len(cuts), label="target", color=colour("target"), linestyle="--")
    lines(axis, at, series)
    axis.set_xticks(at, cuts)
    axis.set(
        title="A pair of 1.5B and 0.5B: HumanEval when the link dies for good",
        xlabel="tokens of the target before the link died",
        ylabel=f"solved, % of {problems}",
        ylim=(-2, 103),
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@picture("accuracy-after-the-cut", "client_offline")
def client_cuts(result: Result) -> Figure:
    """Right answers against the token at which the link dies: the device with records, without, and
    an API client."""
    figure, (axis,) = axes(width=7.5)
    runs = result["runs"]
    cuts = values_of(result["runs"], "cut")
    shares = {(run["way"], run["cut"]): 100 * run["right"] / run["asked"] for run in runs}
    series = {way: [shares[way, cut] for cut in cuts] for way in values_of(runs, "way")}
    at = range(len(cuts))
    axis.plot(
        at, series.pop("target"), label="the target itself", color=colour("target"), linestyle="--"
    )
    lines(axis, at, series)
    axis.set_xticks(at, [str(cut) for cut in cuts])
    xlabel = "tokens that were verified before the link died"
    ylabel = f"right answers, % of {runs[0]['asked']}"
    axis.set(
        title="Right answers when the link dies for good",
        xlabel=xlabel,
        ylabel=ylabel,
        ylim=(-2, 103),
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
