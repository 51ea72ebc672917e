"""How far a build is: what is said of it, and of the time that is left."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from export.build import BuildSettings, build, parts_of, step_times
from export.cli import _PAUSE_SECONDS, _ProgressLines
from export.progress import Part, Progress
from testing.tiny import save_tiny

LEFT = re.compile(r"\((\d+)%, (\d+) s, about (\d+) s left\)")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# Seconds between what was counted, by parts, in real builds on busy machines.
LARGE = ((20,), (200,), (44,) * 5, (7.5,) * 10, (25,))
"""A model of 494M weights."""
SMALL = ((2.2,), (108,), (2.5, 7.6, 9.0, 1.6, 3.0), (2.0, 2.0), (2.8,))
"""One of 7M weights."""
Told = tuple[float, int, int, int]
"""When, the share in percent, the seconds taken and those left."""


def told_of(
    times: Sequence[Sequence[float]], weights: int, slowdown: float
) -> tuple[list[Told], list[str]]:
    """What is told each second of a build whose parts take so long, and the lines of that."""
    clock = Clock()
    lines: list[str] = []
    settings = BuildSettings(target="t", drafter="d", out=Path("o"), variants=("cpu-int4",))
    parts = parts_of(settings, weights, slowdown)
    progress = Progress(parts, lines.append, lines.append, clock)
    began = clock.now
    found: list[Told] = []

    def note() -> None:
        match = LEFT.search(lines[-1])
        if match is not None:
            share, taken, left = map(int, match.groups())
            found.append((clock.now - began, share, taken, left))

    end = clock.now
    for part in times:
        progress.begin(total=len(part) if len(part) > 1 else 0)
        note()
        for seconds in part:
            end += seconds
            while clock.now + 1 < end:
                clock.now += 1
                progress.tick()
                note()
            clock.now = end
            if len(part) > 1:
                progress.count(1, "more")
                note()
    return found, lines


@pytest.mark.parametrize("slowdown", [1.0, 5.0, 9.0])
@pytest.mark.parametrize(("times", "weights"), [(LARGE, 494_000_000), (SMALL, 7_000_000)])
def test_the_time_that_is_left_goes_steadily_and_nothing_stands_still(
    times: Sequence[Sequence[float]], weights: int, slowdown: float
) -> None:
    """It went 68, 46, 324, 188, 224, and one line stood for two minutes."""
    found, lines = told_of(times, weights, slowdown)
    ticks = [line for line in lines if LEFT.search(line)]
    assert all(one != other for one, other in pairwise(ticks) if "more" not in one)
    shares = [share for _, share, _, _ in found]
    assert shares == sorted(shares)
    for before, after in pairwise(found):
        passed = after[0] - before[0]
        jump = abs(after[3] - (before[3] - passed))
        assert jump <= max(11, 0.1 * before[3]), (before, after)


def test_the_time_that_is_left_is_about_right_where_the_machine_is_as_busy_as_it_seems() -> None:
    found, _ = told_of(LARGE, 494_000_000, 9.0)
    whole = sum(map(sum, LARGE))
    for now, _, _, left in found:
        assert left == pytest.approx(whole - now, rel=0.35, abs=15)


def test_the_time_that_is_left_is_learnt_on_a_machine_that_is_far_slower_than_it_seems() -> None:
    found, _ = told_of(LARGE, 494_000_000, 1.0)
    whole = sum(map(sum, LARGE))
    for now, _, _, left in found:
        if now > whole / 2:
            assert left == pytest.approx(whole - now, rel=0.35, abs=15)


def test_nothing_is_said_of_the_time_that_is_left_where_nobody_knows_that_of_a_part() -> None:
    clock = Clock()
    lines: list[str] = []
    parts = [Part("asking", 0.0), Part("packing", 5.0)]
    progress = Progress(parts, lines.append, lines.append, clock)
    progress.tick()
    progress.begin()
    clock.now += 3
    progress.tick()
    progress.begin(total=2)
    progress.count(1, "matrix 1 of 2")
    assert lines == ["asking", "asking (3 s)", "packing (3 s)", "packing: matrix 1 of 2 (3 s)"]


def test_a_build_tells_of_its_steps_and_matrices_and_never_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.build.step_times", partial(step_times, threads=(1,), seconds=0.001))
    target = save_tiny("qwen2", tmp_path / "target")
    small = save_tiny("qwen2", tmp_path / "small", seed=5, num_hidden_layers=2)
    parts: list[str] = []
    lines: list[str] = []

    def say(line: str) -> None:
        parts.append(LEFT.sub("", line).strip())
        lines.append(line)

    settings = BuildSettings(
        target=str(target),
        drafter=f"independent:{small}",
        out=tmp_path / "bundle",
        variants=("cpu-int4",),
    )
    build(settings, say=say, show=lines.append)
    assert parts[:-1] == [
        "reading the drafter and what it shares of its target",
        "exporting the graph",
        "comparing the graph with torch",
        "variant cpu-int4",
        "recording golden vectors",
    ]
    counted = "\n".join(lines)
    assert "comparing the graph with torch: step 5 of 5" in counted
    # Of each layer: query, key, value and output; gate, up and down.
    assert "variant cpu-int4: matrix 14 of 14 of the layers" in counted
    assert "of the embedding" in counted
    shares = [int(found[1]) for line in lines if (found := LEFT.search(line))]
    assert shares == sorted(shares)
    assert shares[-1] > 90


def test_a_part_that_lasts_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens meanwhile: "exporting the graph" stood for two minutes."""
    monkeypatch.setattr("export.build._TICK_SECONDS", 0.01)
    shown = threading.Event()

    class Stop(Exception):
        pass

    def load_source(target: str, drafter: str, work: Path) -> Any:
        assert shown.wait(60)
        raise Stop

    monkeypatch.setattr("export.build.load_source", load_source)
    target = str(save_tiny("qwen2", tmp_path / "target"))
    settings = BuildSettings(
        target=target, drafter=f"independent:{target}", out=tmp_path / "bundle"
    )

    def show(line: str) -> None:
        assert line.startswith("reading the drafter")
        shown.set()

    with pytest.raises(Stop):
        build(settings, show=show)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_terminal", [True, False])
def test_lines_within_a_part_replace_each_other_on_a_terminal_and_are_few_elsewhere(
    has_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen: Any = Terminal() if has_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    clock = Clock()
    with _ProgressLines(clock) as lines:
        lines.say("one")
        lines.show("two")
        clock.now += _PAUSE_SECONDS
        lines.show("three" * 20 + " (4%)")
        lines.say("four")
        lines.show("five")
    clear = "\r\x1b[K"
    if has_terminal:
        cut = f"moa-export: {'three' * 20}"[:33] + "… (4%)"
        assert screen.getvalue() == (
            f"moa-export: one\n{clear}moa-export: two{clear}{cut}"
            f"{clear}moa-export: four\n{clear}moa-export: five\n"
        )
    else:
        assert (
            screen.getvalue()
            == f"moa-export: one\nmoa-export: {'three' * 20} (4%)\nmoa-export: four\n"
        )
