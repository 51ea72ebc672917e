"""Reading the user's lines, with and without prompt_toolkit."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from edge_client.device import embedded_bundle
from edge_client.screen.ctrl_c import CtrlC, Interrupted
from edge_client.screen.reader import EditingReader, PlainReader, history_file, make_reader


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


async def typed(keys: str, *, history: bool = True) -> list[str | None]:
    with create_pipe_input() as pipe:
        reader = EditingReader(lambda text: [], history=history, input=pipe, output=DummyOutput())
        pipe.send_text(keys)
        async with asyncio.timeout(300):
            return [await reader.read()]


async def test_history_is_there_in_the_next_run_unless_none_is_kept(tmp_path: Path) -> None:
    assert await typed("first\r", history=False) == ["first"]
    assert not list(tmp_path.iterdir())
    assert await typed("first\r") == ["first"]
    assert history_file().stat().st_mode & 0o077 == 0
    assert await typed("\x1b[A\r") == ["first"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("\x1b[200~one\ntwo\n\x1b[201~three\r", "one\ntwo\nthree"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("\x04", None),
    ],
    ids=["pasted text is one message", "a new line by key", "the end"],
)
async def test_what_is_typed(keys: str, message: str | None) -> None:
    assert await typed(keys) == [message]


def test_completion_replaces_the_last_word() -> None:
    with create_pipe_input() as pipe:
        reader = EditingReader(lambda text: ["temperature"], input=pipe, output=DummyOutput())
        (found,) = reader._session.completer.get_completions(Document("/set temp"), CompleteEvent())
    assert (found.text, found.start_position) == ("temperature", -4)


async def test_ctrl_c_tells_whether_a_line_was_begun() -> None:
    with create_pipe_input() as pipe:
        reader = EditingReader(lambda text: [], history=False, input=pipe, output=DummyOutput())
        async with asyncio.timeout(300):
            for keys, begun in (("half\x03", True), ("\x03", False), ("gone\b\b\b\b\x03", False)):
                pipe.send_text(keys)
                with pytest.raises(Interrupted):
                    await reader.read()
                assert reader.begun() is begun


async def test_plain_lines_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('one\n"""two\nthree\n"""\n"""open\nend'))
    reader = make_reader(lambda text: [])
    assert isinstance(reader, PlainReader)
    assert not reader.interactive
    async with asyncio.timeout(300):
        assert [await reader.read() for _ in range(4)] == ["one", "two\nthree", "open\nend", None]


_PLAIN_CHAT = """
import os, sys
sys.modules["prompt_toolkit"] = None
from edge_client.cli import main
main(["chat", "--offline", "--bundle", sys.argv[1]])
"""


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_chat_without_prompt_toolkit_says_what_a_paste_will_do() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", _PLAIN_CHAT, str(embedded_bundle())]
    wide = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=wide) as process:
        os.close(theirs)
        os.write(ours, b"/quit\n")
        shown = b""
        # At the end of the process a pseudo-terminal has either nothing more or an error.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 4096):
                shown += piece
        os.close(ours)
        assert process.wait(300) == 0
    said = b" ".join(shown.split())
    assert b"each pasted line is a message of its own here" in said
    assert b"pip install '.[chat]'" in said
    assert EditingReader.warning == ""


_TYPED_AHEAD = """
import os, select, sys, termios
from rich.console import Console
from edge_client.events import Prompt, Token
from edge_client.screen.live import LiveView

console = Console(force_terminal=True, width=80)
with LiveView(console) as view:
    view.take(Prompt(ids=[1]))
    view.take(Token(position=1, id=1, text="an answer", status="provisional"))
    os.write(2, b"typed?\\n")  # sys.stderr is redirected
    # What the test has typed is there. The terminal takes it in after the test has written it, and
    # would show it if this view had ended by then.
    select.select([0], [], [])
print("read:", sys.stdin.readline())
print("shown again:", bool(termios.tcgetattr(0)[3] & termios.ECHO))
"""


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_what_is_typed_during_an_answer_is_read_after_it_and_moves_no_rows() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", _TYPED_AHEAD]
    shown = b""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        os.close(theirs)
        assert process.stderr is not None
        assert process.stderr.readline() == b"typed?\n"
        os.write(ours, b"ahead\n")
        # At the end of the process a pseudo-terminal has either nothing more or an error.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 4096):
                shown += piece
        os.close(ours)
        assert process.wait(300) == 0, process.stderr.read()
    assert shown.count(b"ahead") == 1, shown
    assert b"read: ahead" in shown
    assert b"shown again: True" in shown


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
async def test_ctrl_c_does_not_lose_the_line_that_is_being_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, encoding="utf-8") as stdin,
        os.fdopen(writing, "w", encoding="utf-8") as keyboard,
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        reader = PlainReader("> ")
        ctrl_c = CtrlC()
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
        async with asyncio.timeout(300):
            with ctrl_c.heard(), pytest.raises(Interrupted):
                await ctrl_c.stoppable(reader.read())
            keyboard.write("still here\n")
            keyboard.flush()
            assert await reader.read() == "still here"
