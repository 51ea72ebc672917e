"""A scripted answerer, and the endpoint over it, on loopback or in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import httpx2 as httpx

from moa.api.access import Access, ApiKeys
from moa.api.answer import AnswerEvent, AnswerRequest, Began, Counts, Encoded, Ended, Piece, Reason
from moa.api.app import Api
from moa.api.connections import serving
from moa.api.guard import Guard
from moa.process.listening import Port
from moa.process.memory import leave_out_what_is_loaded

MODEL = "scripted"
PATIENCE = 120.0

Script = Callable[[AnswerRequest], Iterable[AnswerEvent | asyncio.Event]]


class Letters:
    """Each character is a token; 1 begins a text."""

    template = ""

    def chat(self, messages: Any, template: Any) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str) -> list[int]:
        return [1, *self.plain(text)]

    def plain(self, text: str) -> list[int]:
        return [ord(one) for one in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Scripted:
    """Plays a script for each ask; an `asyncio.Event` in it is waited for."""

    model = MODEL

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asks: list[AnswerRequest] = []
        self.waits = asyncio.Event()
        """Set when a script waits."""
        self.closed = asyncio.Event()
        """Set when an answer's generator has ended, by whatever way."""
        self.compiles = asyncio.Event()
        """Set when a grammar is compiled."""
        self.compiled = asyncio.Event()
        """What it waits for."""

    tokenizer = Letters()
    context = 64
    vocabulary = 128

    def status(self) -> dict[str, Any]:
        return {"link": "online"}

    def not_ready(self) -> str:
        return ""

    async def encode(self, ask: AnswerRequest) -> Encoded:
        return Encoded([1, 2, 3])

    async def admit(self, ask: AnswerRequest, encoded: Encoded) -> None:
        if ask.grammar is not None:
            self.compiles.set()
            await self.compiled.wait()

    async def answer(
        self, ask: AnswerRequest, encoded: Encoded
    ) -> AsyncGenerator[AnswerEvent, None]:
        self.asks.append(ask)
        try:
            for step in self._script(ask):
                if isinstance(step, asyncio.Event):
                    self.waits.set()
                    await step.wait()
                else:
                    yield step
        finally:
            self.closed.set()


def says(*pieces: str, reason: Reason = "eos", verified: bool = True) -> list[AnswerEvent]:
    """An answer of these pieces."""
    return [
        Began(),
        *(Piece(piece, verified) for piece in pieces),
        ended("".join(pieces), reason=reason, verified=verified, tokens=len(pieces)),
    ]


def ended(text: str, *, reason: Reason = "eos", verified: bool = True, tokens: int = 1) -> Ended:
    return Ended(
        reason=reason,
        verified=verified,
        text=text,
        counts=Counts(prompt_tokens=3, tokens=tokens, calls=2),
    )


@contextlib.asynccontextmanager
async def endpoint(
    script: Script | Sequence[AnswerEvent], *, keys: Sequence[str] = (), **settings: Any
) -> AsyncIterator[tuple[Scripted, Api, Guard]]:
    """The application."""
    answerer = Scripted(script if callable(script) else lambda ask: script)
    async with Api(answerer, Access(ApiKeys(keys)), **settings).running() as api:
        yield answerer, api, api.app()


@contextlib.asynccontextmanager
async def served(
    script: Script | Sequence[AnswerEvent], **settings: Any
) -> AsyncIterator[tuple[Scripted, str]]:
    """The endpoint on a port of loopback."""
    async with (
        endpoint(script, **settings) as (answerer, _, app),
        serving(app, Port("127.0.0.1", 0)) as address,
    ):
        yield answerer, address


@contextlib.asynccontextmanager
async def browser(address: str, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client."""
    async with httpx.AsyncClient(
        base_url=address, headers=headers, timeout=PATIENCE, trust_env=False
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def talk(
    script: Script | Sequence[AnswerEvent], **settings: Any
) -> AsyncIterator[tuple[Scripted, httpx.AsyncClient]]:
    """The endpoint on loopback, and a plain HTTP client of it."""
    async with served(script, **settings) as (answerer, address), browser(address) as client:
        yield answerer, client


async def post_from_a_thread(address: str, path: str, **request: Any) -> httpx.Response:
    """A request of a client in a thread of its own, so that the event loop has only the server's
    work."""
    return await asyncio.to_thread(
        httpx.post, address + path, timeout=PATIENCE, trust_env=False, **request
    )


class Heartbeat:
    """`longest`: seconds of processor time that the loop's thread spent between two beats; `limit`:
    what it may spend, 0.2 s where a million steps of a generator take 25 ms."""

    longest = 0.0
    limit = 0.0


@contextlib.asynccontextmanager
async def heartbeat() -> AsyncIterator[Heartbeat]:
    """How long the event loop is kept from other work while the body runs. Processor time of this
    thread, so that other load does not count."""
    leave_out_what_is_loaded()  # as the programs do
    beat = Heartbeat()

    async def run() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now = time.thread_time()
            beat.longest = max(beat.longest, now - last)
            last = now

    task = asyncio.create_task(run())
    try:
        await asyncio.sleep(0.01)
        yield beat
    finally:
        task.cancel()
        began = time.thread_time()
        sum(number for number in range(1_000_000))
        beat.limit = 8 * (time.thread_time() - began)


async def check_that_the_loop_turns(address: str, request: tuple[str, bytes]) -> None:
    """While a request of a megabyte is answered, twice at once, the event loop is not held up."""
    path, body = request
    asked = {"content": body, "headers": {"Content-Type": "application/json"}}
    async with heartbeat() as beat:
        replies = await asyncio.gather(
            *(post_from_a_thread(address, path, **asked) for _ in range(2))
        )
    assert {reply.status_code for reply in replies} <= {200, 400}, replies[0].text[:300]
    assert beat.longest < beat.limit


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}
