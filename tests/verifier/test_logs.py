from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.logs import (
    FairShare,
    JsonFormatter,
    LineFormatter,
    LogFormat,
    configure,
    log,
)
from moa.wire import Limits


def record(message: str = "refused", **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("cloud_verifier", logging.INFO, __file__, 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_a_line_is_one_object_and_what_strangers_sent_is_harmless() -> None:
    line = JsonFormatter().format(
        record(
            "a\nb\x1b[2J\u2028",
            principal="al\x9bice",
            peer="1.2.3.4:5",
            session=b"\x01" * 16,
            round=3,
            reason="",
        )
    )
    assert "\x1b" not in line
    assert len(line.splitlines()) == 1
    entry = json.loads(line)
    assert entry["message"] == "a\\nb\\x1b[2J\\u2028"
    assert entry["principal"] == "al\\x9bice"
    assert (entry["session"], entry["round"]) == ("01" * 16, 3)
    assert "reason" not in entry
    traced = record()
    traced.exc_info = (ValueError, ValueError("x" * 10**6), None)
    assert len(JsonFormatter().format(traced)) < 10_000


def test_a_line_for_people_has_time_level_message_and_fields() -> None:
    fields: dict[str, Any] = {
        "event": "ended",
        "principal": "al\x9bice",
        "session": b"\x01" * 16,
        "reason": "the link is gone",
        "tokens": 50,
    }
    made = record("session\x1b[2J ended\n", **fields)
    line = LineFormatter().format(made)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d info    session\\x1b\[2J ended\\n  session=01010101  "
        r'principal=al\\x9bice  reason="the link is gone"  tokens=50',
        line,
    ), line
    made.exc_info = (ValueError, ValueError("x\x1b" * 10**6), None)
    traced = LineFormatter().format(made)
    assert traced.startswith(line + "\n" + " " * 9)
    assert "\x1b" not in traced
    assert len(traced) < 10_000


@pytest.mark.parametrize(
    ("log_format", "terminal", "is_json"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("json", True, True),
        ("text", False, False),
    ],
)
def test_a_pipe_gets_json_and_a_terminal_lines_for_people(
    log_format: LogFormat, terminal: bool, is_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", written)
    with configured(Limits(), log_format):
        log.info("listening", extra={"event": "listening", "url": "ws://127.0.0.1:1"})
    line = written.getvalue()
    assert line.startswith("{") == is_json
    if is_json:
        assert json.loads(line)["url"] == "ws://127.0.0.1:1"
    else:
        assert line.endswith(" info    listening  url=ws://127.0.0.1:1\n")


def test_the_figures_of_a_memory_plan_are_in_json_and_a_reader_has_them_in_words() -> None:
    """None of their names was among the fields."""
    made = record(
        "the target takes 0.9 GB", event="memory", figures={"weights_mb": 12, "free_mb": 0}
    )
    told = json.loads(JsonFormatter().format(made))
    assert (told["weights_mb"], told["free_mb"]) == (12, 0)
    assert "weights_mb" not in LineFormatter().format(made)


@contextlib.contextmanager
def configured(limits: Limits, log_format: LogFormat = "auto") -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], log.handlers[:], log.propagate, log.level
    try:
        configure("info", limits, log_format)
        yield
    finally:
        root.handlers[:], log.handlers[:], log.propagate, log.level = before
        logging.captureWarnings(False)


def test_lines_are_shared_fairly_and_the_log_says_what_is_left_out() -> None:
    now = 0.0
    share = FairShare(10, clock=lambda: now)
    passed = [one for _ in range(1000) if share.filter(one := record(principal="greedy"))]
    assert len(passed) == 51
    assert passed[-1].getMessage() == "more lines of this source are left out"
    assert share.filter(record(principal="modest"))
    assert share.filter(record(peer="1.2.3.4:1"))
    now = 1.0
    again = record(principal="greedy")
    assert share.filter(again)
    assert again.suppressed == 950  # type: ignore[attr-defined]
    for number in range(5000):
        share.filter(record(peer=f"10.0.{number >> 8}.{number & 255}:1"))
    assert share._source.cache_info().currsize <= 1024, (
        "sources without end cost no memory without end"
    )


def test_lines_of_libraries_are_limited_too(capsys: pytest.CaptureFixture[str]) -> None:
    with configured(Limits(max_log_lines_per_second=2)):
        for _ in range(100):
            logging.getLogger("asyncio").error("socket.accept() out of system resource")
        logging.getLogger("another").error("and another library")
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 12
    assert lines[-2:] == ["more lines of this source are left out", "and another library"]


class Disk(io.RawIOBase):
    """A file on a disk that takes so many more bytes."""

    def __init__(self) -> None:
        self.room = 10**6
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data)[: self.room]
        self.room -= len(taken)
        self.written += taken
        return len(taken)


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="reads what it writes to by /dev/fd")
@pytest.mark.parametrize(("left", "lines"), [("half a li", 2), ("a line\n", 2), ("", 1)])
def test_a_log_goes_on_in_a_line_of_its_own_where_another_process_has_left_half_a_line(
    left: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log"
    file.write_text(left)
    with file.open("a") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with configured(Limits(), "json"):
            log.warning("restarted")
    said = file.read_text().splitlines()
    assert len(said) == lines
    assert json.loads(said[-1])["message"] == "restarted"


LIBRARY = logging.getLogger("moa.api")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("writers", [(log, log), (log, LIBRARY), (LIBRARY, log)])
def test_lines_that_a_full_disk_did_not_take_are_counted_and_none_is_glued_to_another(
    writers: tuple[logging.Logger, logging.Logger], buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one logger's line is torn, and another's is the next, and with PYTHONUNBUFFERED,
    as a service has it: the next stood on the same line."""
    disk = Disk()
    binary: Any = io.BufferedWriter(disk) if buffered else disk
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(binary, write_through=not buffered))
    with configured(Limits(), "json"):
        log.info("before")
        disk.room = 10
        for number in range(3):
            writers[number % 2].warning("meanwhile %d", number)
        disk.room = 10**6
        writers[-1].warning("after")
    first, torn, *rest = disk.written.decode().splitlines()
    assert json.loads(first)["message"] == "before"
    assert len(torn) == 10
    lost, last = map(json.loads, rest)
    assert lost["message"] == "3 lines of this log could not be written"
    assert (lost["level"], lost["event"]) == ("warning", "lost_lines")
    assert last["message"] == "after"
