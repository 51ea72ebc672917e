"""When to connect to the verifier, and what a failed attempt means. No clock and no I/O."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from websockets.asyncio.client import process_exception  # type: ignore[attr-defined]  # moved in 17
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidProxy,
    InvalidStatus,
    InvalidURI,
    NegotiationError,
)
from websockets.frames import CloseCode

from edge_client.link.retry import Retry
from moa.errors import LinkError, MoaError, RemoteError, UsageError
from moa.safe_text import safe_line
from moa.wire import Code, remote_error
from moa.wire.messages import Error

_LEAST_PAUSE = 1.0
"""Seconds between two attempts, however often the user asks for one."""
_LONGEST_REASON = 100
"""Bytes of a refusal that are quoted to the user."""
_OUT_OF_TIME = (9, 10)
"""OpenSSL's codes of a certificate that is not yet valid, or has expired."""
_SETTLED_SECONDS = 5.0
"""A connection that lasted this long, or brought tokens, has worked; another one counts as a failed
attempt."""
_FINAL = frozenset({"unauthorized", Code.VERSION, Code.TOKENIZER, Code.TARGET})
"""Wrong credentials, a wrong pair, a wrong version: the same attempt fails until somebody changes
something."""
_HINTS: dict[str, str] = {
    Code.TOKENIZER: "use the bundle that was made for this target",
    Code.TARGET: "use the bundle that was made for this target, or the address of its verifier",
    Code.VERSION: "update the older end",
}


@dataclass
class Dialling:
    """Decides when the next attempt is due."""

    retry: Retry = field(default_factory=lambda: Retry(0.25, 5.0))
    refused: MoaError | None = None
    """Why connecting has stopped; `new_turn` starts it again."""
    last_error: MoaError | None = None
    """Why the latest attempt failed."""
    port_is_closed: bool = False
    """Whether the latest attempt was refused because nothing listens at the address."""
    cut: bool = False
    """Disconnected on purpose: no attempt is due."""
    failures: int = 0
    """Attempts that have failed so far, in all."""
    down_since: float = 0.0
    asked_wait: float = 0.0
    """Seconds that a verifier which is about to stop has asked us to wait."""
    _ended_at: float = float("-inf")
    _up_since: float | None = None
    _won: bool = False
    """Whether the connection has brought tokens."""

    def due(self) -> float | None:
        """When the next attempt may begin; None while none may: after a refusal before `new_turn`,
        or while cut off."""
        if self.cut or self.refused is not None:
            return None
        return self.retry.not_before

    def welcomed(self, now: float) -> None:
        """Note that the verifier has sent its welcome."""
        self._up_since = now
        self.last_error = None
        self.port_is_closed = False

    def won(self) -> None:
        """Note that tokens arrived: however soon the connection ends, the next one may begin at
        once."""
        self._won = True

    def ended(self, error: MoaError, now: float, *, port_is_closed: bool = False) -> None:
        """Note that an attempt failed or a connection ended, and decide when the next attempt may
        begin: after a pause that grows with each failure in a row, or as long as the verifier has
        asked for. `port_is_closed` says that nothing listens at the address."""
        if self._up_since is not None:
            self.down_since = now
            has_settled = now - self._up_since >= _SETTLED_SECONDS
            if self._won or has_settled:  # failures before it count no more
                self.retry.progressed()
        self._won = False
        self._up_since = None
        self.last_error = error
        self.port_is_closed = port_is_closed
        self._ended_at = now
        self.failures += 1
        if is_refusal(error):
            self.refused = error
        retry_after = getattr(error, "retry_after", None) or 0.0
        self.retry.failed(now, asked_wait=max(self.asked_wait, retry_after))
        self.asked_wait = 0.0

    def new_turn(self) -> None:
        """Let the next attempt begin soon, even after a refusal: with a new turn, or where a user asks
        for a connection, the cause of the last failure may be gone."""
        self.refused = None
        self.retry.not_before = min(self.retry.not_before, self._ended_at + _LEAST_PAUSE)


def is_refusal(error: MoaError) -> bool:
    """Whether the verifier has refused this device until somebody changes something."""
    return isinstance(error, RemoteError) and error.code in _FINAL


_BEGINS_AGAIN = "the verifier was there before: it has ended, or is starting again"
"""What is said where nothing answers at an address that was right: whoever supervises the verifier may
be at it already."""


def is_closed_port(error: BaseException) -> bool:
    """Whether an attempt failed because nothing listens at the address: its machine has refused the
    connection."""
    if not isinstance(error, OSError):
        return False
    # A name with several addresses: asyncio joins what went wrong at each of them into one text.
    return error.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(error)


