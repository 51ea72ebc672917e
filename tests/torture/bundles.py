"""Bundles whose graph costs much, given to the program as a user would: refused or ended, in bounded
time and memory, and ended by Ctrl-C while it waits for them."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.graph.hostile import LOADED, Part, later_steps, make
from tests.torture.tally import Found

_SECONDS = 10.0
"""Of the processor, until a bundle is refused or its answer has ended."""
_CTRL_C_SECONDS = 2.0
_MEGABYTES = 1400
"""1 GiB and eight times the bundle, and what the program has without any graph."""
_CALM = 1.0
"""Load for each core up to which the clock is judged, too."""
_LONG = "one two three four five six seven eight nine ten " * 10
_BEGUN_SECONDS = 1.5
"""Processor time after which the program is at work: what it imports is behind it."""
_PATIENCE = 300.0


@dataclass(frozen=True)
class Ran:
    """What the program did with a bundle."""

    bundle: str
    said: str
    seconds: float
    """By the clock."""
    processor_seconds: float
    megabytes: int
    ctrl_c_seconds: float
    """From the signal to the end, of another run."""
    load: float

    @property
    def problems(self) -> list[str]:
        """What is beyond its limit."""
        calm = self.load < _CALM * (os.cpu_count() or 1)
        figures = {
            "seconds of the processor": (self.processor_seconds, _SECONDS),
            "megabytes": (self.megabytes, _MEGABYTES),
        }
        if calm:
            figures["seconds"] = (self.seconds, _SECONDS)
            figures["seconds after Ctrl-C"] = (self.ctrl_c_seconds, _CTRL_C_SECONDS)
        return [
            f"{self.bundle}: {found:.1f} {name}, at most {most}"
            for name, (found, most) in figures.items()
            if found > most
        ]


def run(part: Callable[[], Part]) -> Ran:
    """Generate with the bundle, to the end and to a Ctrl-C."""
    with tempfile.TemporaryDirectory() as place:
        bundle = make(Path(place) / "bundle", part())
        load = os.getloadavg()[0]
        began = time.monotonic()
        with _program(bundle, Path(place) / "cache") as program:
            assert program.stderr is not None
            said = program.stderr.read()
            _, status, used = os.wait4(program.pid, 0)
            program.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        return Ran(
            bundle=part.__name__.replace("_", " "),
            said=said.strip().splitlines()[-1][:160] if said.strip() else "answered",
            seconds=round(seconds, 1),
            processor_seconds=round(used.ru_utime + used.ru_stime, 1),
            megabytes=used.ru_maxrss // 1024,
            ctrl_c_seconds=round(_until_ctrl_c(bundle, Path(place) / "another"), 2),
            load=load,
        )


def _program(bundle: Path, cache: Path) -> subprocess.Popen[str]:
    text = "from moa.cli.console_scripts import edge_client; edge_client()"
    words = ["generate", "--offline", "--bundle", str(bundle), "--max-new-tokens", "16", _LONG]
    return subprocess.Popen(
        [sys.executable, "-c", text, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        preexec_fn=_hear_ctrl_c,
    )


def _hear_ctrl_c() -> None:
    """What a shell runs in the background ignores it, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _until_ctrl_c(bundle: Path, cache: Path) -> float:
    """Seconds from the signal to the end; 0 if it ended before."""
    with _program(bundle, cache) as program:
        until = time.monotonic() + _PATIENCE
        while program.poll() is None and _used(program.pid) < _BEGUN_SECONDS:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        began = time.monotonic()
        if program.poll() is not None:
            return 0.0
        program.send_signal(signal.SIGINT)
        program.wait(_PATIENCE)
        return time.monotonic() - began


def _used(pid: int) -> float:
    """Processor time of a program and of the children that it has now."""
    seconds = 0.0
    for one in (pid, *_children(pid)):
        try:
            stat = Path(f"/proc/{one}/stat").read_text()
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


async def bundles(options: argparse.Namespace) -> Found:
    """All of them."""
    found = []
    for part in (*LOADED, later_steps):
        found.append(run(part))
        print(found[-1], *found[-1].problems, sep="\n  ", flush=True)
    return {"bundles": found}, [problem for one in found for problem in one.problems]
