"""One round as it happened: draft, up, verify, down, records; drawn from the trace of benchmarks.timeline."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.plots.kit import PALETTE, Picture, Result, Results, axes

_LANES = ("device", "link up", "verifier", "link down", "records down")
_SHADES = {
    "draft": PALETTE[0],
    "draft ahead": PALETTE[5],
    "verify": PALETTE[3],
    "queue": PALETTE[6],
    "up": PALETTE[2],
    "verdict": PALETTE[2],
    "records": PALETTE[4],
}
_LABELS = {"draft": "draft", "verify": "verify", "up": "draft goes up", "verdict": "verdict", "records": "records"}


def one_round(results: Results) -> Figure:
    """The round in the middle of the answer, and what surrounds it."""
    result = results["timeline"]
    events: Sequence[Result] = result["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["name"] in _SHADES]
    begin, end = result["round"]["from_us"], result["round"]["to_us"]
    figure, (axis,) = axes(width=9.5, height=3.8)
    labelled: set[str] = set()
    for span in spans:
        start, stop = span["ts"], span["ts"] + span["dur"]
        if stop < begin or start > end:
            continue
        lane = span["tid"] - 1
        left, width = (max(start, begin) - begin) / 1000, (min(stop, end) - max(start, begin)) / 1000
        axis.barh(lane, width, left=left, height=0.56, color=_SHADES[span["name"]])
        whole = start >= begin and stop <= end
        if whole and span["name"] in _LABELS and span["name"] not in labelled:
            labelled.add(span["name"])
            label = f"{_LABELS[span['name']]}, {span['dur'] / 1000:.1f} ms"
            axis.text(left, lane - 0.32, label, ha="left", va="bottom", fontsize=8)
    handles = [
        Rectangle((0, 0), 1, 1, color=_SHADES[name]) for name in ("draft", "draft ahead", "verify", "up", "records")
    ]
    names = ["draft", "draft on while waiting", "verify", "tokens on the link", "activation records"]
    figure.legend(handles, names, loc="outside upper center", ncols=5, fontsize=8.5)
    axis.set_yticks(range(len(_LANES)), _LANES)
    axis.set(
        ylim=(len(_LANES) - 0.4, -0.9),
        xlim=(0, (end - begin) / 1000),
        xlabel=f"milliseconds; {result['link']}, a target of {result['step_ms']:g} ms a forward (emulated)",
    )
    axis.grid(axis="y", visible=False)
    return figure


PICTURES = (
    Picture(
        "timeline",
        ("timeline",),
        "One round: the device drafts, the draft goes up, is verified, verdict and records come down.",
        one_round,
    ),
)
