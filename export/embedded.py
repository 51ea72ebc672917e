"""The embedded pair as a source: its folders, and held-out prompts."""

from __future__ import annotations

import json

from moa.demo import paths
from moa.errors import UsageError

MOST_PROMPTS = 128
"""Held-out prompts that `moa/demo/prompts.json` holds; `python -m demo.train prompts` writes it."""


def embedded_sources() -> tuple[str, str]:
    """Target and drafter."""
    found = paths()
    for folder in (found.target, found.drafter):
        if not any(folder.glob("*.safetensors")):
            raise UsageError(
                f"this installation has no embedded pair: {folder.name} has no weights",
                hint="make it with `python -m demo.train` in a checkout, or give --target and --drafter",
            )
    return str(found.target), str(found.drafter)


def embedded_prompts(count: int = 32) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Held-out prompts to measure with, and training prompts to choose a draft vocabulary by."""
    prompts = json.loads(paths().prompts.read_text(encoding="utf-8"))
    return tuple(prompts["heldout"][:count]), tuple(prompts["train"][: 8 * count])
