"""A device beside a fake verifier, as a user would start it: what it prints, how long it takes, how much it holds."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import sys
import tempfile
import time
from dataclasses import dataclass

from tests.torture.fake_verifier import BEHAVIOURS, fake

_COMMAND = "from edge_client.cli import main; main()"
_MAX_TOKENS = 40
_MEMORY = 6 * 2**30
_UNSAFE = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xe2\x80\xae|\xc2[\x80-\x9f]")


_A_SECOND, _AT_ONCE = 5, 10

PROGRESS = frozenset(
    name
    for name in BEHAVIOURS
    if name.startswith(("honest", "forward", "activations", "notices", "huge", "opened twice"))
)
"""Behaviours beside which tokens are still won: there the client may ask as fast as it is answered."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    behaviour: str
    code: int
    seconds: float
    requests: int
    a_second: int
    """Requests and connections in the busiest second."""
    megabytes: float
    problems: tuple[str, ...]

    def row(self) -> str:
        """One line of a table."""
        return (
            f"| {self.behaviour} | {self.code} | {self.seconds:.1f} | {self.requests} | {self.a_second} "
            f"| {self.megabytes:.0f} | {'; '.join(self.problems) or '-'} |"
        )


async def beside(behaviour: str, patience: float = 60.0) -> Outcome:
    """Ask for a short answer; the client must end by itself, in order, whatever it is told."""
    with tempfile.TemporaryDirectory() as home:
        async with fake(BEHAVIOURS[behaviour]) as made:
            began = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _COMMAND, "generate", "def add(a, b):", "--raw", "--verifier", made.url),
                *("--max-new-tokens", str(_MAX_TOKENS), "--settle-seconds", "2"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HOME": home, "XDG_CONFIG_HOME": home},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY)),
            )
            problems, most = [], 0.0

            async def watch() -> None:
                nonlocal most
                while True:
                    try:
                        with open(f"/proc/{process.pid}/status") as status:
                            most = max(most, int(status.read().split("VmHWM:")[1].split()[0]) / 1024)
                    except (OSError, IndexError):
                        return
                    await asyncio.sleep(0.2)

            watching = asyncio.create_task(watch())
            try:
                out, err = await asyncio.wait_for(process.communicate(), patience)
            except TimeoutError:
                process.kill()
                out, err = await process.communicate()
                problems.append(f"did not end within {patience:.0f} s")
            watching.cancel()
            seconds = time.monotonic() - began
    if b"Traceback" in err + out:
        problems.append("a traceback: " + err.decode(errors="replace").strip().splitlines()[-1][:200])
    if found := _UNSAFE.search(out + err):
        problems.append(f"control characters on the terminal: {found[0]!r}")
    asked = len(made.seen.requests) + len(made.seen.connections)
    if behaviour not in PROGRESS and asked > _AT_ONCE + _A_SECOND * seconds:
        problems.append(f"{asked} requests and connections in {seconds:.0f} s, without progress")
    return Outcome(
        behaviour=behaviour,
        code=process.returncode or 0,
        seconds=seconds,
        requests=len(made.seen.requests),
        a_second=made.seen.busiest_second(),
        megabytes=most,
        problems=tuple(problems),
    )
