"""Pictures about device and server: speed by link, the fastest way, records, outages, one round, capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.device.winners import AUTO, PLAIN, places
from benchmarks.kit.figures import Result, values_of
from benchmarks.plots.kit import PALETTE, axes, bars, colour, legend_above, lines, picture, whiskers

PROMPT_ONLY = "prompt only"


@picture("speed-by-link", "client_links")
def speed_by_link(result: Result) -> Figure:
    """Tokens a second of every way of decoding over emulated links, with standard errors."""
    found = places(result)
    figure, (axis,) = axes(width=9.5, height=4.4)
    speeds = {way: [place.speed(way) for place in found] for way in values_of(result["runs"], "way")}
    series = {way: [one.value for one in of_way] for way, of_way in speeds.items()}
    errors = {way: [one.error for one in of_way] for way, of_way in speeds.items()}
    bars(axis, [place.link for place in found], series, form="{:.0f}", errors=errors)
    axis.set(title="Speed by link (target beside it on the same two cores)", ylabel="tokens/s", xlabel="emulated link")
    axis.legend(ncols=2)
    return figure


@picture("who-wins-where", "client_slow")
def who_wins(result: Result) -> Figure:
    """The fastest way of decoding by round trip of the link and step time of the target, who is as fast within a
    standard error, and how near `auto` comes."""
    found = places(result)
    links, steps = list(dict.fromkeys(place.link for place in found)), values_of(result["runs"], "step_ms")
    figure, (axis,) = axes(width=2.1 * len(steps) + 3.2, height=1.15 * len(links) + 2.1)
    winners: dict[str, None] = {}
    for place in found:
        x, y, best = steps.index(place.step_ms), links.index(place.link), place.best_other
        winners[best] = None
        axis.add_patch(Rectangle((x, y), 1, 1, facecolor=colour(best), alpha=0.35, edgecolor="white", linewidth=3))
        words = [f"{place.speed(best):.0f} tokens/s"]
        words += [f"{place.times(best, PLAIN):.1f} x plain"] if PLAIN in place.runs else []
        words += [f"auto: {place.times(AUTO, best):.2f} x"] if AUTO in place.runs else []
        words += [f"= {way}" for way in place.level if way not in (best, AUTO)]
        axis.text(x + 0.5, y + 0.5, "\n".join(words), ha="center", va="center", fontsize=8.5)
    axis.set(xlim=(0, len(steps)), ylim=(0, len(links)), title="Who is fastest where, and how near auto comes")
    axis.set_xticks([x + 0.5 for x in range(len(steps))], [f"{step:g}" for step in steps])
    axis.set_yticks([y + 0.5 for y in range(len(links))], [f"{link}\n{result['rtt_ms'][link]:g} ms" for link in links])
    axis.set(xlabel="emulated milliseconds of a forward of the target", ylabel="link and its mean round trip")
    axis.grid(visible=False)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour(way), alpha=0.35) for way in winners]
    title = "fastest of the fixed ways; = as fast within a standard error"
    figure.legend(handles, list(winners), loc="outside upper center", ncols=2, title=title)
    return figure


@picture("speed-by-step-time", "client_slow")
def speed_by_step(result: Result) -> Figure:
    """Tokens a second against the target's step time, by way of decoding, for each link, with standard errors."""
    found = {(place.link, place.step_ms): place for place in places(result)}
    links, steps = list(dict.fromkeys(link for link, _ in found)), values_of(result["runs"], "step_ms")
    figure, panels = axes(len(links), width=2.5 * len(links) + 1, height=4.4, sharey=True)
    for axis, link in zip(panels, links, strict=True):
        speeds = {way: [found[link, step].speed(way) for step in steps] for way in values_of(result["runs"], "way")}
        lines(axis, steps, {way: [one.value for one in of_way] for way, of_way in speeds.items()}, markersize=4)
        for of_way in speeds.values():
            whiskers(axis, steps, [one.value for one in of_way], [one.error for one in of_way])
        axis.set(title=f"{link}, {result['rtt_ms'][link]:g} ms", xscale="log", yscale="log", xlabel="ms a forward")
        axis.set_xticks(steps, [f"{step:g}" for step in steps])
        axis.minorticks_off()
    ticks = [2, 5, 10, 20, 50, 100, 200]
    panels[0].set_yticks(ticks, [str(tick) for tick in ticks])
    panels[0].set_ylabel("tokens/s")
    legend_above(figure, panels[0], ncols=4, fontsize=9)
    return figure


@picture("acceptance-by-records", "client_records")
def records(result: Result) -> Figure:
    """Tokens won per verification when records are late, coarse or missing."""
    runs, whats = result["runs"], values_of(result["runs"], "what")
    titles = {
        "lag": "newest records late by",
        "precision": "precision on the wire",
        "prompt rows held": "share of the prompt's\nrows held",
        "rows held": "share of all rows held,\nat random",
    }
    widths = [1.5, *([1] * (len(whats) - 1))]
    figure, panels = axes(len(whats), width=11.5, height=4.0, sharey=True, width_ratios=widths)
    shades = {"chain": colour("auto"), "tree": colour("eagle")}
    for axis, what in zip(panels, whats, strict=True):
        found = {(run["shape"], str(run["value"])): run["tau"] for run in runs if run["what"] == what}
        values = list(dict.fromkeys(value for _, value in found))
        line = [value for value in values if value != PROMPT_ONLY]
        for shape, marker in (("chain", "o"), ("tree", "s")):
            taus = [found[shape, value] for value in line]
            axis.plot(range(len(line)), taus, marker=marker, label=shape, color=shades[shape])
            if PROMPT_ONLY in values:  # no lag, so no part of the line
                axis.plot(len(line) + 0.4, found[shape, PROMPT_ONLY], marker=marker, color=shades[shape])
        ticks = [len(values) - 0.6 if value == PROMPT_ONLY else place for place, value in enumerate(values)]
        axis.set_xticks(ticks, [value.replace(" ", "\n") for value in values])
        axis.set(title=titles.get(what, what), xlabel="tokens" if what == "lag" else "")
    panels[0].set(ylabel="tokens won per verification", ylim=(1, None))
    panels[0].legend()
    return figure


