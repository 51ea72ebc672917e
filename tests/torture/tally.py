"""Counts of a long run, kept in a file, so that it can be continued."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_WRONG = 20
Found = tuple[dict[str, Any], list[str]]
"""What was counted, and what was wrong."""


class Tally:
    """What one part has counted so far, in this run and in those before it."""

    def __init__(self, options: argparse.Namespace, part: str, **sizes: int) -> None:
        """The options say how many there shall be of each that is named here with the size of a
        batch."""
        if options.keep is not None:
            options.keep.mkdir(
                parents=True, exist_ok=True
            )  # a wrong one is found now, not after the first batch
        self._file = options.keep / f"{part}.json" if options.keep is not None else None
        self._options = options
        self._sizes = sizes
        self.counts: Counter[str] = Counter()
        self.most: dict[str, float] = {}
        """The largest of each quantity that is no count."""
        self.wrong: list[str] = []
        if self._file is not None and self._file.exists():
            kept = json.loads(self._file.read_text())
            self.counts.update(kept["counts"])
            self.most = kept["most"]
            self.wrong = kept["wrong"]

    def batches(self) -> Iterator[tuple[int, dict[str, int]]]:
        """The seed of each batch, one of its own also when an earlier run is gone on with, and how
        many of each."""
        while True:
            left = {
                name: max(0, getattr(self._options, name) - self.counts[name])
                for name in self._sizes
            }
            if not any(left.values()):
                return
            seed = self._options.seed + sum(self.counts[name] for name in left)
            yield seed, {name: min(count, self._sizes[name]) for name, count in left.items()}

    def add(
        self, seed: int, counts: Mapping[str, int], wrong: Iterable[str] = (), **most: float
    ) -> None:
        """Count a batch, and keep it."""
        self.counts.update(counts)
        self.wrong = [*self.wrong, *(f"batch {seed}: {one}" for one in wrong)][:_WRONG]
        for name, value in most.items():
            self.most[name] = max(value, self.most.get(name, value))
        if self._file is not None:
            fresh = self._file.with_suffix(".new")
            fresh.write_text(json.dumps(self.found[0]) + "\n")
            os.replace(fresh, self._file)

    @property
    def found(self) -> Found:
        """All of it, as JSON, and what was wrong."""
        return {"counts": dict(self.counts), "most": self.most, "wrong": self.wrong}, self.wrong
