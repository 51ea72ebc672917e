"""Pictures about the verifier: how many readers it holds."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.plots.kit import Picture, Results, axes, colour


def capacity(results: Results) -> Figure:
    """Readers that one verifier holds, by way of decoding and target."""
    result = results["capacity"]
    targets = list(dict.fromkeys(run["target"] for run in result["capacity"]))
    figure, panels = axes(len(targets), width=2 + 3.3 * len(targets), height=4.2)
    for axis, target in zip(panels, targets, strict=True):
        runs = [run for run in result["capacity"] if run["target"] == target]
        plain = next((run["users"] for run in runs if run["way"].startswith("plain")), 0)
        names = [run["way"] for run in runs]
        drawn = axis.bar(range(len(runs)), [run["users"] for run in runs], color=[colour(name) for name in names])
        labels = [f"{run['users']}" + (f"\n{run['users'] / plain:.1f} x" if plain else "") for run in runs]
        axis.bar_label(drawn, labels, padding=2)
        axis.set_xticks(range(len(runs)), [name.replace(" ", "\n", 1) for name in names])
        axis.set(title=target, ylabel=f"readers at {result['reading_speed']:g} tokens/s")
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.18)
    return figure


PICTURES = (
    Picture(
        "capacity",
        ("capacity",),
        "Readers at ten tokens a second that one verifier holds, by who drafts.",
        capacity,
    ),
)
