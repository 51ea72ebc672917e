"""The embedded pair, and trained drafters to compare it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moa.demo import paths

WEIGHTS = Path(__file__).parents[1] / "baselines" / "weights"
"""Drafters to compare with the embedded one, as `benchmarks.baselines.train --out` leaves them.
They fit only one target, so none is kept here: train them for the current pair."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Options of all experiments in which drafters are compared beside the target."""

    drafters: tuple[str, ...] = ()
    """Folders, MoA's or baselines'; without them the embedded drafter and all in
    benchmarks/baselines/weights."""
    target: str = str(paths().target)
    """Folder or hub id of the target."""
    capacity: int = 640
    """Longest prompt and answer together."""
    seed: int = 0
    device: str = "cpu"
    """Torch device."""

    @property
    def place(self) -> Any:
        """The same, as `Module.to` takes it: the library's own annotation of that is wrong."""
        return self.device

    @property
    def folders(self) -> list[Path]:
        """The drafters' folders."""
        return [Path(folder) for folder in self.drafters] or [paths().drafter, *trained()]


def trained() -> list[Path]:
    """Folders of trained baselines."""
    return [file.parent for file in sorted(WEIGHTS.glob("*/config.json"))]


def independent() -> list[Path]:
    """Those that are also complete models: for answers and for assisted generation."""
    return [folder for folder in trained() if folder.name.startswith("independent")]
