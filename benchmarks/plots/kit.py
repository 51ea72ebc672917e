"""What all pictures share: colours that most colour-blind readers can tell apart, captions that
name the source.

A picture carries a hash of the results that it was drawn from, so that a test can say when it is
out of date without comparing bytes, which change with every version of the plotting library.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.kit.figures import Result

_BLUE = "#0072B2"
_ORANGE = "#E69F00"
_GREEN = "#009E73"
_RED = "#D55E00"
_PURPLE = "#CC79A7"
_SKY = "#56B4E9"
_YELLOW = "#F0E442"
_GREY = "#767676"
"""Okabe and Ito's palette."""
PALETTE = (_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _GREY)
MARKERS = "osD^vPX*"
_COLOURS = (  # what a name begins with -> its colour in every picture
    ("auto", _BLUE),
    ("device, waiting", _YELLOW),
    ("device, independent", _GREEN),
    ("device", _SKY),
    ("server-drafted, eagle2", _ORANGE),
    ("server-drafted, independent", _RED),
    ("server-drafted", _PURPLE),
    ("plain", _GREY),
    ("a call a token", "#222222"),
    ("drafter", _BLUE),
    ("moa without", _SKY),
    ("moa0", _SKY),
    ("moa3", _PURPLE),
    ("moa", _BLUE),
    ("eagle3", _RED),
    ("eagle", _ORANGE),
    ("independent", _GREEN),
    ("API client", _GREY),
    ("target", "#222222"),
)
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    # Matplotlib would look for the best place, and warns where that takes a second
    "legend.loc": "upper right",
    "svg.fonttype": "none",
    "svg.hashsalt": "moa-edge",
}
_HASH = re.compile(r"results ([0-9a-f]{64})")


@dataclass(frozen=True)
class Picture:
    """A picture, the result it needs, and how it is drawn from it."""

    name: str
    source: str
    alt: str
    """A sentence that describes it, for screen readers."""
    draw: Callable[[Result], Figure]


PICTURES: dict[str, Picture] = {}
"""All there are, by name."""


def picture(
    name: str, source: str
) -> Callable[[Callable[[Result], Figure]], Callable[[Result], Figure]]:
    """The function below draws the picture `name` from the result `source`; its docstring says what
    is seen."""

    def register(draw: Callable[[Result], Figure]) -> Callable[[Result], Figure]:
        PICTURES[name] = Picture(name, source, " ".join((draw.__doc__ or "").split()), draw)
        return draw

    return register


def colour(name: str) -> str:
    """The colour of a way or drafter, the same in every picture."""
    known = (shade for start, shade in _COLOURS if name.lower().startswith(start.lower()))
    return next(known, PALETTE[int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(PALETTE)])


def axes(
    count: int = 1, *, width: float = 7.0, height: float = 4.2, **how: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    figure, panels = pyplot.subplots(
        1, count, figsize=(width, height), squeeze=False, layout="constrained", **how
    )
    return figure, list(panels[0])


def bars(
    axis: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    form: str = "",
    errors: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Bars side by side in groups; `form` writes each bar's value over it, `errors` are drawn
    across its end."""
    width = 0.82 / len(series)
    for number, (name, values) in enumerate(series.items()):
        at = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = axis.bar(
            at,
            [value or 0.0 for value in values],
            width * 0.92,
            label=name,
            color=colour(name),
            edgecolor="white",
        )
        if errors is not None:
            whiskers(axis, at, [value or float("nan") for value in values], errors[name])
        if form:
            labels = ["" if value is None else form.format(value) for value in values]
            axis.bar_label(drawn, labels, fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(axis="x", visible=False)


def whiskers(
    axis: Axes, at: Sequence[float], values: Sequence[float], errors: Sequence[float]
) -> None:
    """A standard error up and down from each value."""
    axis.errorbar(at, values, yerr=errors, fmt="none", ecolor="#444444", elinewidth=1, capsize=2)


def lines(
    axis: Axes, at: Sequence[Any], series: Mapping[str, Sequence[float | None]], **how: Any
) -> None:
    """A line with its own marker for each series; what was not measured leaves a gap."""
    for (name, values), marker in zip(series.items(), MARKERS, strict=False):
        points = [float("nan") if value is None else value for value in values]
        axis.plot(at, points, **({"marker": marker, "label": name, "color": colour(name)} | how))


def digest(result: Result) -> str:
    """A hash of what a picture is drawn from."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def caption(result: Result, inches: float) -> str:
    """Where the figures come from: command, commit, machine; in lines that fit."""
    origin = result.get("provenance", {})
    hardware = origin.get("hardware", {})
    machine = hardware.get("gpu") or hardware.get("processor") or "unknown machine"
    text = (
        f"{origin.get('command', 'unknown command')} | commit {origin.get('commit', 'unknown')} | "
        f"{machine}, {hardware.get('cores', '?')} cores"
    )
    return "\n".join(textwrap.wrap(text, int(18 * inches)))


def save(picture: Picture, result: Result, folder: Path) -> list[Path]:
    """Draw it and write both files."""
    with matplotlib.rc_context(_STYLE):
        figure = picture.draw(result)
        # Below everything else.
        source = caption(result, figure.get_figwidth())
        figure.supxlabel(source, fontsize=6.5, color="#666666", x=0.01, ha="left")
        says = f"results {digest(result)}"
        png = folder / f"{picture.name}.png"
        svg = folder / f"{picture.name}.svg"
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=150, metadata={"Description": says, "Software": None})
        figure.savefig(
            svg, metadata={"Description": says, "Title": picture.alt, "Date": None, "Creator": None}
        )
        pyplot.close(figure)
    # Trailing blanks, which the SVG backend leaves, are none of the picture.
    text = svg.read_text(encoding="utf-8").splitlines()
    svg.write_text("".join(f"{line.rstrip()}\n" for line in text), encoding="utf-8")
    return [png, svg]


def drawn_from(svg: Path) -> str:
    """The hash that a picture carries; "" when there is no picture."""
    if not svg.exists():
        return ""
    found = _HASH.search(svg.read_text(encoding="utf-8"))
    return found.group(1) if found else ""
