"""Ctrl-C on a terminal stops what is being done, not the program."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from moa.process.watch import end_by_ctrl_c

Result = TypeVar("Result")


class Interrupted(Exception):
    """The user has pressed Ctrl-C."""


class CtrlC:
    """Ctrl-C in a conversation stops what is being done. One handler from the first thing to the
    last: with one for each, Ctrl-C would end the program between them."""

    def __init__(self) -> None:
        self._pressed = False
        """Whether it was pressed, and nothing has been stopped for it yet."""
        self._task: asyncio.Task[Any] | None = None
        """What is being done."""

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which Ctrl-C does not end the program."""
        self._hear()
        try:
            yield
        finally:
            with contextlib.suppress(NotImplementedError):
                asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def stoppable(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of `work`. If Ctrl-C is pressed meanwhile, or was pressed after the
        work before it had ended, the work is cancelled and `Interrupted` raised."""
        task = asyncio.create_task(work)
        self._task = task
        if self._pressed:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if not self._pressed:
                raise
            self._pressed = False
            raise Interrupted from None
        finally:
            self._task = None
            self._hear()  # prompt_toolkit takes its own handler away, and does not put ours back

    def _hear(self) -> None:
        """Have Ctrl-C call us. Not every system can: there it ends the program."""
        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._press)
            end_by_ctrl_c()  # asyncio has taken the signals away

    def _press(self) -> None:
        """Stop what is being done, or what is done next."""
        self._pressed = True
        if self._task is not None:
            self._task.cancel()
