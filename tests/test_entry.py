"""The installed commands, from the first line to the end of the interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs signals")
PRESS = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


def run(program: str, *, ignoring: bool = False) -> subprocess.CompletedProcess[bytes]:
    """The program in a fresh process; `ignoring` starts it as `nohup` would, for Ctrl-C."""
    disposition = signal.SIG_IGN if ignoring else signal.default_int_handler
    return subprocess.run(
        [sys.executable, "-c", program, "--version"],
        capture_output=True,
        timeout=300,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),
    )


def commands() -> dict[str, str]:
    """The function of each installed command."""
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
    return {name: where.partition(":")[2] for name, where in scripts.items()}


@pytest.mark.parametrize("name", commands())
def test_each_says_its_version(name: str) -> None:
    done = run(f"from moa.cli.console_scripts import {commands()[name]} as main; main()")
    assert done.returncode == 0
    assert done.stdout.decode().split()[0] in (name, "-c")


DURING_IMPORTS = f"""
import sys
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "edge_client.cli":
            {PRESS}
sys.meta_path.insert(0, Slow())
from moa.cli.console_scripts import edge_client
edge_client()
"""
AFTER_THE_END = f"""
import atexit
def press():
    {PRESS}
atexit.register(press)
from moa.cli.console_scripts import edge_client
edge_client()
"""


@pytest.mark.parametrize("program", [DURING_IMPORTS, AFTER_THE_END], ids=["while it imports", "after its end"])
def test_ctrl_c_shows_no_traceback(program: str) -> None:
    done = run(program)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == b""


def test_ctrl_c_stays_ignored_for_who_wants_that() -> None:
    done = run(DURING_IMPORTS, ignoring=True)
    assert done.returncode == 0
    assert b"edge-client" in done.stdout


def test_little_is_imported_before_ctrl_c_ends_the_process_quietly() -> None:
    """Until then it would show a traceback; reading the version took 20 ms."""
    program = (
        "import sys, moa.cli.console_scripts; print(*{'importlib.metadata', 'asyncio', 'numpy'} & set(sys.modules))"
    )
    done = run(program)
    assert done.stdout.split() == []
