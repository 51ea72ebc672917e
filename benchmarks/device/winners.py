"""Who is the fastest in each cell of a grid, who is as fast within a standard error, and the tables
of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.kit.figures import Result, pivot, table, titled, values_of
from benchmarks.kit.paired import EXERCISES, Estimate, speed, times

PLAIN = "plain API streaming"
AUTO = "auto"
OURS = ("device", "server-drafted", AUTO)
"""The ways of our own drafter, as users have them."""


@dataclass(frozen=True)
class Place:
    """A cell: its runs by way."""

    link: str
    step_ms: float
    temperature: float
    runs: Mapping[str, Result]
    kinds: Sequence[str]

    @property
    def fastest(self) -> str:
        """Of all ways."""
        return max(self.runs, key=lambda way: speed(self.runs[way], self.kinds).value)

    @property
    def level(self) -> list[str]:
        """The fastest, and the ways within one standard error of it, compared prompt by prompt."""
        best = self.fastest
        others = [way for way in self.runs if way != best and self.times(way, best).up_to >= 1]
        return [best, *others]

    @property
    def ours(self) -> bool:
        """Whether our drafter is among these."""
        return any(way in OURS for way in self.level)

    @property
    def best_other(self) -> str:
        """The fastest way beside `auto`."""
        others = [way for way in self.runs if way != AUTO]
        return max(others, key=lambda way: speed(self.runs[way], self.kinds).value)

    def speed(self, way: str) -> Estimate:
        """Tokens a second."""
        return speed(self.runs[way], self.kinds)

    def times(
        self, way: str, other: str, only: Collection[str] = (), *, key: str = "seconds"
    ) -> Estimate:
        """How many times as fast as another way; on these kinds of text `only`."""
        return times(self.runs[way], self.runs[other], self.kinds, only, key=key)


def places(result: Result) -> list[Place]:
    """The cells of a result, by step time, temperature and round trip of the link."""
    found: dict[tuple[float, float, str], dict[str, Any]] = {}
    for run in result["runs"]:
        found.setdefault((run["step_ms"], run["temperature"], run["link"]), {})[run["way"]] = run
    order = sorted(found, key=lambda at: (at[0], at[1], result["rtt_ms"][at[2]], at[2]))
    return [Place(link, step, t, found[step, t, link], result["kinds"]) for step, t, link in order]


def tables(result: Result) -> str:
    """Who wins where; speeds; how they compare by kind of text; and what a way costs beside time."""
    found = places(result)
    ways = values_of(result["runs"], "way")
    parts = [
        *_verdicts(found, ways),
        *_speeds(found, ways),
        *_by_kind(found, ways),
        *_costs(result, found),
    ]
    said = (
        f"{result['prompts']} held-out prompts a cell, {result['kinds'].count(EXERCISES)} of them exercises, the "
        f"others natural text; {result['tokens']} tokens at most; all texts are the same. Speeds are geometric means "
        "over prompts, ± a standard error over them; ways are compared prompt by prompt."
    )
    if result["repeats"] > 1:
        said += f" Of {result['repeats']} passes the medians."
    if busy := [one for one in result["steps"] if one["step_ms"] and "late_forwards" in one]:
        late = ", ".join(f"{one['late_forwards']:.0%} at {one['step_ms']:g} ms" for one in busy)
        said += (
            f" Links and the time of a forward are emulated: {late} took longer than stated; "
            f"{max(one['lanes'] for one in busy)} cells at a time at most, "
            f"{max(one['cores_busy'] for one in busy):.1f} cores busy at most."
        )
    return f"{titled(*parts)}\n\n{said}"


def summary(found: Sequence[Place]) -> str:
    """In how many cells our drafter wins, and how near `auto` comes to the best."""
    said = f"Our drafter is the fastest, or within a standard error of the fastest, in {_count(found)} cells."
    shares = [place.times(AUTO, place.best_other) for place in found if AUTO in place.runs]
    if shares:
        enough = sum(share.value >= 0.95 for share in shares)
        said += (
            f" `{AUTO}` has at least 0.95 of the speed of the best other way in {enough} of {len(shares)}; "
            f"the least is {min(shares, key=lambda share: share.value):.2f}."
        )
    return said


def _count(found: Sequence[Place]) -> str:
    return f"{sum(place.ours for place in found)} of {len(found)}"


def _where(place: Place) -> str:
    words = [f"{place.step_ms:g} ms"] if place.step_ms else ["the target's own speed"]
    return ", ".join(words + ([f"T = {place.temperature:g}"] if place.temperature else []))


def _verdicts(found: Sequence[Place], ways: Sequence[str]) -> Iterator[tuple[str, str]]:
    if len(ways) < 2:
        return

    def cell(place: Place) -> str:
        words = " = ".join(place.level)
        words += f", {place.times(place.fastest, PLAIN):.1f} x" if PLAIN in place.runs else ""
        auto = f"; auto at {place.times(AUTO, place.best_other):.2f}" if AUTO in place.runs else ""
        return words + auto

    title = "The fastest way, and those within a standard error of it; times plain streaming; `auto` to the best other"
    yield title, f"{_pivot(found, cell)}\n\n{summary(found)}"


def _speeds(found: Sequence[Place], ways: Sequence[str]) -> Iterator[tuple[str, str]]:
    for where in dict.fromkeys(map(_where, found)):
        here = [place for place in found if _where(place) == where]
        rows = [
            [way, *(f"{place.speed(way):.1f}" if way in place.runs else "-" for place in here)]
            for way in ways
        ]
        yield f"Tokens a second, {where}", table(["way", *(place.link for place in here)], rows)


def _by_kind(found: Sequence[Place], ways: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Over several links by halves; over one by every kind of text, and by processor time where
    that was counted."""
    shown = [way for way in OURS if way in ways]
    kinds = list(dict.fromkeys(found[0].kinds))
    if PLAIN not in ways or not shown:
        return
    words = f"{' / '.join(shown)}, times plain streaming"
    if len({place.link for place in found}) > 1:
        halves = {
            "Exercises": [EXERCISES],
            "Natural text": [kind for kind in kinds if kind != EXERCISES],
        }
        for name, only in halves.items():
            if set(only) & set(kinds):
                cell = partial(_compared, shown, only, "seconds", "{:.2f}")
                yield f"{name}: {words}", _pivot(found, cell)
        return
    for key, name in (
        ("seconds", "by seconds"),
        ("server_seconds", "by processor time of the verifier"),
    ):
        if all(all(map(all, run[key])) for place in found for run in place.runs.values()):
            rows = [
                [_where(place), *(_compared(shown, [kind], key, "{:.3f}", place) for kind in kinds)]
                for place in found
            ]
            yield f"{words}, {name}", table(["where", *kinds], rows)


