"""Two processes that share every layer say what one target says, and each holds its part."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny import save_tiny

PATIENCE = 300.0
ROOT = Path(__file__).parents[2]
QUESTION = "What is 17 plus 25?"
_CLIENT = "from edge_client.cli import main; main()"


@pytest.mark.slow  # two processes that import torch
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_two_processes_are_exact_and_hold_a_half_each(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "model")
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module", "tests.verifier.ranks"]
    ran = subprocess.run(
        [sys.executable, *how, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    assert said["same_text"]
    assert said["same_rows"], "records are made of all heads"
    assert said["shared"]["keys_and_values"] * 2 <= said["whole"]["keys_and_values"] * 1.2
    assert said["shared"]["layers"] < 0.6 * said["whole"]["layers"]


@contextlib.contextmanager
def serving(processes: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`cloud-verifier serve` of the embedded pair over so many processes, and its address."""
    room = ["--slots=4", "--max-context-tokens=512", "--max-prompt-tokens=400", "--log-level=error"]
    command = ["-m", "cloud_verifier", "serve", f"--tensor-parallel={processes}", "--device=cpu", "--port=0", *room]
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on ws://127.0.0.1:"), process.communicate()
            yield process, line.split()[-1]
        finally:
            process.terminate()


def ask(url: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", _CLIENT, "generate", "--quiet", "--verifier", url, QUESTION],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    ).stdout


@pytest.mark.slow  # processes that import torch
@pytest.mark.timeout(3 * PATIENCE)
def test_served_by_two_processes_it_says_the_same_and_ends_as_one() -> None:
    with serving(1) as (alone, url):
        truth = ask(url)
        alone.send_signal(signal.SIGTERM)
        assert alone.wait(PATIENCE) == 0
    with serving(2) as (both, url):
        assert ask(url) == truth
        children = psutil.Process(both.pid).children()
        assert len(children) == 2
        both.send_signal(signal.SIGTERM)
        _, errors = both.communicate(timeout=PATIENCE)
    assert (both.returncode, "Traceback" in errors) == (0, False), errors
    assert not any(one.is_running() for one in children)


@pytest.mark.slow  # processes that import torch
@pytest.mark.timeout(2 * PATIENCE)
def test_if_one_of_two_processes_is_killed_both_end_with_a_line() -> None:
    with serving(2) as (both, _):
        first, second = psutil.Process(both.pid).children()
        second.kill()
        _, errors = both.communicate(timeout=PATIENCE)
    assert both.returncode == 1
    assert f"process {second.pid}, one of 2 that share the target, was ended by signal 9: all end" in errors
    assert len(errors.strip().splitlines()) == 1, errors
    assert not first.is_running()
