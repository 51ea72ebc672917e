from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from cloud_verifier.logs import FairShare, JsonFormatter, configure, log
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
    root = logging.getLogger()
    before = root.handlers[:], log.handlers[:], log.propagate, log.level
    try:
        configure("info", Limits(max_log_lines_per_second=2))
        for _ in range(100):
            logging.getLogger("asyncio").error("socket.accept() out of system resource")
        logging.getLogger("another").error("and another library")
    finally:
        root.handlers[:], log.handlers[:], log.propagate, log.level = before
        logging.captureWarnings(False)
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 12
    assert lines[-2:] == ["more lines of this source are left out", "and another library"]
