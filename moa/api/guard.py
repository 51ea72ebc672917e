"""ASGI middleware before every route: access checks, error format, security headers, an access log
without text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moa.api.access import Access
from moa.api.errors import ApiError, from_error, stopping
from moa.api.fairness import Fairness
from moa.api.http import DONE, Json, event_frame
from moa.api.metrics import ApiMetrics
from moa.errors import MoaError
from moa.process.rare_lines import RareLines
from moa.safe_text import safe_line
from moa.token_bucket import TokenBucket

log = logging.getLogger("moa.api")
_DEFECTS_PER_SECOND = 0.2
"""Log lines with a traceback."""
_STRANGERS = (401, 403, 404, 405)
"""Statuses of refusals that anybody can get without a key, as often as they like."""
_UNTOLD = (401, 405)
"""Statuses of refusals that are not logged here."""
_TURNED_AWAY = 429
"""The status where there is no room for now."""
_REVOKED = ApiError(
    401,
    "the api key was revoked while this was answered: ask for another one",
    code="invalid_api_key",
)
PRINCIPAL = "moa.principal"
"""Where a route that needs a key puts whose it was, into the scope of the request."""
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"x-frame-options": b"DENY",
}
"""Headers of every response that does not set them itself."""


class Guard:
    """An ASGI application around another."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        metrics: ApiMetrics,
        fairness: Fairness,
        origins: Sequence[str] = (),
    ) -> None:
        """Guard an application. Pages of the websites `origins` may read its answers."""
        self._origins = list(origins)
        self._app = self._readable(app)
        self._access = access
        self.metrics = metrics
        self.fairness = fairness
        self._refusals = RareLines(log)
        self._defects = TokenBucket(_DEFECTS_PER_SECOND, 10.0, time.monotonic())

    def _readable(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that the websites that are let in can read its answers: without CORS
        headers no website can read one, nor why there is none."""
        if not self._origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self._origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Last-Event-ID"],
            expose_headers=["X-Request-Id", "Retry-After", "X-Should-Retry"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request before anything else looks at it, pass it on, turn whatever is raised into
        a response of the API, and log and count it."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":  # nobody speaks it here
                await send({"type": "websocket.close", "code": 1008})
            return
        started = time.monotonic()
        response = _Response(scope, send)
        scope["app"] = self  # the routes raise their refusals to this middleware
        until_revoked = asyncio.timeout(None)  # it ends when the key is revoked, if ever
        try:
            headers = Request(scope).headers
            self._access.check_source(headers)
            keys = headers.getlist("authorization")
            async with until_revoked:
                with self._access.watching(keys, lambda: until_revoked.reschedule(0)):
                    await self._app(scope, receive, response.send)
        except asyncio.CancelledError:
            # The server stops, and waits no longer for this answer. Whoever asked is told so; and
            # what is raised from here would be logged as a defect.
            await self._end(stopping(), scope, receive, response)
        except Exception as error:
            if until_revoked.expired():
                await self._end(_REVOKED, scope, receive, response)
                return
            if response.status:  # too late for an error response: close the connection
                raise
            await self._refuse(error, scope, receive, response.send)
        finally:
            self._record(scope, response.status, time.monotonic() - started)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an error as a response of the API; a stranger's only after a while."""
        refusal = self._as_api_error(error, scope["path"])
        self.count_refusal(refusal, scope)
        if refusal.status in _STRANGERS:
            await self._wait_or_abort(scope)
        response = Json(refusal.body(), refusal.status, headers=refusal.headers())
        await self._readable(response)(scope, receive, send)

    def count_refusal(self, refusal: ApiError, scope: Scope) -> None:
        """Count and log a refusal of the request of this scope: that of a response, or the error at
        the end of a stream."""
        if refusal.status == _TURNED_AWAY:
            self.metrics.refusals.labels(refusal.code or "", refusal.limit).inc()
        self._tell(refusal, scope)

    def _tell(self, refusal: ApiError, scope: Scope) -> None:
        """Log a refusal, one of a status and limit now and then, without its message: that may
        quote the request. Wrong keys are logged where they are checked; what is not there is asked
        for all the time."""
        is_no_route = refusal.status == 404 and not refusal.code
        if refusal.status in _UNTOLD or is_no_route or refusal.status >= 500:
            return
        words = f"refused with {refusal.status}: {scope['method']} {_route(scope)}"
        host, port = scope.get("client") or ("", 0)
        peer = f"{host}:{port}" if host else ""
        why = [safe_line(refusal.code)] if refusal.code else []
        if refusal.code == "unsupported_parameter" and refusal.param:
            # A name of our own lists, and none of a request's words.
            why.append(safe_line(refusal.param, 40))
        if refusal.limit:
            why.append(f"limit {safe_line(refusal.limit)}")
        if why:
            words += f" ({', '.join(why)})"
        self._refusals.warn(
            f"{refusal.status} {refusal.limit}",
            words,
            peer,
            "refused",
            limit=refusal.limit,
            principal=scope.get(PRINCIPAL, ""),
        )

    async def _end(
        self, why: ApiError, scope: Scope, receive: Receive, response: _Response
    ) -> None:
        """End a request whose answer is not complete: by an error response; in a stream by an error
        as its last event. Of another response that has begun the connection is closed."""
        if not response.status:
            await self._refuse(why, scope, receive, response.send)
        elif response.is_stream:
            frames = event_frame(why.body()) + event_frame(DONE)
            await response.send({"type": "http.response.body", "body": frames})
        elif not response.is_complete:
            _abort(scope)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        """Count and log a request that has had this response; status 0: none."""
        route = _route(scope)
        self.metrics.requests.labels(route, str(status)).inc()
        log.info(
            "%s %s %d",
            scope["method"],
            route,
            status,
            extra={"event": "request", "ms": round(1000 * seconds, 1)},
        )

    async def _wait_or_abort(self, scope: Scope) -> None:
        """Wait before a refusal is sent, the longer the more of them its address has had. Where too
        many of the address wait, the connection is ended, and nothing is sent."""
        address = scope["client"][0] if scope.get("client") else ""
        if not await self.fairness.hold(address):
            _abort(scope)

    def _as_api_error(self, error: Exception, path: str) -> ApiError:
        """Convert any error to an `ApiError` for the client. One that is a defect of ours is logged
        with its traceback, but not for every request: a flood of them must not fill the log."""
        match error:
            case HTTPException(status_code=404):
                hint = "" if path.startswith("/v1/") else ": OpenAI's routes are below /v1"
                return ApiError(404, f"there is nothing at {path[:200]}{hint}")
            case HTTPException():
                return ApiError(error.status_code, error.detail)
            case MoaError():
                return from_error(error)
            case _:
                if self._defects.take(1, time.monotonic()):
                    log.error("a request failed", exc_info=error, extra={"event": "request_failed"})
                return ApiError(500, "an error inside; the server's log says more")


def _route(scope: Scope) -> str:
    """The route of a request, as we write it; never what was asked for."""
    return str(getattr(scope.get("route"), "path", "other"))


def _abort(scope: Scope) -> None:
    """End the connection of a request at once."""
    abort = scope.get("state", {}).get("abort")
    if abort is not None:  # our server has it; another one closes after the response
        abort()


class _Response:
    """The response to one request on its way to the client."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status = 0
        """0 until the response begins."""
        self.is_complete = False
        self._is_events = False
        self._send = send
        self._is_gone = scope.get("state", {}).get("is_gone")  # only our server has it

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events that has begun, and has not ended."""
        return self._is_events and not self.is_complete

    async def send(self, message: Message) -> None:
        """Pass a part of the response on, its beginning with our headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_events = kind.startswith(b"text/event-stream")
            message = {**message, "headers": _with_security(message["headers"])}
        if message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)
        # Until the server tells us that a client is gone, each write to it would be work for
        # nobody, and a line of asyncio's.
        if self._is_gone is None or not self._is_gone():
            await self._send(message)


def _with_security(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A response's headers, and those of `_HEADERS` that it does not have."""
    names = {name for name, _ in headers}
    missing = [(name, value) for name, value in _HEADERS.items() if name not in names]
    return [*headers, *missing]
