"""One thread for a test, and for the processes that it starts: pytest runs as many workers as there
are cores.

Threads of a product wait for each other in a loop. Where other processes keep the cores busy, the
one that is waited for does not run, and a test takes ten times as long.

Workers take equal parts of the suite, in order, and the rest from each other: a fixture of a module
is made once.

An example of a property has no time limit of its own: on a busy machine any may exceed it.

Bytecode is written, whatever the environment asks for: without it every worker rewrites the
assertions of all tests again, and every process that a test starts compiles our modules again.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # before anything imports Triton: kernels run on a CPU
sys.dont_write_bytecode = False
if "EDGE_TEST_PAIR" not in os.environ:  # this is no worker: they inherit it
    os.environ["EDGE_TEST_PAIR"] = tempfile.mkdtemp(prefix="edge-pair-")
    atexit.register(shutil.rmtree, os.environ["EDGE_TEST_PAIR"], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collect no garbage while modules are imported: hardly any of it is, and to look for it takes
    as long as the imports."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is imported out of Python's garbage collection. It stays in any case, and each full
    collection would go over half a million objects of the libraries and the tests again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from here on, also in the process that only tells workers what to run."""
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say, also with -q, which processor the tests ran on: sums of floats depend on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    flags = facts.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2") if name in flags), platform.machine())
    limits = [
        f"{name}={os.environ[name]}"
        for name in ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA")
        if name in os.environ
    ]
    model = facts.get("model name", platform.processor())
    terminalreporter.write_line(f"processor: {', '.join((model, widest, *limits))}")


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Undo what a program does to logging that a test runs in this process: its limits would be
    another test's."""
    ours = logging.getLogger("cloud_verifier")
    root = logging.getLogger()
    before = ours.handlers[:], ours.level, ours.propagate
    foreign = [handler for handler in root.handlers if "pytest" not in type(handler).__module__]
    yield
    ours.handlers[:], ours.level, ours.propagate = before
    for handler in root.handlers[:]:
        if "pytest" not in type(handler).__module__ and handler not in foreign:
            root.removeHandler(handler)


@pytest.fixture(autouse=True)
def shared_models_as_before() -> Iterator[None]:
    """Blame the test that takes weights from a model that others read, not those that come after it:
    which these are depends on how workers share the suite."""
    yield
    kit = sys.modules.get("tests.verifier.kit")
    if kit is not None:
        kit.assert_shared_models_are_whole()
