"""The endpoint: routes over an answerer. It holds the state of resumable streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from moa.api import metrics as metrics_page
from moa.api import responses, shapes
from moa.api.access import Access
from moa.api.answer import Answerer, AnswerRequest
from moa.api.errors import ApiError
from moa.api.fairness import Counted, Fairness, charged
from moa.api.guard import Guard
from moa.api.http import EventStream, Json, event_frame, read_body, while_connected
from moa.api.metrics import ApiMetrics
from moa.api.replay import Recheck, Recording, Recordings, position
from moa.api.requests import Defaults, ParsedRequest, parse_chat, parse_completion
from moa.api.responses import ResponseShape, StoredMessages
from moa.api.stream import streamed, whole
from moa.errors import MoaError
from moa.process.memory import give_back_free_memory

log = logging.getLogger("moa.api")
_RECHECK_SECONDS = 0.5
_LARGE_BODY = 2**16
_TRIM_SECONDS = 10.0
"""After a large request memory is given back to the system, so often at most."""


@dataclass(frozen=True, kw_only=True)
class ApiLimits:
    """Bounds of one endpoint."""

    max_body_bytes: int = 2**20
    max_bodies: int = 64
    """Bodies of one principal that are being received at once."""
    max_running: int = 64
    """Answers at once; a request with `n` has `n` of them."""
    keep_seconds: float = 900.0
    """How long a complete stream or a stored response is kept."""
    alone_seconds: float = 60.0
    """How long a resumable stream continues without a client."""
    keep_bytes: int = 32 * 2**20
    """Memory for all streams and responses that are kept."""


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
    others: Callable[[str], bool] = lambda principal: False
    """Whether anybody but this principal is served now, through any port."""

    def __post_init__(self) -> None:
        self._counted = Counted(self.answerer, self.metrics, self.limits.max_running)
        self._kept = Recordings(
            time.monotonic, self.limits.keep_seconds, self.limits.alone_seconds, self.limits.keep_bytes
        )
        self._fairness = Fairness(self.others)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: Counter[str] = Counter()
        self._large = False
        """Whether there was a large request since memory was given back."""
        self._created = int(time.time())

    def app(self, more: Sequence[BaseRoute] = (), origins: Sequence[str] = ()) -> Guard:
        """The ASGI application; `more` routes come first."""
        keyed = self.keyed
        routes = [
            *more,
            Route("/health", self._health),
            Route("/metrics", keyed(self._metrics)),
            Route("/v1/models", keyed(self._models)),
            Route("/v1/models/{model:path}", keyed(self._model)),
            Route("/v1/chat/completions", keyed(self._chat), methods=["POST"]),
            Route("/v1/completions", keyed(self._completion), methods=["POST"]),
            Route("/v1/streams/{id}", keyed(self._follow)),
            Route("/v1/streams/{id}", keyed(self._stop), methods=["DELETE"]),
            Route("/v1/responses", keyed(self._respond), methods=["POST"]),
            Route("/v1/responses/{id}", keyed(self._response)),
            Route("/v1/responses/{id}", keyed(self._forget), methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", keyed(self._cancel), methods=["POST"]),
            Route("/moa/status", keyed(self._status)),
        ]
        return Guard(Router(routes), self.access, self.metrics, self._fairness, origins)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Api]:
        """Remove expired streams while the body runs; then end every stream."""
        helpers = [asyncio.create_task(each) for each in (self._sweep(), self._trim(), self._correct_all())]
        try:
            yield self
        finally:
            for task in (*helpers, *self._tasks):
                task.cancel()
            await asyncio.gather(*helpers, *self._tasks, return_exceptions=True)

    # ---- about the endpoint

    async def _health(self, request: Request) -> Response:
        wrong = self.answerer.not_ready()
        return Json({"status": wrong or "ok"}, 503 if wrong else 200)

    async def _metrics(self, request: Request, principal: str) -> Response:
        self.observe()
        self.metrics.kept_bytes.set(self._kept.size)
        return Response(self.metrics.page(), media_type=metrics_page.CONTENT_TYPE)

    async def _status(self, request: Request, principal: str) -> Response:
        return Json(self._counted.status())

    async def _models(self, request: Request, principal: str) -> Response:
        return Json(shapes.models(self.answerer.model, self._created))

    async def _model(self, request: Request, principal: str) -> Response:
        self._known(request.path_params["model"])
        return Json(shapes.model(self.answerer.model, self._created))

    # ---- chat and completions

    async def _chat(self, request: Request, principal: str) -> Response:
        body = await self._body(request, principal)
        return await self._answer(request, parse_chat(body, self.defaults, principal), principal)

    async def _completion(self, request: Request, principal: str) -> Response:
        body = await self._body(request, principal)
        return await self._answer(request, parse_completion(body, self.defaults, principal), principal)

    async def _answer(self, request: Request, call: ParsedRequest, principal: str) -> Response:
        self._known(call.model)
        tools = call.asks[0].question.tools
        form = self.answerer.tool_format if tools is not None and tools.choice != "none" else None
        usage_after = len(call.asks) if call.include_usage else 0
        shape = shapes.Shape(
            self.answerer.model, chat=call.chat, separate=call.separate, form=form, usage_after=usage_after
        )
        if not call.stream:
            answer = await while_connected(request.receive, whole(call, shape, self._counted))
            verified = all(choice["moa"]["verified"] for choice in answer["choices"])
            body = await asyncio.to_thread(msgspec.json.encode, answer)
            return Json(body, headers={"X-Moa-Link": self._link, "X-Moa-Verified": str(verified).lower()})
        events = await _opened(request, streamed(call.asks, shape, self._counted))
        recheck = Recheck(call.asks[0], shape) if _may_be_corrected(call.asks) else None
        return self._stream(events, shape.id, principal, recheck, resumable=call.resumable)

    # ---- streams

    def _stream(
        self, events: AsyncGenerator[Any, None], id: str, principal: str, recheck: Recheck | None, *, resumable: bool
    ) -> Response:
        headers = {"X-Request-Id": id, "X-Moa-Link": self._link}
        if not resumable:
            return EventStream(_frames(events), headers)
        recording = self._kept.open(id, principal, recheck=recheck)
        return EventStream(self._listen(self._record(_tape(_frames(events, id), recording), recording), 0), headers)

    def _record(self, frames: AsyncGenerator[bytes, None], recording: Recording) -> Recording:
        """Run the work behind these frames independently of the client's connection."""
        task = asyncio.create_task(charged(_drain(frames)))
        self._tasks.add(task)
        recording.cancel = task.cancel
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: recording.close(time.monotonic()))
        return recording

    async def _listen(self, recording: Recording, after: int) -> AsyncGenerator[bytes, None]:
        recording.listeners += 1
        try:
            while True:
                news = recording.news
                while after < len(recording.frames):
                    after += 1
                    yield recording.frames[after - 1]
                if recording.closed:
                    return
                await news.wait()
        finally:
            recording.listeners -= 1
            recording.touched = time.monotonic()

    async def _follow(self, request: Request, principal: str) -> Response:
        id = request.path_params["id"]
        recording = self._kept.get(id, principal)
        after = position(request.headers.get("last-event-id") or request.query_params.get("after", "0"), id)
        return EventStream(self._listen(recording, after), {"X-Request-Id": id})

    async def _stop(self, request: Request, principal: str) -> Response:
        self._kept.drop(self._kept.get(request.path_params["id"], principal))
        return Response(status_code=204)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.limits.alone_seconds))
            self._kept.sweep()

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            if self._large:
                self._large = self._counted.running > 0  # they will leave more behind
                await asyncio.to_thread(give_back_free_memory)

    async def _correct_all(self) -> None:
        """Whenever the verifier is there, check what the device has finished alone."""
        while True:
            await asyncio.sleep(_RECHECK_SECONDS)
            for recording in self._kept:
                if self._link == "online" and recording.closed and recording.recheck and recording.recheck.due:
                    await self._correct(recording, recording.recheck)

    async def _correct(self, recording: Recording, recheck: Recheck) -> None:
        """Append what the verifier says of an answer that the device has finished alone."""
        events = recheck.events(self._counted)
        try:
            first = await anext(events, None)
            if first is None:
                return
            recording.reopen()
            async for frame in _frames(_after(first, events), recording.id, len(recording.frames)):
                recording.add(frame)
        except Exception as error:
            recheck.failures += 1
            log.warning("an answer could not be checked", exc_info=None if isinstance(error, MoaError) else error)
        finally:
            recording.close(time.monotonic())

    @property
    def _link(self) -> str:
        return str(self.answerer.status()["link"])

    # ---- responses

    async def _respond(self, request: Request, principal: str) -> Response:
        asked = responses.parse(await self._body(request, principal))
        self._known(asked.model)
        before: StoredMessages = ()
        if asked.previous_response_id is not None:
            before = self._get(asked.previous_response_id, principal)[1].messages
        call = responses.understand(asked, before, self.defaults, principal)
        shape = ResponseShape(self.answerer.model, call, self.answerer.tool_format)
        if not (call.store or call.resumable):
            events = await _opened(request, streamed([call.ask], shape, self._counted))
            frames = _frames(events)
        else:
            recheck = Recheck(call.ask, shape) if _may_be_corrected([call.ask]) else None
            recording = self._kept.open(shape.id, principal, shape, recheck)
            try:
                events = await _opened(request, streamed([call.ask], shape, self._counted))
            except BaseException:
                self._kept.drop(recording)
                raise
            frames = _tape(_frames(events, shape.id), recording)
            if call.resumable:
                frames = self._listen(self._record(frames, recording), 0)
        if call.stream:
            return EventStream(frames, {"X-Request-Id": shape.id})
        if not call.background:
            await while_connected(request.receive, _drain(frames))
        if shape.error is not None:
            raise shape.error
        return Json(shape.snapshot())

    async def _response(self, request: Request, principal: str) -> Response:
        recording, shape = self._get(request.path_params["id"], principal)
        if request.query_params.get("stream") not in ("true", "1"):
            return Json(shape.snapshot())
        given = request.query_params.get("starting_after")  # sequence numbers begin at 0
        after = 0 if given is None else position(given, shape.id) + 1
        return EventStream(self._listen(recording, after), {"X-Request-Id": shape.id})

    async def _cancel(self, request: Request, principal: str) -> Response:
        recording, shape = self._get(request.path_params["id"], principal)
        recording.cancel()
        shape.close()
        return Json(shape.snapshot())

    async def _forget(self, request: Request, principal: str) -> Response:
        recording, shape = self._get(request.path_params["id"], principal)
        self._kept.drop(recording)
        return Json({"id": shape.id, "object": "response", "deleted": True})

    def _get(self, id: str, principal: str) -> tuple[Recording, ResponseShape]:
        recording = self._kept.get(id, principal)
        if recording.response is None:
            raise ApiError(404, f"no response {id[:80]!r}", code="response_not_found")
        return recording, recording.response

    # ---- parts

    async def _body(self, request: Request, principal: str) -> bytes:
        """The body of a request; a principal may have only so many bytes of them on their way."""
        most = self.limits.max_body_bytes
        if self._reading[principal] >= self.limits.max_bodies:
            raise ApiError(429, "too many requests are being received", code="busy", retry_after=1.0)
        self._reading[principal] += 1
        try:
            body = await read_body(request, most)
            self._large = self._large or len(body) > _LARGE_BODY
            return body
        finally:
            self._reading[principal] -= 1
            self._reading += Counter()  # removes entries at zero

    def _known(self, model: str | None) -> None:
        if model not in (None, self.answerer.model):
            raise ApiError(
                404,
                f"the model {str(model)[:100]!r} does not exist here; there is {self.answerer.model!r}",
                param="model",
                code="model_not_found",
            )

    def keyed(self, endpoint: Callable[[Request, str], Any]) -> Callable[[Request], Any]:
        """Wrap a route's function: pass the caller's name, and refuse callers without access."""

        async def checked(request: Request) -> Response:
            principal = self.access.principal(request.headers.getlist("authorization"))
            try:
                async with self._fairness.turn(principal):
                    response: Response = await charged(endpoint(request, principal))
            except ClientDisconnect:
                self.metrics.hang_ups.inc()
                return Response(status_code=499)  # the client has left
            return response

        return checked


