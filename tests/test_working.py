"""What a command does for long is said on standard error, again and again, and nowhere else."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest

from moa.cli.moa_edge import Program, start
from moa.cli.working import CLEAR, roughly, working


class Screen(io.StringIO):
    """Standard error that tells when something was written to it."""

    def __init__(self, wanted: str, *, is_terminal: bool) -> None:
        super().__init__()
        self._wanted = wanted
        self._is_terminal = is_terminal
        self.seen = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._wanted in self.getvalue():
            self.seen.set()
        return written


def test_without_a_terminal_each_thing_is_a_line_and_what_lasts_is_said_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen("timing forwards (0 s)\n", is_terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    with working("cloud-verifier", "loading the model", every=0.01) as tell:
        tell("timing forwards")
        assert screen.seen.wait(60)
    lines = screen.getvalue().splitlines()
    assert lines[0] == "cloud-verifier: loading the model", "before the body begins"
    assert "cloud-verifier: timing forwards" in lines
    assert capsys.readouterr().out == ""


def test_a_program_whose_libraries_take_long_to_import_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`moa-train` and `moa-export` said nothing for half a minute on a busy machine."""
    screen = Screen("slow: importing the libraries (0 s)\n", is_terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("moa.cli.working._LOG_SECONDS", 0.01)
    monkeypatch.syspath_prepend(tmp_path)
    code = "import sys\nassert sys.stderr.seen.wait(60)\nmain = len\n"
    (tmp_path / "slow_program.py").write_text(code)
    program = Program(name="slow", parser="", main="slow_program:main", says="")
    assert start(program, ["one"]) == 1


def test_what_has_just_begun_is_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen("never", is_terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    with working("cloud-verifier", "loading the model") as tell:
        tell("timing forwards")
    assert screen.getvalue().splitlines() == [
        "cloud-verifier: loading the model",
        "cloud-verifier: timing forwards",
    ]


def test_on_a_terminal_one_line_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen("loading the model (0 s)", is_terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    with working("cloud-verifier", "loading the model", every=0.01):
        assert screen.seen.wait(60)
    assert "cloud-verifier" not in screen.getvalue()
    assert screen.getvalue().endswith(CLEAR), "it is taken away"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_device_tells_a_terminal_alone_and_nothing_of_what_does_not_last(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen("never", is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    with working("edge-client", "loading the drafter", at_once=False, elsewhere=False):
        pass
    assert "loading" not in screen.getvalue()


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, 1), (17.4, 17), (23, 25), (117, 115), (324.4, 320)]
)
def test_a_time_that_is_left_is_not_said_more_exactly_than_it_is_known(
    seconds: float, said: int
) -> None:
    assert roughly(seconds) == said
