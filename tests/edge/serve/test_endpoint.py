"""The device as an endpoint, with the embedded pair: modes, the switch of the link, and the client's own text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from edge_client import Done, EdgeClient, Notice
from edge_client.serve.app import endpoint
from edge_client.serve.settings import ServeSettings
from edge_client.text.template import ChatTemplate
from moa.process.listening import Port
from tests.api.large import LARGE, large_request
from tests.api.scripted import browser, check_that_the_loop_turns
from tests.api.test_app import data_of
from tests.edge.serve.pair import verifier

pytestmark = pytest.mark.asyncio(loop_scope="module")
Served = tuple[EdgeClient, openai.AsyncOpenAI]
PATIENCE = 300.0
MODEL = "demo"
QUESTION: list[Any] = [{"role": "user", "content": "What is 17 + 25 - 9?"}]


@contextlib.asynccontextmanager
async def serving(patience: float | None = None, **settings: Any) -> AsyncIterator[Served]:
    """The endpoint over a client with these settings, and the `openai` package's client of it."""
    async with (
        EdgeClient(**{"max_new_tokens": 60, "reconnect_seconds": 0.2, **settings}) as client,
        endpoint(client, ServeSettings(patience=patience), MODEL, Port("127.0.0.1", 0)) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as api,
    ):
        yield client, api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def linked() -> AsyncIterator[Served]:
    """A device with a verifier. A test that cuts the link restores it."""
    async with verifier() as address, serving(verifier=address) as (client, api):
        await client.wait_online(PATIENCE)
        yield client, api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone() -> AsyncIterator[Served]:
    """A device without a verifier."""
    async with serving(offline=True, settle_seconds=0) as both:
        yield both


async def switch(api: openai.AsyncOpenAI, *, connected: bool) -> None:
    """The page's switch."""
    async with browser(str(api.base_url).removesuffix("/v1/")) as client:
        assert (await client.post("/moa/link", json={"connected": connected})).status_code == 200


async def text_of(stream: Any) -> str:
    """The final text of a client that applies retractions."""
    text = ""
    async for chunk in stream:
        for choice in chunk.choices:
            marks = (choice.model_extra or {}).get("moa") or {}
            text = text[: marks.get("cut")] + (choice.delta.content or "")
    return text


async def test_the_text_is_that_of_the_client_in_every_mode(linked: Served) -> None:
    client, api = linked
    done = [event async for event in client.generate(QUESTION)][-1]
    assert isinstance(done, Done)
    assert done.verified
    for mode in ("hold", "provisional", "keep"):
        stream = await api.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, extra_body={"moa": {"mode": mode}}
        )
        assert await text_of(stream) == done.text
    whole = await api.chat.completions.create(model=MODEL, messages=QUESTION)
    assert whole.choices[0].message.content == done.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == done.stats["tokens"]


async def test_the_first_question_waits_for_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(offline=True, settle_seconds=0) as (_, api):
        monkeypatch.setattr(ChatTemplate, "_start", None)
        answer = await api.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
    assert answer.choices[0].message.content


async def test_hold_waits_for_the_link_and_provisional_text_is_corrected(linked: Served) -> None:
    _, api = linked
    truth = (await api.chat.completions.create(model=MODEL, messages=QUESTION)).choices[0].message.content
    await switch(api, connected=False)
    body = {"moa": {"mode": "provisional"}}
    stream = await api.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, extra_body=body)
    marks = []
    async for chunk in stream:
        marks += [(choice.model_extra or {}).get("moa", {}).get("verified") for choice in chunk.choices]
        if 0 in marks:  # there is text, and none of it is verified
            break
    await stream.close()
    held = asyncio.create_task(api.chat.completions.create(model=MODEL, messages=QUESTION))
    await switch(api, connected=True)
    assert (await held).choices[0].message.content == truth


async def test_hold_waits_also_where_the_device_may_write_no_further(linked: Served) -> None:
    client, api = linked
    how: Any = {"model": MODEL, "messages": QUESTION}
    truth = (await api.chat.completions.create(**how)).choices[0].message.content
    before = client.settings
    client.settings = dataclasses.replace(before, max_offline_tokens=2, offline_after=0.0)
    await switch(api, connected=False)
    how |= {"extra_body": {"moa": {"mode": "hold", "patience": 0.1}}}
    with pytest.raises(openai.InternalServerError) as refused:
        await api.chat.completions.create(**how)
    assert (refused.value.status_code, refused.value.code) == (503, "not_verified")
    stream = await api.chat.completions.create(**how, stream=True)
    with pytest.raises(openai.APIError) as broken:
        await text_of(stream)
    assert broken.value.code == "not_verified"
    body = {"moa": {"mode": "hold"}}
    held = asyncio.create_task(api.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=body))
    await switch(api, connected=True)
    assert (await held).choices[0].message.content == truth
    client.settings = before


