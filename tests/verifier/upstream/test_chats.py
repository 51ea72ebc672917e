"""Services that take chats alone: cut in mid-answer, each goes on, begins anew, or is told to go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.contract import UpstreamError
from cloud_verifier.upstream.lines import choices
from edge_client import Done, EdgeClient, Token
from edge_client.events import Notice, Retract
from moa.wire import Limits
from tests.verifier.upstream.scripted import Request, Upstream, running, whole
from tests.verifier.upstream.test_telling import QUESTION, served

ANSWER = "The fox lives near a quiet garden. Ada meets it there each day, and both are content."
OTHER = "A fox is an animal. It lives in a den, and comes out at night to hunt for mice."


@dataclass
class Service:
    """A chat service that writes `ANSWER` a word at a time, and breaks off where it is told to."""

    answer: str = ANSWER
    continues: bool = False
    """Whether it goes on behind a last message of the assistant's."""
    drifts: bool = False
    """Whether its second answer from the beginning is another one."""
    refuses: dict[str, str] = field(default_factory=dict)
    """Fields that it does not take, and what it says then."""
    prefill: bool = True
    """Whether it takes a last message of the assistant's at all."""
    cuts: list[int] = field(default_factory=list)
    """Words after which the next answers break off."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    began: int = 0

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """One answer."""
        body = request.body
        self.asked.append(body)
        for name, said in self.refuses.items():
            if name in body:
                await whole({"error": {"message": said}}, "400 Bad Request")(request, writer)
                return
        last = body["messages"][-1]
        if last["role"] == "assistant" and not self.prefill:
            refusal = {"error": {"message": "the last message must be a user's"}}
            await whole(refusal, "400 Bad Request")(request, writer)
            return
        text = self._text(body["messages"])
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )
        most = self.cuts.pop(0) if self.cuts else len(text)
        for count, word in enumerate(text.split(" ")):
            if count == most:
                await writer.drain()
                writer.transport.abort()
                return
            writer.write(self.chunk(word if count == 0 else f" {word}", None))
            await writer.drain()
        writer.write(self.chunk("", "stop"))
        await writer.drain()

    def _text(self, messages: list[dict[str, str]]) -> str:
        last = messages[-1]
        if last["role"] == "assistant" and self.continues:
            assert self.answer.startswith(last["content"])
            return self.answer[len(last["content"]) :]
        if "was cut off" in last["content"]:  # it is told to go on
            return self.answer[len(messages[-2]["content"]) :].strip()
        self.began += 1
        return OTHER if self.drifts and self.began > 1 else self.answer

    def chunk(self, text: str, reason: str | None) -> bytes:
        """As OpenAI's."""
        delta = {"content": text} if text else {}
        event = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        return f"data: {json.dumps(event)}\n\n".encode()


class Messages(Service):
    """Anthropic's form of it."""

    def chunk(self, text: str, reason: str | None) -> bytes:
        """Its events."""
        if reason is not None:
            event: dict[str, Any] = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
        else:
            delta = {"type": "text_delta", "text": text}
            event = {"type": "content_block_delta", "index": 0, "delta": delta}
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


@contextlib.asynccontextmanager
async def device(upstream: Upstream, api: str, **more: Any) -> AsyncIterator[EdgeClient]:
    """A device, with a verifier in front of the service."""
    settings = Settings(port=0, upstream=(upstream.url,), upstream_api=api)
    async with (
        UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier,
        EdgeClient(verifier=verifier.transport.url, settle_seconds=60, **more) as client,
    ):
        await client.wait_online(60)
        yield client


async def answer(client: EdgeClient, prompt: Any = "Tell me of Ada.", **how: Any) -> Done:
    """The end of an answer whose events were followed."""
    shown: list[str] = []
    async for event in client.generate(prompt, **how):
        match event:
            case Token(text=text):
                shown.append(text)
            case Retract(start=start, stop=stop):
                del shown[len(shown) - (stop - start) :]
            case Done():
                assert "".join(shown) == event.text
                return event
    raise AssertionError("no end")


@pytest.mark.parametrize("api", ["chat", "chat-vllm", "chat-prefix"])
@pytest.mark.parametrize("at", [1, 4, 9])
async def test_an_answer_goes_on_behind_what_is_verified(api: str, at: int) -> None:
    service = Service(continues=True, cuts=[at, 3])
    async with running(service) as upstream, device(upstream, api) as client:
        done = await answer(client)
    assert done.verified
    assert done.text == ANSWER
    last = service.asked[-1]["messages"][-1]
    if last["role"] == "assistant":
        assert service.asked[-1].get("continue_final_message", False) == (api == "chat-vllm")
        assert ("prefix" in last) == (api == "chat-prefix")


@pytest.mark.parametrize("api", ["chat", "chat-whole", "anthropic"])
@pytest.mark.parametrize("at", [1, 4, 9])
async def test_a_service_that_begins_anew_says_its_answer_once(api: str, at: int) -> None:
    service = Messages(cuts=[at]) if api == "anthropic" else Service(cuts=[at])
    async with running(service) as upstream, device(upstream, api) as client:
        done = await answer(client)
    assert done.verified
    assert done.text == ANSWER


