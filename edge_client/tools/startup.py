"""Time of a fresh process to its first draft, and its memory then."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median

from edge_client.device import Device
from edge_client.settings import ClientSettings
from edge_client.text.chat import prompt_ids
from moa.errors import MoaError
from moa.graph.drafter import run
from moa.process.memory import resident_bytes
from moa.sampling import SamplingSettings
from moa.tree import TreeShape

_PROGRAM = """
import sys
import edge_client.cli.generate
from edge_client.tools.startup import first_draft
first_draft(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""
_PROMPT = "What is 17 plus 25?"
_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class StartUp:
    """Results of several fresh processes."""

    runs: list[float]
    """Seconds from the start of the process, the interpreter's own included, to the first draft."""
    resident_mb: float
    """Memory then."""

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.runs)


def measure(settings: ClientSettings, runs: int) -> StartUp:
    """Start several processes, one after another."""
    command = [sys.executable, "-c", _PROGRAM, settings.bundle, settings.variant, str(settings.threads)]
    seconds, memory = [], []
    for _ in range(runs):
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        said = process.stdout.readline()
        seconds.append(time.perf_counter() - began)
        _, trouble = process.communicate(timeout=_SECONDS)
        if process.returncode:
            lines = trouble.decode(errors="replace").strip().splitlines()
            raise MoaError(f"a fresh process could not draft: {lines[-1] if lines else 'no message'}")
        memory.append(json.loads(said)["resident_mb"])
    return StartUp(seconds, median(memory))


def first_draft(bundle: str, variant: str, threads: int) -> None:
    """The fresh process: everything up to the first draft."""
    device = Device.load(bundle, variant=variant, threads=threads)
    ids = prompt_ids(device.codec, _PROMPT)
    run(device.new_drafter().draft(ids, TreeShape.chain(4), SamplingSettings()))
    print(json.dumps({"resident_mb": resident_bytes() / 1e6}), flush=True)
