"""A service that ends its streams early is asked a few times, not once a token: each request is
paid for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.contract import UpstreamError
from cloud_verifier.upstream.early_ends import FRESH, MOST, ROOM, EarlyEnds
from cloud_verifier.upstream.lines import choices
from edge_client import Conversation, Done, EdgeClient, Link
from edge_client.events import Retract, Token
from tests.verifier.upstream.scripted import Request, running

TEXT = (
    "The fox lives near a quiet garden. Ada meets it there each day, and both are content. In the"
    " evening they walk home along the river, and talk of all that they have seen and heard."
)
APIS: Sequence[Literal["completions", "chat", "chat-whole"]] = ("completions", "chat", "chat-whole")
pytestmark = pytest.mark.usefixtures("short_pauses")


@dataclass
class Service:
    """Writes `TEXT`, in streams of some words each, from where the request is."""

    words: int = 0
    """Of a stream at most; 0: a third of the tokens that it is asked for, as if its own were short."""
    last: tuple[str, ...] = ()
    """What ends a stream that is not the text's end: `[DONE]`, or a `finish_reason`."""
    says_the_end: bool = True
    """Whether the text's end has a `finish_reason`."""
    usage: int = 0
    """Tokens that it says it has written; 0: it does not say."""
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """One answer."""
        body = request.body
        self.asked.append(body)
        rest = TEXT[self._begun(body) :]
        words = rest.split(" ")
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )
        most = self.words or body["max_tokens"] // 3
        for number, word in enumerate(words[:most]):
            writer.write(self._chunk(body, word if number == 0 else f" {word}"))
        is_whole = len(words) <= most
        last = self.last
        if is_whole and self.says_the_end:
            last = ("stop", "[DONE]")
        for one in last:
            if self.usage and one == "[DONE]":
                usage = {"prompt_tokens": 9, "completion_tokens": self.usage}
                writer.write(_event({"choices": [], "usage": usage}))
            writer.write(
                b"data: [DONE]\n\n" if one == "[DONE]" else self._chunk(body, "", reason=one)
            )
        await writer.drain()

    def _begun(self, body: dict[str, Any]) -> int:
        """Characters of the text that are in the request."""
        if "prompt" in body:
            there = body["prompt"]
        elif body["messages"][-1]["role"] == "assistant":
            there = body["messages"][-1]["content"]
        else:
            return 0
        return max(length for length in range(len(TEXT) + 1) if there.endswith(TEXT[:length]))

    @staticmethod
    def _chunk(body: dict[str, Any], text: str, reason: str | None = None) -> bytes:
        told = {"text": text} if "prompt" in body else {"delta": {"content": text} if text else {}}
        return _event({"choices": [{"index": 0, "finish_reason": reason, **told}]})


def _event(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


@contextlib.asynccontextmanager
async def device(
    service: Service, api: str, tokens: int = 200
) -> AsyncIterator[tuple[EdgeClient, UpstreamVerifier]]:
    async with running(service) as upstream:
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api=api)
        verifier = UpstreamVerifier(settings, upstreams_of(settings))
        async with (
            verifier.open() as front,
            EdgeClient(
                verifier=front.transport.url,
                offline_after=30.0,
                settle_seconds=60.0,
                max_new_tokens=tokens,
            ) as client,
        ):
            await client.wait_online(60)
            yield client, verifier


async def answer(client: EdgeClient | Conversation) -> tuple[str, Done, list[Link]]:
    """The verified text of an answer, its end, and what was said of the link."""
    told: list[tuple[str, str]] = []
    links: list[Link] = []
    async for event in client.generate("Tell me of Ada."):
        match event:
            case Token(text=text, status=status):
                told.append((text, status))
            case Retract(start=start, stop=stop):
                del told[len(told) - (stop - start) :]
            case Link():
                links.append(event)
            case Done():
                verified = "".join(text for text, status in told if status == "verified")
                return verified, event, links
    raise AssertionError("no end")


