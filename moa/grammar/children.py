"""The processes in which a stranger's grammar is compiled first, within limits that end them.

A thread cannot be stopped, and llguidance can ask for more memory than there is, which ends the
process that asks. So it is asked here first (`compiling.py`): a process that runs out of time or
memory ends alone, and its grammar is refused.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from moa.errors import MoaError
from moa.grammar.spec import JSON_STYLE, Grammar, GrammarError
from moa.safe_text import safe_line

CHILDREN = 2
"""Processes: a principal has one grammar at a time compiled, so one that needs all of its time
leaves another for the others."""
_START_SECONDS = 60.0
_WALL_SECONDS = 2.5
"""A bound where processor time is none: a process that is stopped, or starved."""
_LARGEST_ANSWER = 2**20
_PROGRAM = Path(__file__).with_name("compiling.py")
_READY = b'"ready"\n'
_KILLED = 9
"""The signal of our own patience, and of a system without memory."""
_OUT_OF_TIME = 27
"""The signal of a timer that counts processor time. An allocation that fails ends a process by
others."""


class Starved(GrammarError):
    """A grammar was given up for want of time on the clock: another day it may compile."""


class _Judged(msgspec.Struct):
    refused: str
    bytes: int


_judged_of = msgspec.json.Decoder(_Judged)


class Children:
    """Some processes, started when they are needed and kept; usable from any thread."""

    def __init__(self, count: int = CHILDREN) -> None:
        self._room = threading.Semaphore(count)
        self._idle: deque[_Child] = deque()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> int:
        """The memory of a compiled grammar, in bytes; a `GrammarError` if it cannot be compiled
        within the limits."""
        try:
            task = msgspec.json.encode([grammar.kind, grammar.text, JSON_STYLE]) + b"\n"
        except (UnicodeEncodeError, ValueError) as error:
            raise GrammarError(f"{grammar.kind}: it is not text: {safe_line(str(error))}") from None
        with self._room:
            child = self._take()
            line = child.ask(task)
            if not line.endswith(b"\n"):
                self._replace(child, grammar.kind)
            self._idle.append(child)
        try:
            judged = _judged_of.decode(line)
        except msgspec.DecodeError:
            raise MoaError("the process that compiles grammars said nothing sensible") from None
        if judged.refused:
            raise GrammarError(judged.refused)
        return judged.bytes

    def _replace(self, child: _Child, kind: str) -> NoReturn:
        why = child.end()
        with contextlib.suppress(MoaError):  # it starts meanwhile, and is taken last
            self._idle.appendleft(_Child())
        if why == "patience":
            raise Starved(f"{kind}: it needs more than {_WALL_SECONDS:g} s to compile")
        raise GrammarError(f"{kind}: it needs too much {why} to compile")

    def _take(self) -> _Child:
        """One that was used lately, if there is one."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
            return _Child()


class _Child:
    """One process."""

    def __init__(self) -> None:
        # Without our own settings: a grammar must not read the token.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MOA_EDGE_")
        }
        try:
            # In its own process session, so that a Ctrl-C that stops an answer does not kill it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise MoaError(f"no process to compile a grammar in: {error.strerror}") from None
        self._ready = False
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
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
        """End the process, if it has not ended; what it needed too much of."""
        returned = self._process.poll()
        self._finalizer()
        if returned == -_KILLED:
            return "patience"
        return "time" if returned == -_OUT_OF_TIME else "memory"


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """Send a line, read a line. An incomplete line means that the process died or was killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    alarm = threading.Timer(seconds, process.kill)
    alarm.start()
    try:
        if line:
            process.stdin.write(line)
            process.stdin.flush()
        answer = process.stdout.readline(_LARGEST_ANSWER)
        if not answer.endswith(b"\n"):
            process.wait()
    except OSError:
        return b""
    finally:
        alarm.cancel()
    return answer


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.communicate()
