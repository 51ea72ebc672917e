"""The programs that `moa-edge up` runs as children: what they say, why they ended, and the verifier,
which is started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import IO, NoReturn
from urllib.parse import urlsplit

from moa.cli.working import lasting
from moa.errors import MoaError, UsageError, first_line
from moa.process.children import END_SECONDS, end_child, start_child
from moa.process.listening import Port
from moa.safe_text import safe_line

USUAL_PORT = 8765
"""The verifier's port if it is free: what a user has copied from one run is good for the next."""
_START_SECONDS = 900.0
"""Seconds that a program has to start: a large target may lie on a slow disk."""
_LISTENING = "listening on "
"""How a verifier begins the line with its address."""
_LONGEST_LINE = 400
"""Characters of a program's line that are shown."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
"""Seconds before a verifier that has died is started again. One that has listened for so long begins
with the first pause again."""
_TELL_SECONDS = 10.0
"""Between two lines on a verifier that is loading again."""

Say = Callable[[str], None]


class Verifier:
    """The verifier as a child. One that has listened once and dies is started again at the same
    port, so that clients find it: meanwhile the device goes on alone."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        log: IO[bytes],
        *,
        port: int | None = None,
        say: Say,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`program` is its `module:function`. What it logs goes into the file `log`. Without a
        `port` it gets the usual one, or any if that is taken. `say` is told what happens to it."""
        self._program = program
        self._arguments = list(arguments)
        self._log = log
        self._asked = port
        self._say = say
        self._sleep = sleep
        self._child: asyncio.subprocess.Process | None = None
        self._listened_at = 0.0
        self._pause = _FIRST_PAUSE
        self.address = ""
        """Where it listens."""

    @property
    def process_id(self) -> int:
        """The number of its process, or of the last one that it had."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start it for the first time, and wait until it listens; a `MoaError` if it ends before."""
        port = usual_port() if self._asked is None else self._asked
        if await self._listens(port):
            return
        another_was_faster = self._asked is None and port > 0 and usual_port() == 0
        if another_was_faster and await self._listens(0):
            return
        raise MoaError(f"the verifier did not start: {self._last_words()}")

    async def keep(self) -> NoReturn:
        """Start it again whenever it has died, until this is cancelled."""
        while True:
            await self._again(why_ended(await self._ended(), last_line(self._log)))

    async def end(self) -> None:
        """End it."""
        if self._child is not None and self._child.returncode is None:
            await end_child(self._child)

    async def _ended(self) -> int:
        """Wait for its end; returns the exit code."""
        assert self._child is not None
        return await self._child.wait()

    async def _again(self, why: str) -> None:
        """Start it until it listens again."""
        port = urlsplit(self.address).port or 0
        died = time.monotonic()
        if died - self._listened_at > _LONGEST_PAUSE:
            self._pause = _FIRST_PAUSE
        said = f"the verifier {why}: the device goes on alone"
        while True:
            self._say(f"{said}; it is started again in {self._pause:.0f} s")
            await self._sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            try:
                with lasting(self._tell_of_loading, _TELL_SECONDS):
                    if await self._listens(port):
                        break
                why = self._last_words()
            except OSError as error:  # no memory for a process, or no line for very long
                await self.end()
                why = first_line(error)
            said = f"the verifier did not start: {why}"
        taken = time.monotonic() - died
        self._say(f"the verifier is back after {taken:.0f} s (process {self.process_id})")

    def _tell_of_loading(self, seconds: float) -> None:
        self._say(f"the verifier has been loading for {seconds:.0f} s")

    async def _listens(self, port: int) -> bool:
        """Start it at this port. Returns whether it has come to listen; it has ended if not."""
        # A line of an earlier run is not why this one ends.
        self._log.seek(0)
        self._log.truncate()
        self._child = await start_child(
            self._program,
            *self._arguments,
            f"--port={port}",
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
        )
        line = await line_with(self._child.stdout, _LISTENING)
        if not line:
            await self._child.wait()
            return False
        self.address = line.split()[-1]
        self._listened_at = time.monotonic()
        return True

    def _last_words(self) -> str:
        """What the program that has just ended said last, or else how it ended."""
        assert self._child is not None
        code = self._child.returncode or 0
        return last_line(self._log) or f"it {why_ended(code)}"


def usual_port(usual: int = USUAL_PORT) -> int:
    """The usual port if it is free, and else 0: any."""
    try:
        with Port("127.0.0.1", usual):
            return usual
    except UsageError:
        return 0


def why_ended(code: int, last_words: str = "") -> str:
    """How a program with this exit code ended, as what is said of it."""
    if code == -9:  # SIGKILL: what a system does when its memory is used up
        return "was killed by signal 9 (out of memory?)"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"was killed by signal {-code}"
    if last_words:
        return f"has ended: {last_words}"
    return f"has ended with exit code {code}" if code else "has ended"


async def line_with(
    stream: asyncio.StreamReader | None, wanted: str, *, others: list[str] | None = None
) -> str:
    """Read a program's lines up to the first that begins with `wanted`, and return that one; empty
    where the stream ends before it. Lines before it are added to `others`."""
    assert stream is not None
    async with asyncio.timeout(_START_SECONDS):
        async for raw in stream:
            line = clean(raw)
            if line.startswith(wanted):
                return line
            if line and others is not None:
                others.append(line)
    return ""


@contextlib.asynccontextmanager
async def ended_after(
    child: asyncio.subprocess.Process, seconds: float = END_SECONDS
) -> AsyncIterator[None]:
    """End a child after the body, if it has not ended: by itself within so many seconds, or else it
    is killed."""
    try:
        yield
    finally:
        if child.returncode is None:
            await end_child(child, seconds)


def clean(raw: bytes) -> str:
    """A line of a program, safe to show."""
    return safe_line(raw.decode(errors="replace").strip(), _LONGEST_LINE)


def last_line(log: IO[bytes]) -> str:
    """What a program said last: its errors are one line."""
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return clean(lines[-1]) if lines else ""
