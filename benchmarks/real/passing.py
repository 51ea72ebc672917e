"""HumanEval's tests on what a model wrote: in a child process without the environment, with limits
of time and memory. It is a stranger's code all the same: run this where nothing can be lost."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile

from benchmarks.real.lines import Line

_SECONDS = 10
_BYTES = 2**30
_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def code_of(answer: str) -> str:
    """The first block of code, also one that is not closed; without any the whole answer."""
    found = _FENCE.search(answer)
    return found.group(1) if found else answer


def program(problem: Line, answer: str) -> str:
    """What is run: the problem's own helpers, then the answer, then the tests."""
    return "\n\n".join(
        [
            problem["prompt"],
            code_of(answer),
            problem["test"],
            f"check({problem['entry_point']})",
        ]
    )


def passes(problem: Line, answer: str) -> bool:
    """Whether all tests pass."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program(problem, answer)],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=False,
                preexec_fn=_limit,
            )
        except (subprocess.TimeoutExpired, ValueError):  # a NUL in the program is a ValueError
            return False
        return done.returncode == 0


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
