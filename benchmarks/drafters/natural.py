"""Drafters of equal size and training on natural text: tokens won a round in a chain of six, by kind of text.

The main figure is the mean over kinds: code and English of packages that no training saw, requests that mix skills, and
the exercises as one kind beside them. A drafter trained with several seeds is several folders, `NAME`, `NAME-1`, ...
Only drafters with equal training steps are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.drafters.acceptance import SHAPES, Drafted, checked, compare
from benchmarks.kit.figures import table, titled, values_of
from benchmarks.kit.options import one_of
from benchmarks.kit.pair import shown_name
from benchmarks.kit.seeds import YARDSTICKS, method, methods
from benchmarks.witness import texts
from demo import held_out


@dataclass(frozen=True, kw_only=True)
class Options(Drafted):
    """What is drafted."""

    per_kind: int = 28
    """Held-out prompts of each kind of text."""
    tokens: int = 64
    """Tokens of a continuation at most."""
    shapes: tuple[str, ...] = one_of(("chain",), SHAPES)
    """Shapes of drafts."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    witness: bool = False
    """Code, English and chat-like prompts for the witness, a base model, in place of the demo's."""


def measure(options: Options) -> dict[str, Any]:
    """Run every drafter at every temperature; each text is compared with plain decoding's."""
    if options.witness:
        return compare(options, texts.prompts(options.per_kind))
    return compare(options, held_out.by_kind(options.per_kind, options.seed))


def tables(result: Mapping[str, Any]) -> str:
    """Tokens a round by kind of text, one table for each temperature."""
    parts = []
    for temperature in values_of(result["runs"], "temperature"):
        found = methods(result, temperature)
        kinds = list(found[0]["kinds"])
        rows = []
        for one in found:
            ratios = [one[f"vs {name}"] for name in YARDSTICKS]
            rows.append([
                shown_name(one["drafter"]),
                "-" if one["steps"] is None else str(one["steps"]),
                str(one["seeds"]),
                *("{:.2f} ± {:.2f}".format(*one["kinds"][kind]) for kind in kinds),
                f"**{one['mean']:.2f}** ± {one['se']:.2f}",
                *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            ])  # fmt: skip
        header = ["drafter", "steps", "seeds", *kinds, "**mean**", *(f"vs {name}" for name in YARDSTICKS)]
        parts.append((f"Tokens a round (± standard error), chain of 6, T = {temperature:g}", table(header, rows)))
    told = {method(run): run for run in result["runs"]}
    sizes = [
        f"* {shown_name(name)}: {run['says'] or 'embedded, trained for longer'}"
        + (f"; {run['parameters']:,} parameters on the device" if run["parameters"] else "")
        for name, run in told.items()
    ]
    return "\n\n".join([titled(*parts), "\n".join(sizes), checked(result)])
