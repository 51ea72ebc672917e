"""Starts a command again in several processes that are one: they end together. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from moa.errors import MoaError
from moa.process.listening import Port

_LOOK_SECONDS = 0.1
"""How often the processes are looked after."""
_SAME_CAUSE_SECONDS = 2.0
"""How long the first process may take to end by itself when another one has said why it cannot go on."""
_FAREWELL_SECONDS = 10.0
"""How long the others may take to end after the first one."""


def launched() -> bool:
    """Whether this is one of several processes that `launch`, or `torchrun`, has started."""
    return "LOCAL_RANK" in os.environ


def leave(code: int) -> NoReturn:
    """End this process, and leave out the interpreter's own end.

    Gloo's threads may still hold tensors that Python made. A thread that lets go of one while the interpreter ends is
    ended by it within a destructor, and that aborts the process (pytorch/pytorch#190489). The groups of a model's mesh
    outlive `destroy_process_group`, and these threads with them, so nothing can wait for them.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def share_cores(processes: int) -> None:
    """Give each of so many processes that are started from here its part of the cores. With as many threads as cores in
    each, threads wait for others that do not run, and everything takes several times as long."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))


def launch(processes: int) -> int:
    """Run this same command in so many processes; returns the exit code of the first. It gets the signals to stop, and
    lets the others end; if one of these ends by itself, none can go on."""
    with Port("127.0.0.1", 0) as meeting:  # held, or another program could be given it before the first listens
        return _launch(processes, meeting.number)


def _launch(processes: int, port: int) -> int:
    command = [sys.executable, "-m", "cloud_verifier", *sys.argv[1:]]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    started: list[subprocess.Popen[bytes]] = []
    share_cores(processes)

    def stop(*_: Any) -> None:
        for one in started[:1]:
            one.terminate()

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, stop)
    try:
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=os.environ | meet | own))
        first, *others = started
        while first.poll() is None:
            if lost := next((one for one in others if one.poll()), None):
                _wait([first], _SAME_CAUSE_SECONDS if lost.returncode > 0 else 0.0)
                if first.poll() is None:
                    raise MoaError(
                        f"process {lost.pid}, one of {processes} that share the target, {_ended(lost)}: all end"
                    )
            time.sleep(_LOOK_SECONDS)
        _wait(others, _FAREWELL_SECONDS)
        return first.returncode if first.returncode >= 0 else 128 - first.returncode
    finally:
        for one in started:
            one.kill()
            one.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    until = time.monotonic() + seconds
    for one in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(max(0.0, until - time.monotonic()))


def _ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