def requests(verifier: UpstreamVerifier, outcome: str) -> float:
    url = verifier.upstreams.addresses[0]
    labels = {"upstream": url, "outcome": outcome}
    return verifier.metrics.registry.get_sample_value("moa_upstream_requests_total", labels) or 0.0


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ((), "not said why|without saying why"),
        (("content_filter", "[DONE]"), "such as a filter"),
        (("length", "[DONE]"), "long enough"),
    ],
)
@pytest.mark.parametrize("api", APIS)
async def test_a_service_that_ends_every_stream_early_costs_a_handful_of_requests(
    api: str, last: tuple[str, ...], why: str
) -> None:
    """There were 38 for an answer of 40 tokens."""
    service = Service(words=2, last=last, says_the_end=False)
    async with device(service, api, tokens=40) as (client, verifier):
        verified, done, links = await answer(client)
        failed = requests(verifier, "failed")
    assert 1 < len(service.asked) <= MOST + 1
    assert verified.startswith("The")
    assert TEXT.startswith(verified), "what came is kept"
    assert not done.verified
    assert links[-1].state == "refused"
    assert links[-1].for_now, "it may answer the next question"
    assert "the upstream has ended this answer early 5 times in a row" in links[-1].detail
    assert links[-1].detail.count("the upstream") == 1
    assert re.search(why, links[-1].detail)
    if not last:
        assert failed == len(service.asked)


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_that_is_done_is_whole_though_it_does_not_say_why(api: str) -> None:
    """As OpenAI's own client takes it: many proxies leave the reason out."""
    service = Service(words=99, last=("[DONE]",), says_the_end=False)
    async with device(service, api) as (client, verifier):
        verified, done, _ = await answer(client)
        assert requests(verifier, "answered") == 1
    assert len(service.asked) == 1
    assert verified == done.text == TEXT
    assert done.verified
    assert done.reason == "eos"


async def test_a_stream_that_is_done_and_full_was_cut_at_its_length() -> None:
    service = Service(words=9, last=("[DONE]",), usage=200)
    async with device(service, "completions") as (client, _):
        verified, done, _ = await answer(client)
    assert done.verified
    assert verified == TEXT


@pytest.mark.parametrize("api", APIS[:2])
async def test_a_stream_without_a_reason_is_a_cut_at_a_service_that_tells_reasons(api: str) -> None:
    """A proxy may end a stream as if it were whole when the engine behind it has died."""
    service = Service(words=99)
    async with device(service, api) as (client, _):
        _, plain, _ = await answer(client)
        service.words = 12
        service.last = ("[DONE]",)
        verified, done, _ = await answer(client)
    assert len(service.asked) > 2
    assert done.verified
    assert verified == plain.text == TEXT


@pytest.mark.parametrize("api", APIS[:2])
async def test_cuts_that_bring_a_long_answer_on_are_all_mended(api: str) -> None:
    service = Service(words=12)
    async with device(service, api) as (client, verifier):
        verified, done, _ = await answer(client)
        failed = requests(verifier, "failed")
    assert len(service.asked) > 2
    assert failed == len(service.asked) - 1
    assert done.verified
    assert verified == TEXT


async def test_early_ends_of_one_answer_are_not_counted_against_the_next_one() -> None:
    service = Service(words=-(-len(TEXT.split()) // MOST))
    async with device(service, "completions") as (client, _), client.conversation() as conversation:
        for _ in range(3):
            service.asked.clear()
            verified, done, _ = await answer(conversation)
            assert len(service.asked) == MOST + 1, "each end but the last is mended"
            assert done.verified
            assert verified == TEXT


async def test_an_error_before_the_last_mark_is_no_end() -> None:
    """As vLLM tells it: the answer that stops there is not whole."""

    async def lines() -> AsyncIterator[str]:
        yield 'data: {"choices": [{"text": "The fox"}]}'
        yield 'data: {"object": "error", "message": "the engine is dead"}'
        yield "data: [DONE]"

    told = choices(lines())
    assert (await anext(told))["text"] == "The fox"
    with pytest.raises(UpstreamError, match="the engine is dead"):
        await anext(told)


def test_early_ends_are_counted_until_the_answer_has_grown() -> None:
    early = EarlyEnds()
    assert [early.add(1 + tokens) for tokens in range(MOST + 2)] == [0] * MOST + [5, 6]
    early = EarlyEnds()
    assert [early.add(FRESH // MOST * part) for part in range(1, 40)] == [0] * 39
    early = EarlyEnds()
    assert [early.add(7) for _ in range(MOST)] == [0] * MOST
    assert early.add(FRESH - 1) == MOST + 1
    assert early.add(FRESH) == 0


async def test_little_room_is_not_filled_in_ever_smaller_parts() -> None:
    service = Service(last=("length", "[DONE]"))
    async with device(service, "completions", tokens=40) as (client, _):
        verified, done, _ = await answer(client)
    assert [body["max_tokens"] for body in service.asked] == [40, ROOM]
    assert done.verified
    assert done.reason == "length"
    assert TEXT.startswith(verified)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.3])
def test_an_upstream_of_shorter_tokens_comes_to_the_answers_end(share: float) -> None:
    """Asked for n of the device's tokens it writes n of its own, which are fewer of the device's."""
    for wanted in (10, 40, 100, 300, 2000):
        early = EarlyEnds()
        tokens = 0
        while tokens < wanted:
            most = wanted - tokens
            if early.short:
                most = max(most, ROOM)
            tokens += max(1, int(share * most))
            early.short = True
            assert tokens >= wanted or not early.add(tokens)
