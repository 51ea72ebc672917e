"""The programs under `moa-edge up`: the verifier's port, its restarts, and why a program ended."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from moa.cli import programs
from moa.cli import up as up_command
from moa.cli.programs import Verifier, usual_port, why_ended
from moa.errors import MoaError, UsageError
from moa.process.children import start_child
from moa.process.listening import Port
from moa.process.model_places import check_place

_PROGRAM = """
import pathlib, sys
runs = pathlib.Path(__file__).with_name("runs")
def main():
    earlier = runs.read_text().splitlines() if runs.exists() else []
    port = sys.argv[-1].removeprefix("--port=")
    runs.write_text("\\n".join([*earlier, port]))
    if len(earlier) in {listens}:
        print(f"listening on ws://127.0.0.1:{{port}}", flush=True)
    print(f"run {{len(earlier)}} is over", file=sys.stderr)
    return 1
"""


class _Enough(Exception):
    pass


@pytest.fixture
def log() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


async def slept_and_said(
    folder: Path, patch: pytest.MonkeyPatch, log: IO[bytes], *, listens: set[int], pauses: int
) -> tuple[list[float], list[str]]:
    """What a verifier that listens in these of its runs, and ends at once, waits for and says."""
    (folder / "dying.py").write_text(_PROGRAM.format(listens=listens))
    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    slept: list[float] = []
    said: list[str] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == pauses:
            raise _Enough

    verifier = Verifier("dying:main", [], log, port=7, say=said.append, sleep=sleep)
    await verifier.start()
    with pytest.raises(_Enough):
        await verifier.keep()
    return slept, said


async def test_pauses_grow_and_every_start_takes_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: IO[bytes]
) -> None:
    slept, said = await slept_and_said(tmp_path, monkeypatch, log, listens={0, 2}, pauses=8)
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60]
    assert (tmp_path / "runs").read_text().split() == ["7"] * 8
    assert said[0].startswith("the verifier has ended: run 0 is over: the device goes on alone;")
    assert said[1].startswith("the verifier did not start: run 1 is over; it is started again in 2")
    assert said[2].startswith("the verifier is back after")
    assert said[3].startswith("the verifier has ended: run 2 is over")


async def test_a_verifier_that_loads_again_for_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: IO[bytes]
) -> None:
    """A real model takes half a minute, and nothing was said meanwhile."""
    monkeypatch.setattr(programs, "_TELL_SECONDS", 0.01)
    _, said = await slept_and_said(tmp_path, monkeypatch, log, listens={0, 1}, pauses=2)
    assert "the verifier has been loading for 0 s" in said


async def test_a_verifier_that_never_listened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: IO[bytes]
) -> None:
    with pytest.raises(MoaError, match="the verifier did not start: run 0 is over"):
        await slept_and_said(tmp_path, monkeypatch, log, listens=set(), pauses=1)


async def test_where_another_program_is_faster_to_take_the_usual_port_it_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: IO[bytes]
) -> None:
    (tmp_path / "dying.py").write_text(_PROGRAM.format(listens={1}))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    free = iter([8765, 0])
    monkeypatch.setattr(programs, "usual_port", lambda: next(free))
    verifier = Verifier("dying:main", [], log, say=print)
    await verifier.start()
    await verifier.end()
    assert (tmp_path / "runs").read_text().split() == ["8765", "0"]


async def test_a_start_that_the_system_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: IO[bytes]
) -> None:
    start = programs.start_child
    starts = 0

    async def refused_once(*words: Any, **streams: Any) -> Any:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise OSError("no memory for a process")
        return await start(*words, **streams)

    monkeypatch.setattr(programs, "start_child", refused_once)
    slept, said = await slept_and_said(tmp_path, monkeypatch, log, listens={0, 1}, pauses=3)
    assert slept == [1, 2, 4]
    assert said[1].startswith("the verifier did not start: no memory for a process; it is started")
    assert said[2].startswith("the verifier is back")


async def test_up_gives_the_verifier_the_port_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: IO[bytes]
) -> None:
    (tmp_path / "dying.py").write_text(_PROGRAM.format(listens={0}))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(up_command, "_VERIFY", "dying:main")
    parser = argparse.ArgumentParser()
    up_command.add(parser)
    verifier = up_command._verifier(parser.parse_args(["--verifier-port", "7"]), log)
    await verifier.start()
    await verifier.end()
    assert verifier.address == "ws://127.0.0.1:7"


def test_the_usual_port_is_taken_if_it_is_free() -> None:
    with Port("127.0.0.1", 0) as port:
        port.listen(1)
        assert usual_port(port.number) == 0
    assert usual_port(port.number) == port.number


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-signal.SIGKILL, "was killed by signal 9 (out of memory?)"),
        (-signal.SIGSEGV, "was killed by signal 11 (SIGSEGV)"),
        (3, "has ended with exit code 3"),
        (0, "has ended"),
    ],
)
def test_why_a_program_ended(code: int, says: str) -> None:
    assert why_ended(code) == says


def test_what_may_be_at_the_hub_is_left_to_others(tmp_path: Path) -> None:
    for place in ("", "name", "some/model", str(tmp_path)):
        check_place("TARGET", place)
    (tmp_path / "coder15").mkdir()
    wrong = tmp_path / "coder51"
    with pytest.raises(UsageError) as refused:
        check_place("TARGET", str(wrong))
    line = f"TARGET: no such file or folder: {wrong} (did you mean {tmp_path / 'coder15'}?)"
    assert refused.value.line() == line
    (tmp_path / "coder05").mkdir()
    with pytest.raises(UsageError, match="coder05"):
        check_place("--device-model", str(tmp_path / "coder5"), besides=str(tmp_path / "coder15"))
    with pytest.raises(UsageError, match="coder15"):
        check_place("TARGET", str(tmp_path / "coder5"), besides=str(tmp_path / "coder05"))


def test_a_file_that_is_no_model_is_refused_by_its_head(tmp_path: Path) -> None:
    text = tmp_path / "README.md"
    text.write_text("# not a model\n")
    with pytest.raises(UsageError, match=r"--device-model: .*README.md is not a GGUF file"):
        check_place("--device-model", str(text))
    model = tmp_path / "model.gguf"
    model.write_text("# not a model either\n")
    with pytest.raises(UsageError, match=r"model.gguf is not a GGUF file"):
        check_place("TARGET", str(model))
    model.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 339, 1))
    with pytest.raises(UsageError, match=r"is cut short .*339 tensors"):
        check_place("TARGET", str(model))


async def test_a_child_imports_nothing_of_the_folder_that_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have written what lies there."""
    (tmp_path / "argparse.py").write_text("raise SystemExit('of the current folder')\n")
    monkeypatch.chdir(tmp_path)
    child = await start_child(
        "edge_client.cli:main",
        "--version",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(300):
        told, errors = await child.communicate()
    assert child.returncode == 0, errors
    assert told.startswith(b"edge-client ")
