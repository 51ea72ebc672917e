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


async def look(url: str) -> Page:
    """The samples of now."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: benchmark\r\n\r\n")
    text = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@dataclass(frozen=True)
class Histogram:
    """Observations by bucket; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @classmethod
    def between(cls, before: Page, after: Page, name: str, label: str = "") -> Histogram:
        """What a histogram has gained; `label` is `name="value"`."""
        pattern = re.compile(rf'{name}_bucket{{{label + "," if label else ""}le="(.+)"}}')
        found = [(float(match[1]), sample) for sample in after if (match := pattern.fullmatch(sample))]
        bounds, samples = zip(*sorted(found), strict=True)
        upto = [0.0, *(after[sample] - before.get(sample, 0.0) for sample in samples)]
        total = f"{name}_sum" + (f"{{{label}}}" if label else "")
        return cls(
            bounds=bounds,
            counts=tuple(int(high - low) for low, high in pairwise(upto)),
            total=after[total] - before.get(total, 0.0),
        )

    @classmethod
    def sum(cls, parts: Iterable[Histogram]) -> Histogram:
        """All of them as one; they have the same buckets."""
        found = list(parts)
        counts = tuple(sum(column) for column in zip(*(part.counts for part in found), strict=True))
        return cls(found[0].bounds, counts, sum(part.total for part in found))

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
        below, lower = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and below + count >= q * self.count:
                return lower + (min(bound, 2 * self.bounds[-2]) - lower) * (q * self.count - below) / count
            below, lower = below + count, bound
        return 0.0

    def shares(self) -> dict[str, float]:
        """The share of every bucket that has one, by its upper bound."""
        return {
            f"{bound:g}": round(count / self.count, 3)
            for bound, count in zip(self.bounds, self.counts, strict=True)
            if count
        }
