"""Faults of a bundle, a disk or a build: one clear line, and no incomplete bundle."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from export.atomic_folder import new_folder
from export.cli import main
from moa.bundle import Bundle
from moa.errors import BundleError, UsageError
from tests.export.conftest import Pair


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a command ends with."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *progress, last = err.strip().splitlines()
    assert all(line.startswith("moa-export: ") for line in progress)
    return last.removeprefix("moa-export: error: ")


def test_an_unwritable_folder(capsys: pytest.CaptureFixture[str], pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ("build", "-t", pair.target, "-d", pair.drafter, "-o", tmp_path / "file" / "bundle")
    assert refusal(capsys, *arguments) == f"cannot write to {tmp_path / 'file'}: File exists"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UsageError, match=r"cannot write to .*: Permission denied"), new_folder(tmp_path / "bundle"):
            pass
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("error", "free"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 10**9),
        (RuntimeError("onnxruntime: failed to save the model"), 1000),  # not every library says what it means
    ],
)
def test_a_disk_that_fills_up(
    error: Exception, free: int, capsys: pytest.CaptureFixture[str], pair: Pair, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    left = {"free": 10**9}

    def fails(*_: object) -> None:
        left["free"] = free
        raise error

    monkeypatch.setattr("export.atomic_folder.shutil.disk_usage", lambda _: type("Usage", (), left))
    monkeypatch.setattr("export.build.golden_cases", fails)
    arguments = ("build", "-t", pair.target, "-d", pair.drafter, "-o", tmp_path / "b", "-v", "cpu-fp32")
    assert refusal(capsys, *arguments, "--no-step-times").startswith(f"no room left in {tmp_path} (about ")
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys, time
from pathlib import Path
from export.atomic_folder import clean_up_when_ended, new_folder
from moa.errors import run_cli

def write():
    clean_up_when_ended()
    with new_folder(Path(sys.argv[1])) as folder:
        (folder / "model.onnx").write_bytes(bytes(1000))
        print("half", file=sys.stderr, flush=True)
        time.sleep(100)

sys.exit(run_cli("moa-export", write))
"""


def check_interruption(how: signal.Signals, until: str, command: list[str], place: Path) -> None:
    """Start a process that builds in `place`, end it once it has said `until`, and look at what is left."""
    # Background processes of a shell ignore Ctrl-C, and children inherit that: this one must react to it.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    assert process.stderr is not None
    while (line := process.stderr.readline()) and until not in line:
        pass
    process.send_signal(how)
    _, rest = process.communicate()
    left = list(place.iterdir())
    if how == signal.SIGKILL:  # nobody could clean up: a folder is left, which is not taken for a bundle
        (folder,) = left
        assert folder.name.startswith(".bundle.building-")
        with pytest.raises(BundleError, match="no bundle"):
            Bundle.open(folder)
    else:
        assert process.returncode == 130
        assert rest.strip().splitlines()[-1] == "moa-export: interrupted"
        assert left == []


SIGNALS = pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])


@SIGNALS
def test_an_interrupted_writer(how: signal.Signals, tmp_path: Path) -> None:
    check_interruption(how, "half", [sys.executable, "-c", WRITER, str(tmp_path / "bundle")], tmp_path)


def build_command(pair: Pair, out: Path) -> list[str]:
    command = [sys.executable, "-m", "export.cli", "build", "-t", str(pair.target), "-d", str(pair.drafter)]
    return [*command, "-o", str(out), "--no-step-times"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@SIGNALS
def test_an_interrupted_build(how: signal.Signals, pair: Pair, tmp_path: Path) -> None:
    check_interruption(how, "variant cpu-int8", build_command(pair, tmp_path / "bundle"), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("largest", [2_000, 100_000, 250_000])
def test_a_write_that_the_system_refuses(largest: int, pair: Pair, tmp_path: Path) -> None:
    """With a real limit on file sizes, which different steps of the build run into."""
    limit = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, {largest}))"
    start = f"{limit}; from export.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *build_command(pair, tmp_path / "bundle")[3:]]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"moa-export: error: cannot write to {tmp_path}: ")
    assert list(tmp_path.iterdir()) == []
