"""Native work of a graph, which Python cannot interrupt: its loading, and its steps.

A step that computes for too long is told to end; ONNX Runtime does so before its next operator.
And a program may ask to be ended by Ctrl-C while its main thread is inside such work: Python would
hear of the signal only afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

STEP_SECONDS = 8.0
"""Seconds by the clock that a step may take in any case. A prompt's piece takes a second or two on a
small device."""
STEP_TIMES = 10.0
"""And as many times the longest step of its graph so far: a piece of a prompt takes longer behind a
longer text, and on a slower or a busier machine."""
MOST_STEP_SECONDS = 120.0
"""No step may take longer, whatever those before it took."""
STEP_PROCESSOR_SECONDS = 3.0
"""And of the processor: on a busy machine the clock alone says little."""
_LOOK_SECONDS = 0.25
"""Seconds between two looks at the steps that run."""
_LEAVE_SECONDS = 1.0
"""Seconds from a Ctrl-C to the end of a program that does not hear it."""
_EXIT_INTERRUPTED = 128 + signal.SIGINT
_MAIN_THREAD = threading.main_thread().ident


class _Work:
    """Something native that runs. Made for each step: it must cost next to nothing."""

    __slots__ = ("first_seen", "in_main_thread", "options", "processor_time", "seconds")

    def __init__(self, options: Any, longest: float) -> None:
        self.options = options
        """RunOptions of a step, to end it."""
        self.seconds = max(STEP_SECONDS, min(STEP_TIMES * longest, MOST_STEP_SECONDS))
        """How long it may take by the clock."""
        self.in_main_thread = threading.get_ident() == _MAIN_THREAD
        self.first_seen = 0.0
        """When the watch saw it first."""
        self.processor_time = 0.0
        """How much of the processor this program had used then."""

    def takes_too_long(self) -> bool:
        """Whether this work has run too long, by the clock and by the processor, since the watch
        saw it first: at the first call it is never late."""
        now = time.monotonic()
        used = time.process_time()
        if not self.first_seen:
            self.first_seen = now
            self.processor_time = used
        by_the_clock = now - self.first_seen
        of_the_processor = used - self.processor_time
        return by_the_clock > self.seconds and of_the_processor > STEP_PROCESSOR_SECONDS


_running: dict[int, _Work] = {}
"""The work that runs, by its identity."""
_steps_run = threading.Event()
"""Set while some of it are steps: the watch sleeps without."""
_watches: list[threading.Thread] = []
"""The thread that ends steps, once there was a step."""
_wakeup: list[tuple[socket.socket, socket.socket]] = []
"""The pair of sockets by which signals are heard of, once they are."""
_forward: list[int] = []
"""The descriptor that somebody else wants to be told of signals by."""


@contextlib.contextmanager
def watched(options: Any = None, longest: float = 0.0) -> Iterator[float]:
    """Count the body as native work, which Python cannot interrupt. With `options`, the RunOptions
    of a graph's step, the step is ended if it takes too long; `longest` are the seconds of the
    longest one before it. The body is told how long it may take."""
    work = _Work(options, longest)
    _running[id(work)] = work
    if work.in_main_thread and _wakeup:
        end_by_ctrl_c()  # asyncio takes the signals away with each handler that it is given
    if options is not None:
        if not _watches:
            _watches.append(_started(_watch_steps))
        if not _steps_run.is_set():  # cheaper than to set it each time
            _steps_run.set()
    try:
        yield work.seconds
    finally:
        del _running[id(work)]


def is_busy() -> bool:
    """Whether native work runs; the interpreter would wait for its end."""
    return bool(_running)


def _started(body: Callable[[], None]) -> threading.Thread:
    """A thread that has started, and does not keep the program from ending."""
    thread = threading.Thread(target=body, name="graph-watch", daemon=True)
    thread.start()
    return thread


def _watch_steps() -> None:
    """Tell steps that take too long to end. This runs in a thread for as long as the program does,
    and sleeps while there are none."""
    while True:
        _steps_run.wait()
        time.sleep(_LOOK_SECONDS)
        steps = _running_steps()
        if not steps:
            _steps_run.clear()
            if _running_steps():
                _steps_run.set()  # one began between the look and the clearing
        for work in steps:
            if work.takes_too_long():
                work.options.terminate = True


def _running_steps() -> list[_Work]:
    return [work for work in list(_running.values()) if work.options is not None]


# ---- Ctrl-C


def end_by_ctrl_c() -> None:
    """Have Ctrl-C end the program from now on also while the main thread is inside native work,
    where Python does not hear of it. A thread is told of signals by a descriptor (`set_wakeup_fd`);
    asyncio takes that for itself with each handler, so that this must be called again, by the main
    thread."""
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        return
    if not _wakeup:
        pair = socket.socketpair()
        for end in pair:
            end.setblocking(False)
        _wakeup.append(pair)
        _started(_hear_signals)
    _, sender = _wakeup[0]
    ours = sender.fileno()
    before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    if before not in (-1, ours):
        _forward[:] = [before]


def _hear_signals() -> None:
    """Pass signals on to whoever wanted to hear of them; and end the program after a Ctrl-C that
    the main thread does not hear, because it is inside native work."""
    receiver, _ = _wakeup[0]
    receiver.setblocking(True)
    while signals := receiver.recv(64):  # a byte for each signal
        for descriptor in _forward:
            with contextlib.suppress(OSError):
                os.write(descriptor, signals)
        in_main_thread = [work for work in list(_running.values()) if work.in_main_thread]
        if signal.SIGINT not in signals or not in_main_thread:
            continue
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
            continue  # nobody wants to be interrupted
        time.sleep(_LEAVE_SECONDS)
        still_inside = any(id(work) in _running for work in in_main_thread)
        if still_inside:
            print("\ninterrupted", file=sys.stderr, flush=True)
            os._exit(_EXIT_INTERRUPTED)
