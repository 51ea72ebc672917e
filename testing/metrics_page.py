"""Reads a verifier's `/metrics`, and differences between two readings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

Page = Mapping[str, float]
"""Every sample by its name with its labels, as it stands in the text."""


async def look(url: str, token: str = "") -> Page:
    """The samples of now."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    allowed = f"Authorization: Bearer {token}\r\n" if token else ""
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{allowed}\r\n".encode())
    text = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    lines = (
        line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")
    )
    return {name: float(value) for name, _, value in lines}


def gained(readings: Iterable[tuple[Page, Page]]) -> Page:
    """What was counted between two readings, over all such pairs."""
    found: dict[str, float] = {}
    for before, after in readings:
        for name, value in after.items():
            found[name] = found.get(name, 0.0) + value - before.get(name, 0.0)
    return found


@dataclass(frozen=True)
class Histogram:
    """Observations by bucket; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @classmethod
    def of(cls, gained: Page, name: str, label: str = "") -> Histogram:
        """One of a page; `label` is `name="value"`."""
        pattern = re.compile(rf'{name}_bucket{{{label + "," if label else ""}le="(.+)"}}')
        found = [
            (float(match[1]), upto)
            for sample, upto in gained.items()
            if (match := pattern.fullmatch(sample))
        ]
        bounds, upto = zip(*sorted(found), strict=True)
        counts = tuple(int(high - low) for low, high in pairwise((0.0, *upto)))
        return cls(bounds, counts, gained[f"{name}_sum" + (f"{{{label}}}" if label else "")])

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """The value that a share `q` stays below, by a straight line through its bucket."""
        below = 0
        lower = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and below + count >= q * self.count:
                return (
                    lower
                    + (min(bound, 2 * self.bounds[-2]) - lower) * (q * self.count - below) / count
                )
            below = below + count
            lower = bound
        return 0.0

    def shares(self) -> dict[str, float]:
        """The share of every bucket that has one, by its upper bound."""
        return {
            f"{bound:g}": round(count / self.count, 3)
            for bound, count in zip(self.bounds, self.counts, strict=True)
            if count
        }
