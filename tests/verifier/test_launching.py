"""Processes that share a machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cloud_verifier.launching import share_cores


@pytest.mark.parametrize(("processes", "each"), [(1, "8"), (2, "4"), (3, "2"), (16, "1")])
def test_processes_share_the_cores(processes: int, each: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    share_cores(processes)
    assert os.environ["OMP_NUM_THREADS"] == each


def test_what_the_user_says_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    share_cores(8)
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_a_process_leaves_with_its_code_and_all_that_it_said_but_without_the_interpreters_own_end() -> None:
    body = "import atexit; atexit.register(print, 'late'); from cloud_verifier.launching import leave"
    ran = subprocess.run(
        [sys.executable, "-c", f"{body}; print('said'); leave(3)"], stdout=subprocess.PIPE, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (3, "said\n")
