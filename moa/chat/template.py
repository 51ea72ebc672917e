"""Chat templates, rendered in a separate process: a template is an untrusted program.

The sandbox keeps it from accessing Python, but not from running forever or building a text of many
gigabytes, and a thread cannot be stopped. So the rendering process (`rendering.py`) has a memory
limit and is killed after a timeout. It is started for the first chat and kept for the next.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from moa.errors import BundleError, MoaError, UsageError
from moa.process.children import without_our_settings
from moa.process.patience import killed_after
from moa.safe_text import safe_line

_PROGRAM = Path(__file__).with_name("rendering.py")
_START_SECONDS = 60.0
_RENDER_SECONDS = 10.0
_LARGEST_TEMPLATE, _LARGEST_TEXT = 2**20, 2**24
"""Bytes."""


class _Answer(msgspec.Struct):
    kind: Literal["text", "refused", "broken"]
    text: str


_answer_of = msgspec.json.Decoder(_Answer)


class ChatTemplate:
    """Renders conversations with a chat template."""

    def __init__(self, source: str, where: str) -> None:
        """`where` is the template's name in errors."""
        if len(source) > _LARGEST_TEMPLATE:
            raise BundleError(f"{where} is too large for a chat template")
        self.source = source
        self._where = where
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @classmethod
    def read(cls, file: Path) -> ChatTemplate:
        """Read the chat template of a bundle; a `BundleError` for a file that is no text, or too
        large."""
        try:
            if file.stat().st_size > _LARGEST_TEMPLATE:
                raise BundleError(f"{file} is too large for a chat template")
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{file} is not a chat template: {error}") from None
        return cls(source, str(file))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: Mapping[str, str],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render a conversation as the prompt of the assistant's answer. `special` are names of
        special tokens and their text, `variables` what else the template may use. A `UsageError` if
        the template refuses these messages, a `BundleError` if it is no template."""
        try:
            content = {
                "messages": list(messages),
                "special": dict(special),
                "variables": dict(variables),
            }
            task = msgspec.json.encode(content)
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise UsageError(f"a message is not text: {safe_line(str(error))}") from None
        with self._lock:
            line = self._ask(task)
        try:
            answer = _answer_of.decode(line)
        except msgspec.DecodeError:
            raise self._spoilt("said no text") from None
        if answer.kind == "broken":
            raise BundleError(f"{self._where} is not a chat template: {safe_line(answer.text)}")
        if answer.kind == "refused":
            raise UsageError(
                f"the chat template refuses this conversation: {safe_line(answer.text)}"
            )
        return answer.text

    def _ask(self, task: bytes) -> bytes:
        """Send a task to the process that renders, which is started if there is none, and return the
        line that it answers. A process that takes too long is ended."""
        if self._process is None:
            self._process = self._start()
        line = _exchange(self._process, task + b"\n", _RENDER_SECONDS)
        if not line.endswith(b"\n"):
            self._end()
            raise self._spoilt(
                f"takes over {_RENDER_SECONDS:.0f} s, too much memory, or writes too much"
            )
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process that renders this template, and wait until it is ready."""
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", str(_PROGRAM), str(_LARGEST_TEXT)]
        # In its own process session, so that a Ctrl-C that stops an answer does not kill it.
        process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            env=without_our_settings(),  # a template must not read the token
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, process)
        source = msgspec.json.encode(self.source) + b"\n"
        if _exchange(process, source, _START_SECONDS) != b"ready\n":
            self._end()
            raise MoaError("the process that renders chat templates did not start")
        return process

    def _end(self) -> None:
        self._process = None
        self._finalizer()

    def _spoilt(self, how: str) -> BundleError:
        return BundleError(
            f"the chat template {self._where} {how}",
            hint="use another one, or none: `generate --raw`",
        )


def _exchange(process: subprocess.Popen[Any], line: bytes, seconds: float) -> bytes:
    """Send a line to the process, and return the line that it answers. An answer without a line
    break at its end means that the process died, or was killed after so many seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    with killed_after(process, seconds):
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer: bytes = process.stdout.readline(6 * _LARGEST_TEXT)
        except OSError:
            return b""
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
