"""Counts of a long run, kept in a file, so that it can be continued."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

_WRONG = 20


class Tally:
    """What one part has counted so far, in this run and in those before it."""

    def __init__(self, folder: Path | None, part: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)  # a wrong one is found now, not after the first batch
        self._file = folder / f"{part}.json" if folder is not None else None
        self.counts: Counter[str] = Counter()
        self.most: dict[str, float] = {}
        """The largest of each quantity that is no count."""
        self.wrong: list[str] = []
        if self._file is not None and self._file.exists():
            kept = json.loads(self._file.read_text())
            self.counts.update(kept["counts"])
            self.most, self.wrong = kept["most"], kept["wrong"]

    def add(self, seed: int, counts: Mapping[str, int], wrong: Iterable[str] = (), **most: float) -> None:
        """Count a batch, and keep it."""
        self.counts.update(counts)
        self.wrong = [*self.wrong, *(f"batch {seed}: {one}" for one in wrong)][:_WRONG]
        for name, value in most.items():
            self.most[name] = max(value, self.most.get(name, value))
        if self._file is not None:
            fresh = self._file.with_suffix(".new")
            fresh.write_text(json.dumps(self.found()) + "\n")
            os.replace(fresh, self._file)

    def found(self) -> dict[str, object]:
        """All of it, as JSON."""
        return {"counts": dict(self.counts), "most": self.most, "wrong": self.wrong}
