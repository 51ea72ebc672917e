"""A timeline of the client, for https://ui.perfetto.dev (the Chrome trace format)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any


class Trace:
    """Spans and marks; costs almost nothing while it is off."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self._records: list[dict[str, Any]] = []
        self._origin = perf_counter()

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """An operation with a duration."""
        if not self.enabled:
            yield
            return
        start = perf_counter()
        try:
            yield
        finally:
            self._add(name, start, {"ph": "X", "dur": 1e6 * (perf_counter() - start)}, details)

    def mark(self, name: str, **details: Any) -> None:
        """An event."""
        if self.enabled:
            self._add(name, perf_counter(), {"ph": "i", "s": "t"}, details)

    def _add(self, name: str, at: float, kind: dict[str, Any], details: dict[str, Any]) -> None:
        self._records.append(
            {"name": name, "ts": 1e6 * (at - self._origin), "pid": 1, "tid": 1, **kind, "args": details}
        )

    def write(self, path: Path) -> None:
        """Save what was recorded."""
        path.write_text(json.dumps({"traceEvents": self._records, "displayTimeUnit": "ms"}), encoding="utf-8")
