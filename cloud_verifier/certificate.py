"""Until when the certificate of a port is valid: devices refuse one that has expired, and answer alone."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloud_verifier.logs import log

_SOON_SECONDS = 14 * 86400.0
"""An end that is nearer is told at the start."""


def warn_of_its_end(certificate: Path, now: float) -> None:
    """Log a warning for a certificate that is not valid at the time `now`, or not for long."""
    valid = _read(certificate)
    if valid is None:
        return
    begin, end = (ssl.cert_time_to_seconds(valid[name]) for name in ("notBefore", "notAfter"))
    trouble = ""
    if now < begin:
        trouble = f"is not valid before {_day(begin)}: until then devices refuse it"
    elif now >= end:
        trouble = f"has expired on {_day(end)}: devices refuse it, and answer alone"
    elif now + _SOON_SECONDS > end:
        trouble = f"expires on {_day(end)}: renew it, and restart"
    if trouble:
        log.warning("the certificate %s %s", certificate, trouble, extra={"event": "certificate"})


def _read(certificate: Path) -> dict[str, Any] | None:
    """The first certificate of a file, by the library's own reader, which is not public: None where
    there is none, or it cannot read the file."""
    reader: Callable[[Path], dict[str, Any]] | None
    reader = getattr(getattr(ssl, "_ssl", None), "_test_decode_cert", None)
    if reader is None:
        return None
    try:
        return reader(certificate)
    except (OSError, ssl.SSLError):
        return None


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