async def test_every_verified_token_has_its_log_probability_however_it_came(linked: Served) -> None:
    _, api = linked
    how: Any = {"model": MODEL, "messages": QUESTION, "logprobs": True, "top_logprobs": 3}
    truth = (await api.chat.completions.create(**how)).choices[0]
    assert "".join(one.token for one in truth.logprobs.content) == truth.message.content
    for mode in ("provisional", "hold"):
        await switch(api, connected=False)
        stream = await api.chat.completions.create(**how, stream=True, extra_body={"moa": {"mode": mode}})
        told: list[Any] = []
        async for chunk in stream:
            for choice in chunk.choices:
                told += choice.logprobs.content if choice.logprobs is not None else []
            if not told:  # the first chunk is there, and nothing can be verified yet
                await switch(api, connected=True)
        assert [one.token for one in told] == [one.token for one in truth.logprobs.content]
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in truth.logprobs.content], abs=1e-3)


async def test_without_a_verifier_hold_says_so_and_provisional_answers(alone: Served) -> None:
    _, api = alone
    with pytest.raises(openai.InternalServerError) as refused:
        await api.chat.completions.create(
            model=MODEL, messages=QUESTION, extra_body={"moa": {"mode": "hold", "patience": 0}}
        )
    assert refused.value.status_code == 503
    body = {"moa": {"mode": "provisional", "patience": 0}}
    answer = await api.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=body)
    assert answer.choices[0].message.content
    assert (answer.choices[0].model_extra or {})["moa"]["verified"] is False


async def test_the_page_and_its_switch(alone: Served) -> None:
    _, api = alone
    async with browser(str(api.base_url).removesuffix("/v1/")) as client:
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert (await client.get("/moa/status")).json()["link"] == "none"
        assert (await client.post("/moa/link", json={"connected": False})).status_code == 400
        assert (await client.get("/", headers={"If-None-Match": page.headers["etag"]})).status_code == 304


@pytest.mark.parametrize("name", LARGE)
async def test_no_request_keeps_others_from_the_event_loop(alone: Served, name: str) -> None:
    _, api = alone
    await check_that_the_loop_turns(str(api.base_url).removesuffix("/v1/"), large_request(MODEL, name))


async def test_by_default_an_answer_goes_on_without_the_verifier_and_says_so(linked: Served) -> None:
    _, api = linked
    how: Any = {"messages": QUESTION, "model": MODEL}
    reply = await api.chat.completions.with_raw_response.create(**how)
    assert (reply.headers["x-moa-link"], reply.headers["x-moa-verified"]) == ("online", "true")
    await switch(api, connected=False)
    began = time.monotonic()
    reply = await api.chat.completions.with_raw_response.create(**how)
    assert (reply.headers["x-moa-link"], reply.headers["x-moa-verified"]) == ("offline", "false")
    assert reply.parse().choices[0].message.content
    assert time.monotonic() - began < 15, "5 on a machine with nothing else to do"
    marks = []
    async for chunk in await api.chat.completions.create(**how, stream=True):
        assert len(chunk.choices) == 1, "some clients trip over chunks without choices"
        marks.append((chunk.choices[0].model_extra or {}).get("moa"))
    assert marks[1] == {"unverified": True}
    assert marks[-1]["all_verified"] is False
    await switch(api, connected=True)


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
async def test_what_was_written_offline_is_corrected_for_a_client_that_comes_again(linked: Served, route: str) -> None:
    client, api = linked
    await client.wait_online(PATIENCE)
    truth = (await api.chat.completions.create(model=MODEL, messages=QUESTION)).choices[0].message.content
    await switch(api, connected=False)
    ours = {"moa": {"mode": "provisional", "patience": 0, "resumable": True}, "model": MODEL, "stream": True}
    asked: Any = {"messages": QUESTION} if route.startswith("chat") else {"input": QUESTION}
    async with browser(str(api.base_url).removesuffix("/v1/")) as plain:
        first = await plain.post(f"/v1/{route}", json=asked | ours)
        id = first.headers["x-request-id"]
        assert first.text.rstrip().endswith("[DONE]")
        await switch(api, connected=True)
        async with asyncio.timeout(PATIENCE):
            while (
                "[DONE]"
                not in (
                    again := await plain.get(f"/v1/streams/{id}", headers={"Last-Event-ID": last_id(first.text)})
                ).text
            ):
                await asyncio.sleep(0.05)
        whole = (await plain.get(f"/v1/streams/{id}")).text
        assert whole.count("[DONE]") == 1
        assert whole.endswith(again.text)
        if route == "responses":
            kept = (await plain.get(f"/v1/responses/{id}")).json()
            assert kept["output"][0]["content"][0]["text"] == truth
            return
    text, verified = "", False
    for chunk in data_of(whole)[:-1]:
        for choice in chunk["choices"]:
            text = text[: choice.get("moa", {}).get("cut")] + choice["delta"].get("content", "")
            verified = choice.get("moa", {}).get("all_verified", False)
    assert (text, verified) == (truth, True)


