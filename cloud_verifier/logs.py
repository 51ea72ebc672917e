"""Logs with one JSON object a line, with session and round if there is one; on a terminal lines for
people. Text and tokens of users are never logged.

Unauthenticated clients cause log lines too. So remote text is escaped and shortened, and lines are
rate-limited for each principal, or address without one: the first line over the limit says so, and
the next one that is written says how many were dropped.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import stat
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from moa.cli.working import lasting
from moa.process.memory import resident_bytes
from moa.process.peers import shown_peer
from moa.safe_text import safe_line, safe_text
from moa.token_bucket import TokenBucket
from moa.wire.limits import Limits

log = logging.getLogger("cloud_verifier")

LogFormat = Literal["auto", "json", "text"]
"""How records are written; auto is text on a terminal, and else JSON."""

_FIELDS = (
    "session",
    "round",
    "principal",
    "peer",
    "port",
    "kind",
    "code",
    "limit",
    "reason",
    "event",
    "suppressed",
    "version",
    "target",
    "device",
    "slots",
    "decoder",
    "computes",
    "kv_megabytes_at_most",
    "resident_megabytes",
    "records",
    "url",
    "api",
    "upstream_api",
    "seconds",
    "prompt_tokens",
    "tokens",
)
_TELL_SECONDS = 5.0
"""Between two lines on something that takes long, such as the load of a model."""
_MAX_SOURCES = 1024
_BURST_SECONDS = 5.0
_LONGEST_TRACE = 8000
_SHORT_SESSION = 8
"""Characters of a session's id that a reader needs to tell it from others."""
_INDENT = " " * 9
"""What stands before the lines of a trace: the width of the time."""


def _fields(record: logging.LogRecord) -> dict[str, int | float | str]:
    """Returns the fields of a record that say something, with remote text escaped and shortened.
    They come from `extra`."""
    fields: dict[str, int | float | str] = {}
    for name in _FIELDS:
        value = getattr(record, name, None)
        if value in (None, "", b"", 0):
            continue
        known = value.hex() if isinstance(value, bytes) else value
        if name == "peer":
            known = shown_peer(str(value))
        fields[name] = known if isinstance(known, int | float) else safe_line(str(known))
    return fields


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns a log record as a line of JSON; remote text in it is escaped and shortened."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": safe_line(record.getMessage()),
            **_fields(record),
            **getattr(record, "figures", {}),  # a line for people has them in its words
        }
        trace = _trace(self, record)
        if trace:
            entry["exception"] = trace
        return json.dumps(entry, ensure_ascii=False)


class LineFormatter(logging.Formatter):
    """Formats a record for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns a log record as a line with local time, level, message and fields; the trace of an
        exception follows in lines of its own. Remote text is escaped and shortened."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        words = [f"{clock} {record.levelname.lower():7} {safe_line(record.getMessage())}"]
        for name, value in _fields(record).items():
            if name in ("event", "kind"):
                continue  # for programs: the message says it
            if name == "session":
                value = str(value)[:_SHORT_SESSION]
            words.append(f"{name}={_quoted(value)}")
        line = "  ".join(words)
        trace = _trace(self, record)
        if trace:
            line += "\n" + textwrap.indent(trace, _INDENT)
        return line


def _quoted(value: int | float | str) -> str:
    """Returns a field's value as a reader sees where it ends: in quotes if it has several words."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text else text


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Returns the end of the trace of a record's exception, with what is no text escaped; nothing
    for a record without one."""
    if not record.exc_info:
        return ""
    return safe_text(formatter.formatException(record.exc_info))[-_LONGEST_TRACE:]


class FairShare(logging.Filter):
    """Rate-limits the lines of one principal, or of one address."""

    def __init__(
        self, lines_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._rate = lines_per_second
        self._clock = clock
        self._source = lru_cache(_MAX_SOURCES)(self._new)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line may be written. A principal, or an address without one, that logs too
        much is left out: its first such line says so, and the next that is written says how many
        were left out."""
        now = self._clock()
        peer = getattr(record, "peer", "").rpartition(":")[0]
        source = self._source(getattr(record, "principal", "") or peer or record.name)
        if source.lines.take(1, now):
            if source.left_out:
                record.suppressed = source.left_out
            source.left_out = 0
            return True
        source.left_out += 1
        if source.left_out > 1:
            return False
        # The first line over the limit is written as this remark.
        record.msg = "more lines of this source are left out"
        record.args = ()
        record.exc_info = None
        return True

    def _new(self, name: str) -> _Source:
        return _Source(TokenBucket(self._rate, self._rate * _BURST_SECONDS, self._clock()))


