"""How far a build is: what is said of it, and of the time that is left."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from export.build import BuildSettings, build, step_times
from export.cli import _PAUSE_SECONDS, _ProgressLines
from export.progress import Part, Progress
from testing.tiny import save_tiny

LEFT = re.compile(r"\((\d+)%, about (\d+) s left\)")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("slowness", [1.0, 7.0])
def test_the_time_left_follows_from_the_time_taken_on_any_machine(slowness: float) -> None:
    clock = Clock()
    lines: list[str] = []
    parts = [Part("reading", 10.0), Part("comparing", 30.0), Part("packing", 60.0)]
    progress = Progress(parts, lines.append, lines.append, clock)
    progress.begin()
    assert lines == ["reading"], "nothing was measured yet"
    clock.now += 10 * slowness
    progress.begin(total=3)
    clock.now += 20 * slowness
    progress.count(2, "step 2 of 3")
    clock.now += 10 * slowness
    progress.begin(total=1000)
    clock.now += 30 * slowness
    progress.count(500, "matrix 1 of 2")
    assert lines[1:] == [
        f"comparing (10%, about {90 * slowness:.0f} s left)",
        f"comparing: step 2 of 3 (30%, about {70 * slowness:.0f} s left)",
        f"packing (40%, about {60 * slowness:.0f} s left)",
        f"packing: matrix 1 of 2 (70%, about {30 * slowness:.0f} s left)",
    ]
    progress.count(500, "matrix 2 of 2")
    assert lines[-1] == "packing: matrix 2 of 2", "nothing is left"


def test_nothing_is_said_of_the_time_where_nobody_knows_that_of_a_part() -> None:
    lines: list[str] = []
    progress = Progress([Part("asking", 0.0), Part("packing", 5.0)], lines.append, lines.append)
    progress.begin()
    progress.begin(total=2)
    progress.count(1, "matrix 1 of 2")
    assert lines == ["asking", "packing", "packing: matrix 1 of 2"]


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
        lines.show("three" * 20)
        lines.say("four")
        lines.show("five")
    clear = "\r\x1b[K"
    if has_terminal:
        cut = f"moa-export: {'three' * 20}"[:39]
        assert screen.getvalue() == (
            f"moa-export: one\n{clear}moa-export: two{clear}{cut}"
            f"{clear}moa-export: four\n{clear}moa-export: five\n"
        )
    else:
        assert (
            screen.getvalue() == f"moa-export: one\nmoa-export: {'three' * 20}\nmoa-export: four\n"
        )
