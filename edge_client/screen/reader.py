"""Lines that a person types: with history, editing and completion where prompt_toolkit is, plainly where it is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moa.errors import MoaError, UsageError

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document

Completions = Callable[[str], list[str]]
_BLOCK = '"""'


class Interrupted(Exception):
    """Ctrl-C at the prompt."""


class Reader(Protocol):
    """Where messages come from."""

    @property
    def interactive(self) -> bool:
        """Whether somebody sits there."""

    async def read(self) -> str | None:
        """The next message, of one line or more; None at the end. Ctrl-C is `Interrupted`."""

    def above(self) -> contextlib.AbstractContextManager[Any]:
        """While in here, what is printed stands above what is being typed."""


def make_reader(completions: Completions) -> Reader:
    """What suits where the input comes from."""
    if not sys.stdin.isatty():
        return PlainReader("")
    try:
        return EditingReader(completions)
    except ImportError:
        return PlainReader("> ")


def history_file() -> Path:
    """Where messages of earlier runs are kept, for their author's eyes only."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    folder = Path(home) / "moa-edge"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "chat-history"
    path.touch(mode=0o600)
    return path


class EditingReader:
    """prompt_toolkit's. What is pasted comes as one message, however many lines it has."""

    interactive = True

    def __init__(self, completions: Completions, **how: Any) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        class Words(Completer):
            def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
                text = document.text_before_cursor
                last = text.rpartition(" ")[2]
                return (Completion(word, start_position=-len(last)) for word in completions(text))

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        try:
            history = FileHistory(str(history_file()))
        except OSError:  # a home that cannot be written
            history = InMemoryHistory()  # type: ignore[assignment]
        self._session: Any = PromptSession(
            "> ", history=history, completer=Words(), complete_while_typing=False, key_bindings=keys, **how
        )

    async def read(self) -> str | None:
        """The next message."""
        try:
            return str(await self._session.prompt_async())
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise Interrupted from None

    def above(self) -> contextlib.AbstractContextManager[Any]:
        """Prompt and text so far are drawn again below what is printed."""
        from prompt_toolkit.patch_stdout import patch_stdout

        return patch_stdout(raw=True)


class PlainReader:
    """A line at a time, in a thread that may be left behind, so that the link stays alive meanwhile."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self.interactive = bool(prompt)
        self._waiting: asyncio.Future[str | None] | None = None
        """A line that is being typed; it outlives a Ctrl-C."""
        with contextlib.suppress(ImportError):  # line editing, where there is such a library
            import readline  # noqa: F401

    async def read(self) -> str | None:
        """The next message. Three quotes open one of many lines, and close it."""
        line = await self._line(self._prompt)
        if line is None or not line.startswith(_BLOCK):
            return line
        lines = [line.removeprefix(_BLOCK)]
        while not lines[-1].endswith(_BLOCK):
            if (line := await self._line("")) is None:
                break
            lines.append(line)
        return "\n".join(lines).removesuffix(_BLOCK).strip("\n")

    def above(self) -> contextlib.AbstractContextManager[Any]:
        """A plain terminal has no above."""
        return contextlib.nullcontext()

    async def _line(self, prompt: str) -> str | None:
        loop = asyncio.get_running_loop()
        waiting = self._waiting = self._waiting or self._start(prompt)
        interrupted: asyncio.Future[None] = loop.create_future()

        def interrupt() -> None:
            if not interrupted.done():
                interrupted.set_result(None)

        with contextlib.suppress(NotImplementedError):  # not on every system; there Ctrl-C ends the program
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            await asyncio.wait((waiting, interrupted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(signal.SIGINT)
        if not waiting.done():
            raise Interrupted
        self._waiting = None
        return waiting.result()

    def _start(self, prompt: str) -> asyncio.Future[str | None]:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[str | None] = loop.create_future()

        def settle(line: str | None, error: Exception | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(line)

        def read() -> None:
            line: str | None = None
            problem: MoaError | None = None
            try:
                line = input(prompt)
            except EOFError:
                pass
            except UnicodeDecodeError:
                problem = UsageError("standard input is not text (UTF-8)")
            except (OSError, ValueError) as error:
                problem = MoaError(f"cannot read the input: {error}")
            with contextlib.suppress(RuntimeError):  # the program has ended meanwhile
                loop.call_soon_threadsafe(settle, line, problem)

        threading.Thread(target=read, daemon=True).start()
        return result