@dataclass
class _Source:
    lines: TokenBucket
    left_out: int = 0


class ToStandardError(logging.Handler):
    """Writes to the current standard error, not to the one at configuration. Where that fails, as
    on a full disk, the process goes on, and the first line that can be written again is preceded by
    one that says how many were lost."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0
        """Lines that could not be written since the last one that could."""
        self._is_torn = _begins_behind_half_a_line()
        """Whether only the beginning of a line was written, by this process or the one before it."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        lines = [self.format(record)]
        if self._lost:
            lines.insert(0, self.format(_lost_lines(record, self._lost)))
        try:
            self._write("".join(f"{line}\n" for line in lines))
        except (OSError, ValueError):  # also where the reader of the logs is gone
            self._lost += 1
        else:
            self._lost = 0

    def _write(self, text: str) -> None:
        """Write lines without a buffer: one that could not be written would hold them, and later
        give out a part of them."""
        buffer = getattr(sys.stderr, "buffer", None)
        # With PYTHONUNBUFFERED, as a service has it, the one is the other: of a line that is written
        # in part the text's own stream would drop the rest without a word.
        raw = buffer if isinstance(buffer, io.RawIOBase) else getattr(buffer, "raw", None)
        if raw is None:  # some other stream in its place
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        rest = text.encode(errors="backslashreplace")
        if self._is_torn:
            rest = b"\n" + rest
        while rest:
            written = raw.write(rest)
            if written is None:
                raise BlockingIOError("standard error takes nothing now")
            if written:
                self._is_torn = not rest[:written].endswith(b"\n")
            rest = rest[written:]


def _begins_behind_half_a_line() -> bool:
    """Whether standard error is a file whose last line has no end, as a process leaves it that a full
    disk has stopped."""
    try:
        descriptor = sys.stderr.fileno()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        with open(f"/dev/fd/{descriptor}", "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except (AttributeError, OSError, ValueError):  # no file, an empty one, or none of ours to read
        return False


def _lost_lines(record: logging.LogRecord, count: int) -> logging.LogRecord:
    """A record which says that so many lines before this one could not be written."""
    lines = "1 line" if count == 1 else f"{count:,} lines"
    return logging.makeLogRecord(
        {
            "name": record.name,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": f"{lines} of this log could not be written",
            "created": record.created,
            "msecs": record.msecs,
            "event": "lost_lines",
        }
    )


def _formatter(log_format: LogFormat) -> logging.Formatter:
    """Returns what formats the log records."""
    for_people = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    return LineFormatter() if for_people else JsonFormatter()


def configure(level: str, limits: Limits, log_format: LogFormat = "auto") -> None:
    """Send the logs of the verifier and of its libraries to stderr, by default as JSON, or to a
    terminal as lines for people."""
    # One for both: it knows where the last line was torn, and how many were lost, whoever wrote them.
    handler = ToStandardError()
    handler.setFormatter(_formatter(log_format))
    handler.addFilter(FairShare(limits.max_log_lines_per_second))
    for logger in (log, logging.getLogger()):
        logger.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logging.captureWarnings(True)
    # The library's messages about failed handshakes are dropped: we log those in our own format.
    for name in ("websockets.server", "websockets"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def told_while_it_lasts(
    what: str, every: float = _TELL_SECONDS
) -> contextlib.AbstractContextManager[None]:
    """A context that logs a line every few seconds while the body runs: how long it has taken, and
    how much memory this process has by now."""

    def tell(seconds: float) -> None:
        log.info(
            what,
            extra={
                "event": "loading",
                "seconds": round(seconds, 1),
                "resident_megabytes": round(resident_bytes() / 1e6),
            },
        )

    return lasting(tell, every)


def take_over_libraries() -> None:
    """Redirect the log lines of loaded libraries to our format, and switch off their progress bars."""
    from transformers.utils import logging as transformers_logging

    for other in logging.root.manager.loggerDict.values():
        if isinstance(other, logging.Logger) and other is not log:
            other.handlers.clear()
            other.propagate = True
    transformers_logging.disable_progress_bar()