def explain(
    error: BaseException, url: str, *, tls: bool, token: bool = False, worked: bool = False
) -> MoaError:
    """Turn whatever ended a connection or an attempt into an error of one line, with a hint at what
    may be wrong. `tls` and `token` say whether they were used, `worked` whether a connection to this
    address has been welcomed before: then the address itself is right."""
    match error:
        case MoaError():
            return error
        case InvalidStatus():
            return _explain_status(error, url, token=token, worked=worked)
        case InvalidURI():
            return UsageError(
                f"{url!r} is not a verifier address: {error}", hint="like ws://host:8765"
            )
        case InvalidProxy():
            return LinkError(
                f"invalid proxy in the environment: {error}", hint="check http_proxy, https_proxy"
            )
        case ssl.SSLCertVerificationError():
            return LinkError(
                f"the verifier's certificate is not trusted: {error.verify_message}",
                hint=_hint_at_certificate(error),
            )
        case ssl.SSLError():
            return LinkError(
                f"TLS with {url} failed: {error.reason or error}", hint="check wss:// and the port"
            )
        case NegotiationError() | InvalidHandshake():
            if worked:
                return LinkError(f"{url} does not answer now")
            return _explain_handshake(error, url, tls=tls)
        case TimeoutError() | asyncio.TimeoutError():
            return LinkError(f"cannot reach {url}: no answer in time")
        case socket.gaierror():
            host = urlsplit(url).hostname or url
            return LinkError(
                f"cannot resolve {safe_line(host)}: {safe_line(error.strerror or str(error))}",
                hint="is the name right, and is this device online?",
            )
        case ConnectionClosed() if worked:
            return _explain_close(error, url)
        case ConnectionClosed() | OSError() | EOFError():
            said = safe_line(str(error)) or type(error).__name__
            if is_closed_port(error):
                said = "nothing listens there"
            hint = _BEGINS_AGAIN if worked else _hint_at_port(url, tls=tls)
            return LinkError(f"cannot reach {url}: {said}", hint=hint)
        case _:
            return LinkError(f"cannot reach {url}: {type(error).__name__}: {safe_line(str(error))}")


def _explain_close(error: ConnectionClosed, url: str) -> MoaError:
    """The error for the end of a connection that has worked."""
    sent = error.sent if error.rcvd is None else None
    if sent is not None and sent.code == CloseCode.INTERNAL_ERROR:
        # What the library closes with where its ping is not answered in time.
        return LinkError(f"no word from {url} any more")
    reason = safe_line(error.rcvd.reason) if error.rcvd is not None else ""
    return LinkError(f"the connection to {url} was lost" + (f": {reason}" if reason else ""))


def _explain_status(error: InvalidStatus, url: str, *, token: bool, worked: bool) -> MoaError:
    """Returns the error for an address that answered the handshake with an HTTP status: a token is
    missing or wrong, the verifier is not available now, or something else answers there."""
    status = error.response.status_code
    if status in (401, 403):
        why = f"{url} wants a token"
        hint = "pass --token; and is it a verifier's address?"
        if token:
            why = "the verifier refused the token"
            hint = "give the one it knows with --token"
            if worked:
                hint = "it was revoked or replaced: start again with another --token"
        return RemoteError("unauthorized", f"{why} (HTTP {status})", hint=hint)
    is_for_now = process_exception(error) is None  # websockets' own list of such statuses
    if is_for_now or status == 429:
        why = _said_in(error)
        return LinkError(f"the verifier is not available now (HTTP {status}{why})")
    return LinkError(
        f"{url} answers HTTP {status}: it is not a verifier",
        hint="check host, port and path: OpenAI's API (--openai) has a port of its own",
    )


def _said_in(error: InvalidStatus) -> str:
    """Returns what a verifier says beside a status, in a line of plain text, behind a colon. A page
    of somebody in between is not quoted."""
    line = bytes(error.response.body or b"").strip()
    is_plain = error.response.headers.get("Content-Type", "").startswith("text/plain")
    if not is_plain or not line or len(line) > _LONGEST_REASON or b"\n" in line:
        return ""
    return f": {safe_line(line.decode(errors='replace'))}"


def _hint_at_certificate(error: ssl.SSLCertVerificationError) -> str:
    """Returns what to do about a certificate that is not trusted: an expired one needs another
    one, whoever signed it."""
    if error.verify_code in _OUT_OF_TIME:
        return "the verifier needs a new one; or is this device's clock wrong?"
    if "ismatch" in error.verify_message:
        return "give the verifier's address as its certificate has it"
    return "pass --tls-ca with the authority that signed it, or its own file if it is self-signed"


def _hint_at_port(url: str, *, tls: bool) -> str:
    """Returns what may be wrong where nothing answers at this address."""
    if tls:
        return "is `cloud-verifier serve` running there, with --tls-cert?"
    if urlsplit(url).port is None:
        return "that is port 80; a verifier has 8765 if not told otherwise"
    return "is `cloud-verifier serve` running there?"


def _explain_handshake(error: Exception, url: str, *, tls: bool) -> MoaError:
    """The error for a handshake that failed at an address that has never worked."""
    if isinstance(error.__cause__, EOFError):  # a tunnel or proxy, or a port without TLS
        hint = "is `cloud-verifier serve` running behind that port?"
        if not tls:
            hint = "is it a TLS port? then wss://; else: is `cloud-verifier serve` running there?"
        return LinkError(
            f"cannot reach {url}: the connection was closed without an answer", hint=hint
        )
    hint = "" if tls else "is it a TLS port? then wss://"
    return LinkError(f"{url} does not answer as a verifier: {safe_line(str(error))}", hint=hint)


def refusal(message: Error) -> MoaError:
    """The error for a verifier that refuses us, with what to do about it."""
    error = remote_error(message)
    error.hint = _HINTS.get(message.code, error.hint)
    return error