def _compared(ways: Sequence[str], only: Collection[str], key: str, form: str, place: Place) -> str:
    return " / ".join(form.format(place.times(way, PLAIN, only, key=key)) for way in ways)


def _costs(result: Result, found: Sequence[Place]) -> Iterator[tuple[str, str]]:
    """At the step time in the middle."""
    steps = values_of(result["runs"], "step_ms")
    links = [place.link for place in found]
    at = sorted(steps)[len(steps) // 2]
    here = [
        run
        for run in result["runs"]
        if run["step_ms"] == at and run["temperature"] == found[0].temperature
    ]
    words = f", {at:g} ms a forward" if at else ""
    shown = {
        "Forwards of the target a token": "{forwards_per_token:.2f}",
        "Calls per 100 tokens": "{calls_per_100:.1f}",
        "Milliseconds to the first token": "{first_token_ms:.0f}",
        "Bytes up / down a token": "{up_bytes_per_token:.0f} / {down_bytes_per_token:.0f}",
        "Milliseconds of CPU on the edge a token (the client's own thread)": "{edge_cpu_ms_per_token:.2f}",
    }
    order = list(dict.fromkeys(links))
    for title, cell in shown.items():
        yield title + words, pivot(here, "way", "link", cell, "", order)
    if AUTO in values_of(here, "way"):
        yield (
            f"Who drafted the tokens, `{AUTO}`",
            _pivot(found, lambda place: _shares(place.runs[AUTO]["streamed_by"])),
        )


def _shares(counted: Mapping[str, int]) -> str:
    total = max(1, Counter(counted).total())
    return ", ".join(
        f"{name} {counted[name] / total:.0%}"
        for name in ("device", "server", "none")
        if name in counted
    )


def _pivot(found: Sequence[Place], cell: Callable[[Place], str]) -> str:
    """A line for each step time and temperature, a column for each link."""
    runs = [{"where": _where(place), "link": place.link, "place": place} for place in found]
    return pivot(runs, "where", "link", lambda run: cell(run["place"]), "")
