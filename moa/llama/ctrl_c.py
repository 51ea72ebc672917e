"""Ctrl-C while a C library runs that calls back into Python.

Python handles a signal as soon as it runs code in its main thread, and that may be code that the
library has called: ctypes prints an exception of it as a traceback and drops it, so that Ctrl-C is
lost. Here it is kept until the library's function has returned.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any


class KeptCtrlC:
    """Keeps a Ctrl-C that comes while a library runs."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.has_come = False
        """Whether one has come during the call that runs: what the library calls may say so, and
        have it end early."""

    def keeping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, with a Ctrl-C that comes during a call kept until the call is over.
        Then it is handled as it would have been."""

        def call(*arguments: Any) -> Any:
            handler = signal.getsignal(signal.SIGINT)
            # Python handles signals in its main thread alone. What is no function raises nothing.
            if threading.current_thread() is not threading.main_thread() or not callable(handler):
                return function(*arguments)
            self.has_come = False
            signal.signal(signal.SIGINT, self._note)
            try:
                result = function(*arguments)
            finally:
                signal.signal(signal.SIGINT, handler)
            if self.has_come:
                self.has_come = False
                handler(signal.SIGINT, None)
            return result

        return call

    def _note(self, number: int, _: object) -> None:
        """Note that it has come; a second one ends the process at once, for the call may be long."""
        if self.has_come:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.has_come = True
