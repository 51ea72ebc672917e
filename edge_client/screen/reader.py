"""Reads the user's messages: with history, editing and completion if prompt_toolkit is installed,
else plainly."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.screen.ctrl_c import Interrupted
from moa.errors import MoaError, UsageError, how_to_install
from moa.process.user_folders import NoHomeError, state_folder

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document

Completions = Callable[[str], list[str]]
"""The words that may complete what was typed so far."""
_BLOCK = '"""'
"""Opens and closes a message of many lines."""


def make_reader(completions: Completions, *, history: bool = True) -> Reader:
    """The reader for this input. Without `history` no file of what is typed is kept."""
    if not sys.stdin.isatty():
        return PlainReader("")
    try:
        return EditingReader(completions, history=history)
    except ImportError:
        return PlainReader("> ")


def history_file() -> Path:
    """The history file, readable only by its owner."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "chat-history"
    path.touch(mode=0o600)
    return path


class EditingReader:
    """Reads messages with prompt_toolkit. Pasted text is one message, however many lines it has."""

    interactive = True
    """Whether input comes from a terminal."""
    keys = "Alt-Enter begins a new line."
    """How a message of several lines is typed."""
    warning = ""
    """What a user has to know before typing."""

    def __init__(self, completions: Completions, *, history: bool = True, **how: Any) -> None:
        """Make a reader that edits with prompt_toolkit and completes words; `how` are settings of
        its session."""
        from prompt_toolkit import PromptSession

        self._session: Any = PromptSession(
            "> ",
            history=_history(in_file=history),
            completer=_completer(completions),
            complete_while_typing=False,
            key_bindings=_keys(),
            **how,
        )
        self._prefilled = ""
        """The text that the next line begins with."""
        self._had_text = False
        """Whether the last line had text when Ctrl-C discarded it."""

    async def read(self) -> str | None:
        """Returns the next message that the user has typed; None at the end of the input. Ctrl-C is
        a key here: it discards the line and raises `Interrupted`."""
        self._had_text = False
        try:
            prefilled = self._prefilled
            self._prefilled = ""
            return str(await self._session.prompt_async(default=prefilled))
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._had_text = bool(self._session.default_buffer.text)
            raise Interrupted from None

    def prefill(self, text: str) -> None:
        """Let the next line begin with this text."""
        self._prefilled = text

    def show(self, status: str) -> None:
        """Show what happens meanwhile, below the line that is being typed."""
        self._session.bottom_toolbar = status or None
        self._session.app.invalidate()

    def begun(self) -> bool:
        """Whether the line that Ctrl-C has ended had text."""
        return self._had_text

    def above(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which output goes above the prompt and what was typed, which are redrawn."""
        from prompt_toolkit.patch_stdout import patch_stdout

        return patch_stdout(raw=True)


def _completer(completions: Completions) -> Any:
    """Returns prompt_toolkit's completer of words: what is completed is the last word before the
    cursor."""
    from prompt_toolkit.completion import Completer, Completion

    class Words(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterable[Completion]:
            text = document.text_before_cursor
            last = text.rpartition(" ")[2]
            return (Completion(word, start_position=-len(last)) for word in completions(text))

    return Words()


def _keys() -> Any:
    """Returns the keys beside those of prompt_toolkit: Alt-Enter, which arrives as Escape and
    Enter, begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(*, in_file: bool) -> Any:
    """Returns what remembers the messages: in the user's file, or only until the program ends, as
    also where no file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk: it is remembered till the end
                super().store_string(string)

    if in_file:
        # Without a home folder, or with one that cannot be written to, there is no file.
        with contextlib.suppress(OSError, NoHomeError):
            return Kept(str(history_file()))
    return InMemoryHistory()


class PlainReader:
    """Reads lines in a thread, so that the event loop keeps running; the thread may be abandoned."""

    keys = f"{_BLOCK} opens a message of many lines and ends it."
    warning = (
        f"each pasted line is a message of its own here: {_BLOCK} opens and ends one of many lines, "
        f"and with prompt_toolkit a pasted text stays whole ({how_to_install('chat')})"
    )

    def __init__(self, prompt: str) -> None:
        """Make a reader that shows `prompt` before each line; an empty one for input that is no
        terminal."""
        self._prompt = prompt
        self.interactive = bool(prompt)
        self._waiting: asyncio.Future[str | None] | None = None
        """The pending read of a line; it goes on when nobody waits for it any more, after a Ctrl-C."""
        self._typed: Callable[[], str] = str
        """Returns what has been typed of the line so far; an empty text if nobody knows."""
        with contextlib.suppress(ImportError):  # line editing, if the library exists
            import readline

            self._typed = readline.get_line_buffer

    async def read(self) -> str | None:
        """Returns the next message; None at the end of the input. A message of many lines begins
        and ends with three quotes."""
        line = await self._line(self._prompt)
        if line is None or not line.startswith(_BLOCK):
            return line
        lines = [line.removeprefix(_BLOCK)]
        while not lines[-1].endswith(_BLOCK):
            line = await self._line("")
            if line is None:
                break
            lines.append(line)
        return "\n".join(lines).removesuffix(_BLOCK).strip("\n")

    def prefill(self, text: str) -> None:
        """Let the next line begin with this text; without the library for line editing it is empty."""
        with contextlib.suppress(ImportError):
            import readline

            def insert() -> None:
                readline.insert_text(text)
                readline.set_startup_hook(None)

            readline.set_startup_hook(insert)

    def show(self, status: str) -> None:
        """Show nothing: a plain terminal has no place beside the input."""

    def begun(self) -> bool:
        """Whether the line that is still being read has text; without the library for line editing
        it is not known."""
        return self._waiting is not None and bool(self._typed())

    def above(self) -> contextlib.AbstractContextManager[Any]:
        """A context for output while a line is typed. A plain terminal cannot print above it."""
        return contextlib.nullcontext()

    async def _line(self, prompt: str) -> str | None:
        """Returns the next line, None at the end. If nobody waits for a line any more, it is still
        being read: whoever asks next gets it."""
        if self._waiting is None:
            self._waiting = self._start(prompt)
        line = self._waiting
        await asyncio.wait([line])  # it goes on if nobody waits any more
        self._waiting = None
        return line.result()

    def _start(self, prompt: str) -> asyncio.Future[str | None]:
        """Begin to read a line, in a thread, which nobody can stop; returns the future line, None
        at the end."""
        line: Future[str | None] = Future()

        def read() -> None:
            try:
                line.set_result(input(prompt))
            except EOFError:
                line.set_result(None)
            except UnicodeDecodeError:
                line.set_exception(UsageError("standard input is not text (UTF-8)"))
            except (OSError, ValueError) as error:
                line.set_exception(MoaError(f"cannot read the input: {error}"))

        threading.Thread(target=read, daemon=True).start()
        return asyncio.wrap_future(line)


Reader = EditingReader | PlainReader
