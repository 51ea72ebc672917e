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
"""Of one step, by the clock and of the processor, after which it is told to end. A prompt's piece
takes a second or two on a small device; on a busy machine the clock alone says little."""
_LOOK_SECONDS = 0.25
_LEAVE_SECONDS = 1.0
"""From a Ctrl-C to the end of a program that does not hear it."""
_INTERRUPTED = 128 + signal.SIGINT
_MAIN = threading.main_thread().ident


class _Work:
    """Something native that runs. Made for each step: it must cost next to nothing."""

    __slots__ = ("began", "in_main", "options", "used")

    def __init__(self, options: Any) -> None:
        self.options = options
        """RunOptions of a step, to end it."""
        self.in_main = threading.get_ident() == _MAIN
        self.began = 0.0
        """When the watch saw it first, and how much of the processor this program had used then."""
        self.used = 0.0

    def takes_too_long(self) -> bool:
        """Whether nobody should wait for it any more."""
        now, used = time.monotonic(), time.process_time()
        if not self.began:
            self.began, self.used = now, used
        return now - self.began > STEP_SECONDS and used - self.used > STEP_SECONDS


_running: dict[int, _Work] = {}
_some = threading.Event()
_watches: list[threading.Thread] = []
"""The one that ends steps, once there was a step."""
_wakeup: list[tuple[socket.socket, socket.socket]] = []
_forward: list[int] = []
"""The descriptor that somebody else wants to be told of signals by."""


@contextlib.contextmanager
def watched(options: Any = None) -> Iterator[None]:
    """Native work for as long as the body runs; a step with its RunOptions."""
    work = _Work(options)
    _running[id(work)] = work
    if options is not None:
        if not _watches:
            _watches.append(_started(_watch_steps))
        if not _some.is_set():
            _some.set()
    try:
        yield
    finally:
        del _running[id(work)]


def is_busy() -> bool:
    """Whether native work runs; the interpreter would wait for its end."""
    return bool(_running)


def _started(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body, name="graph-watch", daemon=True)
    thread.start()
    return thread


def _watch_steps() -> None:
    while True:
        _some.wait()
        time.sleep(_LOOK_SECONDS)
        steps = [work for work in list(_running.values()) if work.options is not None]
        if not steps:
            _some.clear()
            if any(work.options is not None for work in list(_running.values())):
                _some.set()  # one began between the look and the clearing
        for work in steps:
            if work.takes_too_long():
                work.options.terminate = True


# ---- Ctrl-C


def end_by_ctrl_c() -> None:
    """From now on Ctrl-C ends the program also while the main thread is inside native work. To be
    called by the main thread, again whenever asyncio has taken the wakeup descriptor."""
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        return
    if not _wakeup:
        pair = socket.socketpair()
        for end in pair:
            end.setblocking(False)
        _wakeup.append(pair)
        _started(_hear_signals)
    ours = _wakeup[0][1].fileno()
    before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    if before not in (-1, ours):
        _forward[:] = [before]


def _hear_signals() -> None:
    heard, _ = _wakeup[0]
    heard.setblocking(True)
    while signals := heard.recv(64):
        for descriptor in _forward:
            with contextlib.suppress(OSError):
                os.write(descriptor, signals)
        stuck = [work for work in list(_running.values()) if work.in_main]
        if signal.SIGINT not in signals or not stuck:
            continue
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
            continue
        time.sleep(_LEAVE_SECONDS)
        if any(id(work) in _running for work in stuck):
            print("\ninterrupted", file=sys.stderr, flush=True)
            os._exit(_INTERRUPTED)
