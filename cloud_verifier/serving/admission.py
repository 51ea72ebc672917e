"""Admission of websockets, and the answers to plain HTTP: health, metrics, refusals. No sockets."""

from __future__ import annotations

import http
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from cloud_verifier.serving.auth import (
    OPERATOR,
    WRONG_TOKENS,
    Authenticator,
    Caller,
    may_measure,
)
from cloud_verifier.sessions.service import Service
from moa.api.access import ANONYMOUS, Hosts
from moa.api.metrics import CONTENT_TYPE

_READY = "/health/ready"


@dataclass(frozen=True)
class Reply:
    """A plain HTTP response."""

    status: http.HTTPStatus
    content: bytes
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """All header fields."""
        return {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(self.content)),
            "Cache-Control": "no-store",
            "Connection": "close",
        } | self.extra


class Admission:
    """Answers requests for a `Service`."""

    def __init__(
        self,
        service: Service,
        auth: Authenticator,
        wrong: Callable[[], str],
        hosts: Sequence[str] = (),
        unready: Callable[[], str] = lambda: "",
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Answer requests for this service. `wrong` returns the model's problem, empty if it is
        healthy; `hosts` are names under which this port may be reached. `unready` returns why it
        should get no new devices although it is healthy: those that come all the same are served.
        `look` looks after what that says, where it may be old."""
        self._hosts = Hosts(hosts)
        self._service = service
        self._auth = auth
        self._wrong = wrong
        self._unready = unready
        self._look = look
        self._sweeps_again = False
        """Whether the next look ends sessions without a token once more."""
        # From 0 on: an alert on the increase does not see a count that begins with 1.
        for port, kind in itertools.product(("verifier", "openai"), WRONG_TOKENS):
            service.metrics.unauthorized.labels(port, kind)
        service.metrics.token_file_unread.set_function(lambda: bool(auth.unread))

    async def prepare(self, target: str) -> None:
        """Look after what the answer to this request is about, where that is to be new: whoever
        asks whether this process is ready sends devices by it."""
        if self._look is not None and target.partition("?")[0] == _READY:
            await self._look()

    def answer(
        self, target: str, authorization: Sequence[str], peer: str, host: str = ""
    ) -> Reply | Caller:
        """Returns the answer to an HTTP request: a reply, or the caller whose websocket may open.
        `authorization` are the values of its Authorization headers. Where nobody needs a token,
        `host` must be a name of this port: else a web page could reach it under a name of its
        own."""
        path = target.partition("?")[0]
        problem = self._wrong()
        if self._service.draining and path != "/health/live":  # it lives while it drains
            problem = "draining"
        if path in ("/health/live", _READY):
            if path == _READY:
                problem = problem or self._unready()
            if problem:
                return text_reply(http.HTTPStatus.SERVICE_UNAVAILABLE, problem)
            return text_reply(http.HTTPStatus.OK, path.removeprefix("/health/"))
        caller = self._auth.caller(authorization)
        if caller is None:
            self.count_unauthorized("verifier", authorization, peer)
            return _NO_TOKEN
        if caller.principal == ANONYMOUS and not self._hosts.serve(host):
            return _OTHER_HOST
        if path == "/metrics":
            return self._metrics(caller.principal)
        if path != "/":
            return text_reply(http.HTTPStatus.NOT_FOUND, "not found")
        if problem:
            return text_reply(http.HTTPStatus.SERVICE_UNAVAILABLE, problem)
        why = self._service.refuse_another(caller.principal, peer)
        if why:
            return text_reply(http.HTTPStatus.SERVICE_UNAVAILABLE, why, {"Retry-After": "1"})
        return caller

    def count_unauthorized(self, port: str, authorization: Sequence[str], peer: str) -> None:
        """Count and log a caller at this port without a valid token."""
        kind = self._auth.refused(authorization, peer, port)
        self._service.metrics.unauthorized.labels(port, kind).inc()

    def watching(self, caller: Caller, end: Callable[[], None]) -> AbstractContextManager[None]:
        """A context that calls `end` if the token of this caller is revoked while it runs."""
        return self._auth.watching(caller, end)

    def end_revoked(self) -> None:
        """End the connections of tokens that were revoked, and all sessions of principals that have
        no token any more; to be called about once a second.

        An answer of the OpenAI port that this ends may still have its opening under way, and so
        leave a session behind: sessions are looked through at the next call once more."""
        has_revoked = self._auth.end_revoked()
        if has_revoked or self._sweeps_again:
            self._service.end_sessions_but_of(self._auth.has_token)
        self._sweeps_again = has_revoked

    def _metrics(self, principal: str) -> Reply:
        """Returns the page of metrics, or a refusal for a principal that may not read it."""
        if not may_measure(principal):
            return text_reply(http.HTTPStatus.FORBIDDEN, NOT_MEASURED)
        self._service.observe()
        page = self._service.metrics.page()
        return Reply(http.HTTPStatus.OK, page, {"Content-Type": CONTENT_TYPE})


def text_reply(status: http.HTTPStatus, line: str, extra: dict[str, str] | None = None) -> Reply:
    """A response with a line of text."""
    return Reply(status, f"{line}\n".encode(), extra or {})


_NO_TOKEN = text_reply(
    http.HTTPStatus.UNAUTHORIZED,
    "a valid bearer token is needed",
    {"WWW-Authenticate": "Bearer"},
)
_OTHER_HOST = text_reply(
    http.HTTPStatus.FORBIDDEN,
    "this name is not served here: allow it with --openai-host, or give tokens",
)
NOT_MEASURED = f"metrics are for the principal {OPERATOR!r}: make a token with --name {OPERATOR}"
FAILED = text_reply(http.HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
"""The answer where answering failed."""