@picture("reconnection", "client_reconnect")
def reconnection(result: Result) -> Figure:
    """Right answers, time and withdrawn tokens by the length of an outage, for both policies."""
    runs = [run | {"right_share": 100 * run["right"] / run["asked"]} for run in result["runs"]]
    gaps, cuts = sorted(values_of(runs, "gap_seconds")), sorted(values_of(runs, "cut"))
    found = {(run["policy"], run["cut"], run["gap_seconds"]): run for run in runs}
    figure, panels = axes(3, width=11, height=4.0)
    shades = {"rewind": colour("auto"), "keep": colour("eagle")}
    shown = {"right_share": "right answers, %", "seconds": "seconds to the end", "retracted": "tokens withdrawn"}
    for axis, (key, title) in zip(panels, shown.items(), strict=True):
        for policy in values_of(runs, "policy"):
            for cut, style, marker in zip(cuts, ("-", "--", ":"), "os^", strict=False):
                values = [found[policy, cut, gap][key] for gap in gaps]
                how: dict[str, Any] = {"linestyle": style, "marker": marker, "label": f"{policy}, cut after {cut}"}
                axis.plot(range(len(gaps)), values, color=shades.get(policy, colour(policy)), **how)
        axis.set_xticks(range(len(gaps)), [f"{gap:g}" for gap in gaps])
        axis.set(title=title, xlabel="seconds without a link", ylim=(0, 105 if key == "right_share" else None))
    panels[0].legend(fontsize=8, loc="lower left")
    return figure


_LANES = ("device", "link up", "verifier", "link down", "records down")
_SPANS = {  # its colour, the words beside the first whole one, and the words of the legend
    "draft": (PALETTE[0], "", ""),
    "foresee": (PALETTE[5], "", "guess what comes next"),
    "verify": (PALETTE[3], "verify", "verify"),
    "verify on": (PALETTE[1], "go on over what was foreseen", "verify without a round trip"),
    "up": (PALETTE[2], "guesses go up", "tokens on the link"),
    "verdict": (PALETTE[2], "tokens", ""),
    "records": (PALETTE[4], "records", "activation records"),
}


@picture("timeline", "timeline")
def one_round(result: Result) -> Figure:
    """Two rounds without a round trip between them: guesses go up, and the verifier goes on over what was foreseen."""
    events: Sequence[Result] = result["traceEvents"]
    begin, end = result["round"]["from_us"], result["round"]["to_us"]
    figure, (axis,) = axes(width=9.5, height=3.8)
    beside = {name: words for name, (_, words, _) in _SPANS.items() if words}
    for span in events:
        if span["ph"] != "X" or span["name"] not in _SPANS:
            continue
        start, stop = span["ts"], span["ts"] + span["dur"]
        if stop < begin or start > end:
            continue
        lane, left = span["tid"] - 1, (max(start, begin) - begin) / 1000
        width = (min(stop, end) - max(start, begin)) / 1000
        axis.barh(lane, width, left=left, height=0.56, color=_SPANS[span["name"]][0])
        if start >= begin and stop <= end and (words := beside.pop(span["name"], "")):
            label = f"{words}, {span['dur'] / 1000:.1f} ms"
            axis.text(left, lane - 0.32, label, ha="left", va="bottom", fontsize=8)
    legend = {words: Rectangle((0, 0), 1, 1, color=shade) for shade, _, words in _SPANS.values() if words}
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=5, fontsize=8.5)
    axis.set_yticks(range(len(_LANES)), _LANES)
    xlabel = f"milliseconds; {result['link']}, a target of {result['step_ms']:g} ms a forward (emulated)"
    axis.set(ylim=(len(_LANES) - 0.4, -0.9), xlim=(0, (end - begin) / 1000), xlabel=xlabel)
    axis.grid(axis="y", visible=False)
    return figure


@picture("capacity", "capacity")
def capacity(result: Result) -> Figure:
    """Readers at ten tokens a second that one verifier holds, by who drafts."""
    targets = values_of(result["runs"], "target")
    figure, panels = axes(len(targets), width=2 + 3.3 * len(targets), height=4.2)
    for axis, target in zip(panels, targets, strict=True):
        users = {run["way"]: run["users"] for run in result["runs"] if run["target"] == target}
        plain = users.get("plain decoding", 0)
        drawn = axis.bar(range(len(users)), list(users.values()), color=[colour(name) for name in users])
        labels = [f"{count}" + (f"\n{count / plain:.1f} x" if plain else "") for count in users.values()]
        axis.bar_label(drawn, labels, padding=2)
        axis.set_xticks(range(len(users)), [name.replace(" ", "\n", 1) for name in users])
        axis.set(title=target, ylabel=f"readers at {result['reading_speed']:g} tokens/s")
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.18)
    return figure
