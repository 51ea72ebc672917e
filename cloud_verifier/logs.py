"""Logs as one JSON object a line, with session and round where there is one. Text of users is never logged."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

log = logging.getLogger("cloud_verifier")

_FIELDS = ("session", "round", "principal", "peer", "code", "reason", "event")


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON; the fields above come from `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value not in (None, "", b"", 0):
                entry[name] = value.hex() if isinstance(value, bytes) else value
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str) -> None:
    """Send the verifier's logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False
    # The library's own complaints about strangers' handshakes are ours to tell, in our form.
    for name in ("websockets.server", "websockets"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
