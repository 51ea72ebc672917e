"""The endpoint: its routes, over an answerer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from moa.api.access import Access
from moa.api.answer import Answerer
from moa.api.completions import parse_chat, parse_completion
from moa.api.errors import ApiError
from moa.api.fairness import Fairness, charged, one_more
from moa.api.guard import PRINCIPAL, Guard
from moa.api.http import EventStream, Json, read_body, while_connected
from moa.api.load import Counted
from moa.api.metrics import CONTENT_TYPE, ApiMetrics
from moa.api.recheck import Rechecks
from moa.api.replay import Recordings, position
from moa.api.requests import Defaults, ParsedRequest
from moa.api.responses import ResponseShape, parse_response
from moa.api.shapes import Shape, model_entry, model_list
from moa.api.stream import streamed
from moa.api.tokens import detokenized, properties, tokenized
from moa.process.memory import give_back_free_memory

AnyCall = TypeVar("AnyCall", bound=ParsedRequest)
_LARGE_BODY = 2**16
"""Bytes of a request after which memory is given back to the system."""
_TRIM_SECONDS = 10.0
"""Seconds between two times at which memory is given back."""


@dataclass(frozen=True, kw_only=True)
class ApiLimits:
    """Bounds of one endpoint."""

    max_body_bytes: int = 2**20
    max_bodies: int = 64
    """Bodies of one principal that are being received at once."""
    max_running: int = 64
    """Answers at once; a request with `n` has `n` of them."""
    max_running_of_one: int | None = None
    """Those of one principal, the owner of a key; None: as many as there may be of all."""
    running_limit: str = "most_answers"
    """What the operator calls `max_running`."""
    running_of_one_limit: str = "most_answers"
    """What the operator calls `max_running_of_one`."""
    keep_seconds: float = 900.0
    """How long a complete resumable stream is kept."""
    alone_seconds: float = 60.0
    """How long a resumable stream continues without a client."""
    keep_bytes: int = 32 * 2**20
    """Memory for all resumable streams."""


@dataclass(eq=False)
class Api:
    """One endpoint."""

    answerer: Answerer
    access: Access
    limits: ApiLimits = field(default_factory=ApiLimits)
    defaults: Defaults = field(default_factory=Defaults)
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    observe: Callable[[], object] = lambda: None
    """Called before metrics are read."""
    more_metrics: Callable[[], Awaitable[bytes]] | None = None
    """Returns metrics that another process counts, to be shown behind ours."""
    others: Callable[[str], bool] = lambda principal: False
    """Whether anybody but this principal is served now, through any port."""
    may_measure: Callable[[str], bool] = lambda principal: True
    """Whether this principal may see what all together do: metrics and totals."""

    also_called: Sequence[str] = ()
    """Other names of the model that requests may use; `*`: any."""
    more_names: Callable[[], Sequence[str]] = lambda: ()
    """Further ones, by what is known of the model by now."""

    def __post_init__(self) -> None:
        """Make what the endpoint keeps from one request to the next: counts, recorded streams, who
        may use how much of the event loop, and answers that are to be checked later."""
        limits = self.limits
        self._counted = Counted(
            self.answerer,
            self.metrics,
            limits.max_running,
            limits.max_running_of_one,
            names=(limits.running_limit, limits.running_of_one_limit),
        )
        self._kept = Recordings(
            time.monotonic,
            self.limits.keep_seconds,
            self.limits.alone_seconds,
            self.limits.keep_bytes,
        )
        self._fairness = Fairness(self.others)
        self.metrics.kept_bytes.set_function(lambda: self._kept.size)
        self._rechecks = Rechecks(self._counted, self._kept)
        self._reading: Counter[str] = Counter()
        """Bodies that are being received, by principal."""
        self._had_large_request = False
        """Whether there was one since memory was given back."""
        self._created = int(time.time())

    def app(self, more: Sequence[BaseRoute] = (), origins: Sequence[str] = ()) -> Guard:
        """The ASGI application with all routes. `more` routes are asked first; pages of the
        websites `origins` may read its answers."""
        keyed = self.keyed
        routes = [
            *more,
            Route("/health", self._health),
            Route("/health/live", self._live),
            Route("/health/ready", self._ready),
            Route("/metrics", keyed(self._metrics)),
            Route("/v1/models", keyed(self._models)),
            Route("/v1/models/{model:path}", keyed(self._model)),
            Route(
                "/v1/chat/completions",
                keyed(partial(self._answer, parse_chat, Shape)),
                methods=["POST"],
            ),
            Route(
                "/v1/completions",
                keyed(partial(self._answer, parse_completion, Shape)),
                methods=["POST"],
            ),
            Route("/v1/streams/{id}", keyed(self._follow)),
            Route("/v1/streams/{id}", keyed(self._stop), methods=["DELETE"]),
            Route(
                "/v1/responses",
                keyed(partial(self._answer, parse_response, ResponseShape)),
                methods=["POST"],
            ),
            Route("/v1/embeddings", keyed(self._no_embeddings), methods=["POST"]),
            Route("/tokenize", keyed(self._tokenize), methods=["POST"]),
            Route("/detokenize", keyed(self._detokenize), methods=["POST"]),
            Route("/props", keyed(self._props)),
            Route("/moa/status", keyed(self._status)),
        ]
        return Guard(Router(routes), self.access, self.metrics, self._fairness, origins)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Api]:
        """Run what the endpoint does beside its requests while the body runs: remove streams that
        are over a limit, check answers that were never verified, and give memory back to the
        system. At the end every stream is ended."""
        helpers = [
            asyncio.create_task(self._kept.keep_swept()),
            asyncio.create_task(self._rechecks.keep_checking()),
            asyncio.create_task(self._keep_trimmed()),
        ]
        try:
            yield self
        finally:
            for task in (*helpers, *self._kept.tasks):
                task.cancel()
            await asyncio.gather(*helpers, *self._kept.tasks, return_exceptions=True)

    # ---- about the endpoint

    async def _health(self, request: Request) -> Response:
        problem = self.answerer.not_ready()
        if problem:
            return Json({"status": problem}, 503)
        return Json({"status": "ok"})

    async def _live(self, request: Request) -> Response:
        """Whether the process works: one that drains does, and is not to be started again."""
        problem = self.answerer.not_ready()
        if problem and problem != "draining":
            return Json({"status": problem}, 503)
        return Json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Whether answers are verified now, for whoever chooses among several endpoints."""
        problem = self.answerer.not_ready() or await self.answerer.unverified()
        if problem:
            return Json({"status": "not ready", "detail": problem}, 503)
        return Json({"status": "ready"})

    async def _metrics(self, request: Request, principal: str) -> Response:
        if not self.may_measure(principal):
            raise ApiError(403, "metrics are for the operator's key", code="not_the_operator")
        self.observe()
        page = self.metrics.page()
        if self.more_metrics is not None:
            page += await self.more_metrics()
        return Response(page, media_type=CONTENT_TYPE)

    async def _status(self, request: Request, principal: str) -> Response:
        whose = None if self.may_measure(principal) else principal
        return Json(self._counted.status(whose))

    async def _models(self, request: Request, principal: str) -> Response:
        return Json(model_list(self.answerer.model, self._created))

    async def _model(self, request: Request, principal: str) -> Response:
        self._check_model(request.path_params["model"])
        return Json(model_entry(self.answerer.model, self._created))

    async def _no_embeddings(self, request: Request, principal: str) -> Response:
        raise ApiError(
            404,
            "no embeddings here: this server's model writes text. Run an embedding model beside it",
            code="unsupported_route",
        )

    async def _tokenize(self, request: Request, principal: str) -> Response:
        body = await self._body(request, principal)
        tokenizer = self.answerer.tokenizer
        async with self._counted.tokenizing(principal):
            found = await asyncio.to_thread(tokenized, body, tokenizer, self.answerer.context)
        return Json(found)

    async def _detokenize(self, request: Request, principal: str) -> Response:
        body = await self._body(request, principal)
        tokenizer = self.answerer.tokenizer
        async with self._counted.tokenizing(principal):
            found = await asyncio.to_thread(detokenized, body, tokenizer, self.answerer.vocabulary)
        return Json(found)

    async def _props(self, request: Request, principal: str) -> Response:
        answerer = self.answerer
        most = self._counted.most_of_one
        return Json(properties(answerer.model, answerer.tokenizer, answerer.context, most))

    # ---- answers

    async def _answer(
        self,
        parse: Callable[[bytes, Defaults, str], AnyCall],
        shape_of: Callable[[str, AnyCall], Shape | ResponseShape],
        request: Request,
        principal: str,
    ) -> Response:
        """Answer a request, whole or as a stream. The routes differ in how they `parse` a body, and
        in the shape of what they send (`shape_of`)."""
        body = await self._body(request, principal)
        call = _asked_by(_peer(request), parse(body, self.defaults, principal))
        self._check_model(call.model)
        shape = shape_of(self.answerer.model, call)
        if call.stream:
            # Its response has a status already where it is refused later.
            guard: Guard = request.app
            events = streamed(
                call.asks,
                shape,
                self._counted,
                refused=lambda refusal: guard.count_refusal(refusal, request.scope),
            )
            # An invalid request gets an error status, and not a broken stream: so the answer has
            # begun before the response does. A client that leaves meanwhile ends it.
            first = await while_connected(request.receive, _first(events))
            return self._stream(first, events, call, shape)
        events = streamed(call.asks, shape, self._counted)
        await while_connected(request.receive, _drain(events))
        if shape.error is not None:
            raise shape.error
        # Log-probabilities of thousands of tokens take a second to write.
        answer = await asyncio.to_thread(lambda: msgspec.json.encode(shape.snapshot()))
        all_verified = all(ended.verified for ended in shape.ends.values())
        headers = {
            "X-Moa-Link": self._link,
            "X-Moa-Verified": "true" if all_verified else "false",
        }
        return Json(answer, headers=headers)

    # ---- streams

    def _stream(
        self,
        first: Any,
        events: AsyncGenerator[Any, None],
        call: ParsedRequest,
        shape: Shape | ResponseShape,
    ) -> Response:
        """The response that sends these events of an answer as they come; the `first` one was taken
        from them already. The events of a resumable stream are recorded, so that a client which has
        lost its connection can read on."""
        headers = {"X-Request-Id": shape.id, "X-Moa-Link": self._link}
        if not call.resumable:
            return EventStream(events, headers, first=first, left=self.metrics.hang_ups.inc)
        recording = self._kept.open(shape.id, call.asks[0].principal)
        # Only a client that can take text back may be told later that a part of it was wrong.
        if len(call.asks) == 1 and call.asks[0].mode == "provisional":
            self._rechecks.add(recording, call.asks[0], shape)
        self._kept.record(recording, first, events)
        return EventStream(recording.listen(0), headers, numbered=True)

    async def _follow(self, request: Request, principal: str) -> Response:
        """Send a recorded stream again, from behind the last frame that the client has."""
        id = request.path_params["id"]
        recording = self._kept.get(id, principal)
        # Browsers send the header when they connect again; other programs may use the parameter.
        last_event_id = request.headers.get("last-event-id")
        if not last_event_id:
            last_event_id = request.query_params.get("after", "0")
        frames_received = position(last_event_id, id)
        return EventStream(recording.listen(frames_received), {"X-Request-Id": id}, numbered=True)

    async def _stop(self, request: Request, principal: str) -> Response:
        self._kept.drop(self._kept.get(request.path_params["id"], principal))
        return Response(status_code=204)

    # ---- parts

    async def _keep_trimmed(self) -> None:
        """Give memory back to the system after large requests."""
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            if self._had_large_request:
                # Answers that run will leave more behind: then once more.
                self._had_large_request = self._counted.running > 0
                await asyncio.to_thread(give_back_free_memory)

    @property
    def _link(self) -> str:
        """The state of the link to the verifier."""
        return str(self.answerer.status()["link"])

    async def _body(self, request: Request, principal: str) -> bytes:
        """Read the body of a request, which is bounded in size; a principal (the owner of a key)
        may have only so many bodies on their way at once."""
        if self._reading[principal] >= self.limits.max_bodies:
            raise ApiError(
                429,
                f"{self.limits.max_bodies} requests are being received, as many as may be at once"
                " (max_bodies): send the next one when one of them has been",
                code="busy",
                limit="max_bodies",
                retry_after=1.0,
            )
        with one_more(self._reading, principal):
            body = await read_body(request, self.limits.max_body_bytes)
        if len(body) > _LARGE_BODY:
            self._had_large_request = True
        return body

    def _check_model(self, model: str | None) -> None:
        """Raise an `ApiError` for a request that names another model than ours. None is no name."""
        if model is None:
            return
        ours = self.answerer.model
        aliases = [*self.also_called, *self.more_names()]
        if model == ours or model in aliases or "*" in aliases:
            return
        there_is = f"there is {ours!r}"
        others = [repr(name) for name in dict.fromkeys(aliases) if name != ours]
        if others:
            there_is += f", also called {', '.join(others)}"
        raise ApiError(
            404,
            f"the model {model[:100]!r} does not exist here; {there_is}",
            param="model",
            code="model_not_found",
        )

    def keyed(self, endpoint: Callable[[Request, str], Any]) -> Callable[[Request], Any]:
        """Wrap a route's function so that it is called with the caller's name. Callers without a
        valid key are refused; others wait for their fair turn, and are charged for the processor
        time that the function takes."""

        async def checked(request: Request) -> Response:
            keys = request.headers.getlist("authorization")
            principal = self.access.principal(keys, _peer(request))
            request.scope[PRINCIPAL] = principal
            try:
                async with self._fairness.turn(principal):
                    response: Response = await charged(endpoint(request, principal))
            except ClientDisconnect:
                self.metrics.hang_ups.inc()
                return Response(status_code=499)  # the client has left
            return response

        return checked


def _peer(request: Request) -> str:
    """The other end's address, for the log."""
    return f"{request.client.host}:{request.client.port}" if request.client else ""


def _asked_by(peer: str, call: AnyCall) -> AnyCall:
    """A request whose answers know the address of who asks for them."""
    asks = tuple(msgspec.structs.replace(ask, peer=peer) for ask in call.asks)
    return msgspec.structs.replace(call, asks=asks)


async def _first(events: AsyncGenerator[Any, None]) -> Any:
    """The next event: `anext` as a coroutine, of which a task can be made."""
    return await anext(events)


async def _drain(events: AsyncGenerator[Any, None]) -> None:
    """Take all events, for a client that gets the whole answer at once."""
    async with contextlib.aclosing(events):
        async for _ in events:
            pass
