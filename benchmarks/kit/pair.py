"""The embedded pair, and the drafters that it is compared with where they have been trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moa.demo import paths

WEIGHTS = Path(__file__).parents[1] / "baselines" / "weights"
"""Drafters to compare with the embedded one, as `benchmarks.baselines.train --out` leaves them. They fit one target
alone, so none is kept here: train them for the pair at hand."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Options of all experiments in which drafters are compared beside the target."""

    drafters: tuple[str, ...] = ()
    """Folders, MoA's or baselines'; without them the embedded drafter and all in benchmarks/baselines/weights."""
    target: str = str(paths().target)
    """Folder or hub id."""
    capacity: int = 640
    """Longest prompt and answer together."""
    seed: int = 0
    device: str = "cpu"
    """Of torch."""

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
    """Those that also stand alone as a model: for the target's answers and for assisted generation."""
    return [folder for folder in trained() if folder.name.startswith("independent")]


def shown_name(folder: Path | str) -> str:
    """What tables call a drafter."""
    name = Path(folder).name
    return "MoA" if name == "drafter" else name
