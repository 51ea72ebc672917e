"""What it means that no answer came from an upstream, in our words: those of the libraries between
are for who wrote them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import httpx2 as httpx

from moa.safe_text import safe_line


def no_answer(error: httpx.HTTPError) -> str:
    """Returns what has happened, as the rest of a sentence that begins with "the upstream"."""
    if isinstance(error, httpx.RemoteProtocolError) and "without sending a response" in str(error):
        return "closed the connection without an answer"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.DecodingError):
        return "broke off its answer"
    if isinstance(error, httpx.WriteError):
        return "broke off the connection"
    return f"is not reached: {_why(error)}"


def _why(error: httpx.HTTPError) -> str:
    """Why no connection, or no word, came."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {safe_line(cause.verify_message)}"
        if isinstance(cause, socket.gaierror):
            return "its name is not found (a wrong one, or no network)"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there"
    if speaks_no_tls(error):
        return "it does not speak TLS"
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return "no connection in time"
    if isinstance(error, httpx.TimeoutException):
        return "it says nothing"
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return safe_line(cause.strerror)
    return safe_line(str(error)) or type(error).__name__


def speaks_no_tls(error: httpx.HTTPError) -> bool:
    """Whether a connection was there, and its other end did not take up TLS: it answered something
    else, or waits for a request."""
    if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return False
    found = [cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)]
    return bool(found) and not any(isinstance(one, ssl.SSLCertVerificationError) for one in found)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came from, one behind another."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            yield from cause.exceptions
        cause = cause.__cause__ or cause.__context__
