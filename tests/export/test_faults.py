"""Faults of a bundle, a disk or a build: one clear line, and no incomplete bundle."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from export.cli import main
from moa.bundle import Bundle
from moa.errors import BundleError
from tests.export.conftest import Pair


def build_of(pair: Pair, out: Path) -> list[str]:
    return [
        "build",
        "-t",
        str(pair.target),
        "-d",
        str(pair.drafter),
        "-o",
        str(out),
        "--no-step-times",
    ]


@pytest.mark.parametrize(
    ("error", "free"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 10**9),
        (
            RuntimeError("onnxruntime: failed to save the model"),
            1000,
        ),  # not every library says what it means
    ],
)
def test_a_disk_that_fills_up(
    error: Exception,
    free: int,
    capsys: pytest.CaptureFixture[str],
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = {"free": 10**9}

    def fails(*_: object) -> None:
        left["free"] = free
        raise error

    monkeypatch.setattr("export.atomic_folder.shutil.disk_usage", lambda _: type("Usage", (), left))
    monkeypatch.setattr("export.build.golden_cases", fails)
    assert main([*build_of(pair, tmp_path / "b"), "-v", "cpu-fp32"]) == 2
    assert (
        f"moa-export: error: no room left in {tmp_path} (about "
        in capsys.readouterr().err.splitlines()[-1]
    )
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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_writer(how: signal.Signals, tmp_path: Path) -> None:
    # Background processes of a shell ignore Ctrl-C, and children inherit that: this one must react
    # to it.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", WRITER, str(tmp_path / "bundle")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    assert process.stderr is not None
    while (line := process.stderr.readline()) and "half" not in line:
        pass
    process.send_signal(how)
    _, rest = process.communicate()
    left = list(tmp_path.iterdir())
    if (
        how == signal.SIGKILL
    ):  # nobody could clean up: a folder is left, which is not taken for a bundle
        (folder,) = left
        assert folder.name.startswith(".bundle.building-")
        with pytest.raises(BundleError, match="no bundle"):
            Bundle.open(folder)
    else:
        assert process.returncode == 130
        assert rest.strip().splitlines()[-1] == "moa-export: interrupted"
        assert left == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("largest", [2_000, 100_000, 250_000])
def test_a_write_that_the_system_refuses(largest: int, pair: Pair, tmp_path: Path) -> None:
    """With a real limit on file sizes, which different steps of the build run into."""
    limit = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, {largest}))"
    )
    start = f"{limit}; from export.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *build_of(pair, tmp_path / "bundle")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith(f"moa-export: error: cannot write to {tmp_path}: ")
    )
    assert list(tmp_path.iterdir()) == []