def last_id(stream: str) -> str:
    """The last event's id."""
    return [line.removeprefix("id: ") for line in stream.splitlines() if line.startswith("id: ")][-1]


async def test_an_answer_that_the_client_has_begun_goes_on(linked: Served) -> None:
    client, api = linked
    await client.wait_online(PATIENCE)
    truth = (await api.chat.completions.create(model=MODEL, messages=QUESTION)).choices[0].message.content
    begun: Any = [*QUESTION, {"role": "assistant", "content": truth[:8]}]
    answer = await api.chat.completions.create(model=MODEL, messages=begun)
    assert answer.choices[0].message.content == truth[8:]


async def test_the_model_may_be_left_out_and_the_end_ignored(alone: Served) -> None:
    _, api = alone
    async with browser(str(api.base_url)) as plain:
        for ignored in (False, True):
            body = {"messages": QUESTION, "max_tokens": 60, "ignore_eos": ignored}
            choice = (await plain.post("chat/completions", json=body)).json()["choices"][0]
            assert (choice["finish_reason"] == "length") == ignored


async def test_a_long_chat_goes_on_without_its_oldest_turns(alone: Served) -> None:
    """As in the terminal, in every route, and no client is left to wonder why."""
    client, api = alone
    turn: list[Any] = [
        {"role": "user", "content": "Count: " + "apple, pen, " * 60},
        {"role": "assistant", "content": "120"},
    ]
    long = [{"role": "system", "content": "Be brief."}, *turn * 12, *QUESTION]
    async with client.conversation() as conversation:
        said = [event async for event in conversation.generate(long)]
    notices, done = [event.message for event in said if isinstance(event, Notice)], said[-1]
    assert isinstance(done, Done)
    stream = await api.chat.completions.create(
        model=MODEL, messages=long, stream=True, extra_body={"moa": {"mode": "provisional"}}
    )
    told = [chunk.model_extra["moa"].get("notice") async for chunk in stream if "moa" in (chunk.model_extra or {})]
    assert [notices[0]] == [notice for notice in told if notice]
    whole = await api.chat.completions.create(model=MODEL, messages=long)
    assert whole.choices[0].message.content == done.text
    assert whole.usage is not None
    assert str(whole.usage.model_extra["moa"]["left_out_messages"]) in notices[0]
    assert whole.usage.prompt_tokens + 60 <= client.shared.max_context
    response = await api.responses.create(model=MODEL, input=long)
    assert (response.output_text, response.truncation) == (done.text, "auto")
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        await api.responses.create(model=MODEL, input=long, truncation="disabled")
    longer = await api.chat.completions.create(model=MODEL, messages=[*turn * 400, *QUESTION])  # most of it is not read
    assert longer.usage is not None
    assert 0 < longer.usage.prompt_tokens <= client.shared.max_context - 60


async def test_tools_that_fill_the_context_are_left_out_unless_a_call_is_demanded(alone: Served) -> None:
    """Open WebUI offers 8,000 tokens of them with every message."""
    _, api = alone
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "description": "what it is for " * 20}} for n in range(60)
    ]
    async with browser(str(api.base_url)) as plain:
        texts = []
        for more in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "required"}):
            reply = await plain.post("chat/completions", json={"messages": QUESTION, "max_tokens": 60, **more})
            texts.append(reply.json().get("choices", [{}])[0].get("message", {}).get("content"))
    assert texts[0] == texts[1] != ""
    assert reply.json()["error"]["code"] == "context_length_exceeded"
