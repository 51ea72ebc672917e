"""What all pictures share: colours that most colour-blind readers can tell apart, captions that name the source.

A picture carries a hash of the results that it was drawn from, so that a test can say when it is out of date without
comparing bytes, which change with every version of the plotting library.
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

Result = Mapping[str, Any]
Results = Mapping[str, Result]

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _YELLOW, _GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#767676",
)  # fmt: skip
"""Okabe and Ito's palette."""
PALETTE = (_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _GREY)
MARKERS = "osD^vPX*"
_COLOURS = (  # what a name begins with -> its colour in every picture
    ("auto", _BLUE),
    ("device, waiting", _YELLOW),
    ("device, independent", _GREEN),
    ("device", _SKY),
    ("server-drafted, eagle2", _ORANGE),
    ("server-drafted", _PURPLE),
    ("plain", _GREY),
    ("a call a token", "#222222"),
    ("drafter", _BLUE),
    ("moa without", _SKY),
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
    "svg.fonttype": "none",
    "svg.hashsalt": "moa-edge",
}
_HASH = re.compile(r"results ([0-9a-f]{64})")


@dataclass(frozen=True)
class Picture:
    """A picture, the results it needs, and how it is drawn from them."""

    name: str
    sources: tuple[str, ...]
    alt: str
    """What it shows, in a sentence, for whoever cannot see it."""
    draw: Callable[[Results], Figure]

    def drawable(self, results: Results) -> bool:
        """Whether all that it needs has been measured."""
        return all(source in results for source in self.sources)


def colour(name: str) -> str:
    """The colour of a way or drafter, the same in every picture."""
    known = (shade for start, shade in _COLOURS if name.lower().startswith(start.lower()))
    return next(known, PALETTE[int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(PALETTE)])


def axes(count: int = 1, *, width: float = 7.0, height: float = 4.2, **how: Any) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    figure, panels = pyplot.subplots(1, count, figsize=(width, height), squeeze=False, layout="constrained", **how)
    return figure, list(panels[0])


def bars(axis: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], *, form: str = "") -> None:
    """Bars side by side in groups; `form` writes each bar's value over it."""
    width = 0.82 / len(series)
    for number, (name, values) in enumerate(series.items()):
        at = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = axis.bar(
            at, [value or 0.0 for value in values], width * 0.92, label=name, color=colour(name), edgecolor="white"
        )
        if form:
            labels = ["" if value is None else form.format(value) for value in values]
            axis.bar_label(drawn, labels, fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(axis="x", visible=False)


def digest(results: Results, sources: Sequence[str]) -> str:
    """A hash of what a picture is drawn from."""
    text = json.dumps({source: results[source] for source in sources}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def caption(results: Results, sources: Sequence[str], inches: float) -> str:
    """Where the figures come from: command, commit, machine; in lines that fit."""
    lines = []
    for source in sources:
        origin = results[source].get("provenance", {})
        hardware = origin.get("hardware", {})
        machine = hardware.get("gpu") or hardware.get("processor") or "unknown machine"
        lines.append(
            f"{origin.get('command', 'unknown command')} | commit {origin.get('commit', 'unknown')} | "
            f"{machine}, {hardware.get('cores', '?')} cores"
        )
    return "\n".join(part for line in lines for part in textwrap.wrap(line, int(18 * inches)))


def save(picture: Picture, results: Results, folder: Path) -> list[Path]:
    """Draw it and write both files."""
    with matplotlib.rc_context(_STYLE):
        figure = picture.draw(results)
        source = caption(results, picture.sources, figure.get_figwidth())
        # Under everything else: the layout makes room for it.
        figure.supxlabel(source, fontsize=6.5, color="#666666", x=0.01, ha="left")
        says = f"results {digest(results, picture.sources)}"
        png, svg = folder / f"{picture.name}.png", folder / f"{picture.name}.svg"
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=150, metadata={"Description": says, "Software": None})
        figure.savefig(svg, metadata={"Description": says, "Title": picture.alt, "Date": None, "Creator": None})
        pyplot.close(figure)
    # Trailing blanks, which the SVG backend leaves, are none of the picture.
    lines = svg.read_text(encoding="utf-8").splitlines()
    svg.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")
    return [png, svg]


def drawn_from(svg: Path) -> str:
    """The hash that a picture carries; "" when there is no picture."""
    if not svg.exists():
        return ""
    found = _HASH.search(svg.read_text(encoding="utf-8"))
    return found.group(1) if found else ""


def read(folder: Path) -> dict[str, Result]:
    """All results of a folder, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
