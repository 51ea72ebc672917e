"""The processes in which a stranger's grammar is compiled first, within limits that end them.

A thread cannot be stopped, and llguidance can ask for more memory than there is, which ends the
process that asks. So it is asked here first (`compiling.py`): a process that runs out of time or
memory ends alone, and its grammar is refused.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from moa.errors import MoaError
from moa.grammar.spec import JSON_STYLE, Grammar, GrammarError
from moa.process.children import without_our_settings
from moa.process.patience import killed_after
from moa.safe_text import safe_line

CHILDREN = 2
"""Processes: a principal has one grammar at a time compiled, so one that needs all of its time
leaves another for the others."""
_START_SECONDS = 60.0
"""Seconds by the clock that a process may take to start."""
_WALL_SECONDS = 2.5
"""Seconds by the clock for one grammar: a bound where processor time is none, for a process that is
stopped, or starved."""
_LARGEST_ANSWER = 2**20
"""Bytes of an answer."""
_PROGRAM = Path(__file__).with_name("compiling.py")
_READY = b'"ready"\n'
_KILLED = 9
"""SIGKILL, by which we end a process that takes too long, and a system one when it has no memory.
Numbers, for Windows has no such names."""
_OUT_OF_TIME = 27
"""SIGPROF, of a timer that counts processor time. An allocation that fails ends a process by other
signals."""


class Starved(GrammarError):
    """A grammar was given up for want of time on the clock: another day it may compile."""


class _Judged(msgspec.Struct):
    """What a process says of a grammar."""

    refused: str
    """Why it is refused; empty if it is not."""
    bytes: int
    """The memory that it takes."""


_judged_of = msgspec.json.Decoder(_Judged)


class Children:
    """Some processes, started when they are needed and kept; usable from any thread."""

    def __init__(self, count: int = CHILDREN) -> None:
        self._free = threading.Semaphore(count)
        """How many more may be in use at once."""
        self._idle: deque[_Child] = deque()
        """Those that are not in use, the latest used last."""
        self._lock = threading.Lock()
        """Held while one is taken."""

    def check(self, grammar: Grammar) -> int:
        """Have a child process compile a grammar, and return the bytes of memory that it takes
        compiled; a `GrammarError` if it is wrong, or cannot be compiled within the limits of time
        and memory."""
        try:
            task = msgspec.json.encode([grammar.kind, grammar.text, JSON_STYLE]) + b"\n"
        except (UnicodeEncodeError, ValueError) as error:
            raise GrammarError(f"{grammar.kind}: it is not text: {safe_line(str(error))}") from None
        with self._free:
            child = self._take()
            line = child.ask(task)
            if not line.endswith(b"\n"):  # it ended over this grammar
                reason = child.end()
                self._start_another()
                raise _refusal(grammar.kind, reason)
            self._idle.append(child)
        try:
            judged = _judged_of.decode(line)
        except msgspec.DecodeError:
            raise MoaError("the process that compiles grammars said nothing sensible") from None
        if judged.refused:
            raise GrammarError(judged.refused)
        return judged.bytes

    def prepare(self) -> None:
        """Have a process started, unless one is there: the first grammar would wait for it."""
        with self._lock:
            if not self._idle:
                self._start_another()

    def _take(self) -> _Child:
        """The process that was used last, or a new one if none is idle."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
            return _Child()

    def _start_another(self) -> None:
        """Start a process for a later grammar. It is not waited for, and the last to be taken, so
        it has time to get ready."""
        with contextlib.suppress(MoaError):
            self._idle.appendleft(_Child())


def _refusal(kind: str, reason: str) -> GrammarError:
    """The error for a grammar whose process ended for this reason."""
    if reason == "patience":
        return Starved(f"{kind}: it needs more than {_WALL_SECONDS:g} s to compile")
    return GrammarError(f"{kind}: it needs too much {reason} to compile")


class _Child:
    """One process."""

    def __init__(self) -> None:
        """Start the process, without waiting until it is ready."""
        try:
            # In its own process session, so that a Ctrl-C that stops an answer does not kill it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=without_our_settings(),  # a grammar must not read the token
                start_new_session=True,
            )
        except OSError as error:
            raise MoaError(f"no process to compile a grammar in: {error.strerror}") from None
        self._ready = False
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def ask(self, task: bytes) -> bytes:
        """The answer to a task; an incomplete line if the process ended over it."""
        if not self._ready:
            if _exchange(self._process, b"", _START_SECONDS) != _READY:
                self.end()
                raise MoaError("the process that compiles grammars did not start")
            self._ready = True
        return _exchange(self._process, task, _WALL_SECONDS)

    def end(self) -> str:
        """End the process, if it has not ended, and say what it needed too much of: "patience" if
        we killed it because it took too long by the clock, "time" if the system did because it used
        too much of the processor, else "memory"."""
        exit_code = self._process.poll()  # the number of a signal is negative
        self._finalizer()
        if exit_code == -_KILLED:
            return "patience"
        if exit_code == -_OUT_OF_TIME:
            return "time"
        return "memory"


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """Send a line to a child process, and return the line that it answers. An answer without a line
    break at its end means that the process died, or was killed after so many seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    with killed_after(process, seconds):
        try:
            if line:
                process.stdin.write(line)
                process.stdin.flush()
            answer = process.stdout.readline(_LARGEST_ANSWER)
            if not answer.endswith(b"\n"):
                process.wait()
        except OSError:
            return b""
    return answer


def _end(process: subprocess.Popen[Any]) -> None:
    """Kill a process, and wait until it has ended."""
    process.kill()
    process.communicate()
