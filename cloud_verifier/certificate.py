"""Until when the certificate of a port is valid: devices refuse one that has expired, and answer alone."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloud_verifier.logs import log

DAY_SECONDS = 86400.0
_SOON_SECONDS = 14 * DAY_SECONDS
"""An end that is nearer is told."""


class Certificate:
    """How long a port's certificate is valid. As the port does, it reads the file once."""

    def __init__(self, path: Path, *, quiet_until: float = 0.0) -> None:
        """Read the file. Nothing is told before the time `quiet_until`."""
        self._path = path
        self._begin, self.end = _validity(path)
        """`end` is 0 where the file has no certificate that can be read."""
        self._quiet_until = quiet_until

    def warn_of_its_end(self, now: float) -> None:
        """Log a warning, once a day, if the certificate is not valid at the time `now`, or not for
        long."""
        is_fine = self._begin <= now < self.end - _SOON_SECONDS
        if not self.end or is_fine or now < self._quiet_until:
            return
        self._quiet_until = now + DAY_SECONDS
        log.warning(
            "the certificate %s %s", self._path, self._trouble(now), extra={"event": "certificate"}
        )

    def _trouble(self, now: float) -> str:
        """What is wrong with it, and what to do."""
        if now < self._begin:
            return f"is not valid before {_day(self._begin)}: until then devices refuse it"
        what_to_do = "renew it, and restart"
        if _validity(self._path)[1] > self.end:
            what_to_do = "its file has a newer one, which is read at a restart"
        if now < self.end:
            return f"expires on {_day(self.end)}: {what_to_do}"
        return f"has expired on {_day(self.end)}: devices refuse it, and answer alone; {what_to_do}"


def _validity(path: Path) -> tuple[float, float]:
    """From when until when the first certificate of a file is valid, by the library's own reader,
    which is not public: zeros where there is none, or it cannot read the file."""
    reader: Callable[[Path], dict[str, Any]] | None
    reader = getattr(getattr(ssl, "_ssl", None), "_test_decode_cert", None)
    if reader is None:
        return 0.0, 0.0
    try:
        found = reader(path)
    except (OSError, ssl.SSLError):
        return 0.0, 0.0
    return ssl.cert_time_to_seconds(found["notBefore"]), ssl.cert_time_to_seconds(found["notAfter"])


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
