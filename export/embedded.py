"""The embedded pair as a source: its folders, and held-out prompts."""

from __future__ import annotations

from itertools import islice

from moa.demo import paths
from moa.demo.corpus import examples
from moa.demo.natural import Split
from moa.errors import UsageError


def embedded_sources() -> tuple[str, str]:
    """Target and drafter."""
    found = paths()
    for folder in (found.target, found.drafter):
        if not any(folder.glob("*.safetensors")):
            raise UsageError(
                f"this installation has no embedded pair: {folder.name} has no weights",
                hint="make it with `python -m moa.demo.train`, or give --target and --drafter",
            )
    return str(found.target), str(found.drafter)


def embedded_prompts(count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Held-out prompts to measure with, and training prompts to choose a draft vocabulary by."""
    return _prompts("heldout", count), _prompts("train", 8 * count)


def _prompts(split: Split, count: int) -> tuple[str, ...]:
    return tuple(example.prompt for example in islice(examples(split, 1234), count))
