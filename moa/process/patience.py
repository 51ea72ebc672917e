"""Child processes that must answer in time: one that does not is killed."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

_LOOK_SECONDS = 0.1
"""Between two looks at what is late."""


class _Patience:
    """Kills processes that have not answered in time.

    One thread for all: a timer for each exchange is a thread that must first have run, and on a
    busy machine that took longer than the answer.
    """

    def __init__(self) -> None:
        self._until: dict[object, tuple[float, subprocess.Popen[Any]]] = {}
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def killed_after(self, process: subprocess.Popen[Any], seconds: float) -> Iterator[None]:
        """Kill a process unless the body ends within so many seconds. A thread watches all of them
        (`_watch`); it is started at the first one."""
        if self._thread is None or not self._thread.is_alive():  # there is none after a fork
            self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
            self._thread.start()
        mine = object()
        self._until[mine] = (time.monotonic() + seconds, process)
        if not self._some.is_set():  # the thread waits for this
            self._some.set()
        try:
            yield
        finally:
            del self._until[mine]

    def _watch(self) -> None:
        """Kill each process whose time is over. This runs in a thread for as long as the program
        does, and sleeps while nobody waits for a process."""
        while True:
            self._some.wait()
            time.sleep(_LOOK_SECONDS)
            if not self._until:
                self._some.clear()
                if self._until:
                    self._some.set()  # one began between the look and the clearing
            for until, process in list(self._until.values()):
                if time.monotonic() > until:
                    process.kill()


killed_after = _Patience().killed_after
"""A context in which a process must answer: it is killed unless the body ends within so many
seconds. Usable from any thread."""