async def _opened(request: Request, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The same events, after waiting for the first: so an invalid request gets an error status, not a broken stream.
    A client that leaves meanwhile ends them."""
    first = await while_connected(request.receive, _first(events))

    return _after(first, events)


def _may_be_corrected(asks: Sequence[AnswerRequest]) -> bool:
    return len(asks) == 1 and asks[0].mode == "provisional"


async def _after(first: Any, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event


async def _first(events: AsyncGenerator[Any, None]) -> Any:
    return await anext(events)


async def _frames(events: AsyncGenerator[Any, None], id: str = "", number: int = 0) -> AsyncGenerator[bytes, None]:
    """Events as frames of a stream, numbered after `number` if it is resumable. Other tasks run every 64 kB."""
    written = 0
    async with contextlib.aclosing(events):
        async for event in events:
            number += 1
            frame = event_frame(event, id=f"{id}/{number}" if id else "", event=event.get("type", ""))
            yield frame
            written += len(frame)
            if written >= 2**16:
                written = 0
                await asyncio.sleep(0)
    yield event_frame("[DONE]", id=f"{id}/{number + 1}" if id else "")


async def _tape(frames: AsyncGenerator[bytes, None], recording: Recording) -> AsyncGenerator[bytes, None]:
    """The same frames; each is also kept."""
    try:
        async with contextlib.aclosing(frames):
            async for frame in frames:
                recording.add(frame)
                yield frame
    finally:
        recording.close(time.monotonic())


async def _drain(frames: AsyncGenerator[bytes, None]) -> None:
    async with contextlib.aclosing(frames):
        async for _ in frames:
            pass