@pytest.mark.parametrize("api", ["chat-whole", "anthropic"])
async def test_another_answer_is_not_glued_to_the_first(api: str) -> None:
    service = (
        Messages(drifts=True, cuts=[9]) if api == "anthropic" else Service(drifts=True, cuts=[9])
    )
    async with running(service) as upstream, device(upstream, api) as client:
        done = await answer(client)
    assert done.verified
    assert done.text == ANSWER
    assert service.began == 2  # asked anew, and then told to go on
    assert "cut off" in service.asked[-1]["messages"][-1]["content"]


async def test_a_refused_last_message_is_not_sent_again() -> None:
    service = Service(prefill=False, cuts=[9])
    async with running(service) as upstream, device(upstream, "chat") as client:
        assert (await answer(client)).text == ANSWER
        service.cuts = [9]
        assert (await answer(client)).text == ANSWER
    roles = [body["messages"][-1]["role"] for body in service.asked]
    assert roles.count("assistant") == 1


async def test_fields_that_a_service_refuses_are_left_out() -> None:
    said = "Unsupported parameter: 'max_tokens' is not supported with this model."
    service = Service(refuses={"max_tokens": said, "seed": "seed: extra fields not permitted"})
    async with running(service) as upstream, device(upstream, "chat-whole") as client:
        for _ in range(2):
            done = await answer(client)
            assert done.verified
            assert done.text == ANSWER
    assert len(service.asked) == 4  # each field is refused once
    assert service.asked[-1]["max_completion_tokens"]
    assert "random_seed" in service.asked[-1]
    assert "seed" not in service.asked[-1]


async def test_a_conversation_is_told_whole() -> None:
    service = Service()
    async with running(service) as upstream, device(upstream, "chat") as client:
        conversation = client.conversation()
        for prompt in ("First?", "Second?"):
            async for event in conversation.generate(prompt):
                if isinstance(event, Done):
                    assert event.verified
    assert service.asked[-1]["messages"] == [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Second?"},
    ]


async def test_a_last_message_of_the_assistants_is_continued() -> None:
    service = Service(continues=True)
    begun = ANSWER[:33]
    chat = [{"role": "user", "content": "Ada?"}, {"role": "assistant", "content": begun}]
    async with running(service) as upstream, device(upstream, "chat") as client:
        done = await answer(client, chat)
    assert done.verified
    assert begun + done.text == ANSWER


async def test_a_prompt_that_is_no_chat_is_answered_by_the_device_alone() -> None:
    service = Service()
    async with running(service) as upstream, device(upstream, "chat", max_new_tokens=12) as client:
        said = []
        async for event in client.generate("Once upon a time", raw=True):
            if isinstance(event, Notice) or getattr(event, "detail", ""):
                said.append(str(event))
            if isinstance(event, Done):
                assert event.text
                assert not event.verified
    assert "chats only" in " ".join(said)
    assert not service.asked


@pytest.mark.parametrize("stream_it", [False, True])
async def test_a_program_that_asks_to_complete_a_text_is_refused_by_name(stream_it: bool) -> None:
    """It got the device's own text, by a small model, and no word of that where it looks."""
    service = Service()
    async with (
        running(service) as upstream,
        device(upstream, "chat") as client,
        served(client) as http,
    ):
        await client.wait_online(60)
        body = {"prompt": "Once upon a time", "max_tokens": 4}
        said = await http.post("/v1/completions", json=body | {"stream": stream_it})
        chat = (await http.post("/v1/chat/completions", json=QUESTION)).json()
    assert said.status_code == 400, said.text
    error = said.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "unsupported_parameter")
    assert "takes chats only" in error["message"]
    assert chat["choices"][0]["moa"]["verified"]
    assert len(service.asked) == 1


async def test_every_token_of_an_upstream_is_paid_for() -> None:
    """A word brings several of the device's tokens at once."""
    limits = Limits(max_tokens_per_second=1e-6, max_burst_tokens=10_000)
    async with running(Service()) as upstream:
        settings = Settings(
            port=0, upstream=(upstream.url,), upstream_api="chat-whole", limits=limits
        )
        async with (
            UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier,
            EdgeClient(verifier=verifier.transport.url) as client,
        ):
            await client.wait_online(60)
            done = await answer(client)
            assert done.verified
            (principal,) = verifier.service._principals.values()
            prompt = len(client.encode("Tell me of Ada."))
            left = principal.tokens.level(verifier.service.clock())
    tokens = done.stats["tokens"]
    assert tokens > len(ANSWER.split())
    assert round(10_000 - left) >= prompt + tokens


MARKS = [{"unverified": True}, {"reason": "eos", "all_verified": False}]


@pytest.mark.parametrize("marks", MARKS)
async def test_what_an_endpoint_of_ours_marks_as_unverified_is_not_taken_for_its_models(
    marks: dict[str, Any],
) -> None:
    async def lines(last: dict[str, Any]) -> AsyncIterator[str]:
        for moa in ({}, last):
            chunk = {"choices": [{"delta": {"content": "hi"}, "moa": moa}]}
            yield f"data: {json.dumps(chunk)}"

    taken = [choice async for choice in choices(lines({"reason": "eos", "all_verified": True}))]
    assert len(taken) == 2
    with pytest.raises(UpstreamError, match="without its verifier"):
        async for _ in choices(lines(marks)):
            pass
