"""How a verifier's process is asked to stop: SIGTERM, Ctrl-C or a terminal that is closed has it
drain, and a Ctrl-C after that ends it at once. Also its words on standard output, which end nothing
where they cannot be written."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

from cloud_verifier.logs import log
from moa.errors import drop_stdout


class Stopping:
    """Listens to the signals that end this process."""

    def __init__(self, at_once: Callable[[], None] | None = None) -> None:
        """Listen from now on, in the running event loop. `at_once` ends the process; by default
        SIGINT does, as where nobody handles it."""
        self.asked = asyncio.Event()
        """Set when the process is to drain."""
        self._at_once = at_once or _die_of_ctrl_c
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            in_terminal = any(stream and stream.isatty() for stream in (sys.stdin, sys.stderr))
            loop.add_signal_handler(
                signal.SIGHUP, self._hang_up if in_terminal else _tell_of_no_reload
            )

    def _terminate(self) -> None:
        """Drain. Who supervises the process may say so more than once."""
        self.asked.set()

    def _hang_up(self) -> None:
        """Drain: the terminal was closed."""
        log.info("stopping: the terminal was closed", extra={"event": "stopping"})
        self._terminate()

    def _interrupt(self) -> None:
        """Drain, and when asked again end at once: whoever sits there waits for nothing more."""
        if self.asked.is_set():
            log.warning(
                "stopped at once: what ran is cut off, and devices go on elsewhere",
                extra={"event": "stopped"},
            )
            self._at_once()
            return
        log.info("stopping: Ctrl-C again ends at once", extra={"event": "stopping"})
        self.asked.set()


def _tell_of_no_reload() -> None:
    """Go on, and say what is read again when. Without a terminal SIGHUP is how an operator, or a
    script that rotates logs or renews certificates, has a program read its files again."""
    log.info(
        "SIGHUP: nothing is read again by it. Tokens are read when their file changes, a certificate"
        " at the start: SIGTERM drains, then start again",
        extra={"event": "hang_up_signal"},
    )


def _die_of_ctrl_c() -> None:
    """End this process now, by SIGINT, so that a shell knows why."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def say(line: str) -> None:
    """Print a line, now. Where that fails the log has it: a full disk under the output, or a reader
    that is gone, ends no server."""
    try:
        print(line, flush=True)
    except OSError as error:
        drop_stdout()
        log.warning(
            "standard output cannot be written (%s), it was: %s",
            error.strerror,
            line,
            extra={"event": "stdout"},
        )
