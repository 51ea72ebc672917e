"""The device as an endpoint, with the embedded pair: modes, the switch of the link, and the
client's own text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from edge_client import Done, EdgeClient, Notice
from edge_client.serve.endpoint import endpoint
from edge_client.serve.settings import ServeSettings
from moa.chat.template import ChatTemplate
from moa.process.listening import Port
from moa.process.memory import resident_bytes
from tests.api.large import LARGE, large_request
from tests.api.scripted import browser, check_that_the_loop_turns
from tests.api.test_app import data_of
from tests.edge.serve.pair import SETTINGS, verifier

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
        openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=PATIENCE
        ) as api,
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


async def asked(api: openai.AsyncOpenAI, moa: dict[str, Any] | None = None, **how: Any) -> Any:
    """An answer to the question, with settings of ours."""
    how = {"model": MODEL, "messages": QUESTION, "extra_body": {"moa": moa or {}}} | how
    return await api.chat.completions.create(**how)


async def truth_of(api: openai.AsyncOpenAI, **how: Any) -> str:
    """The target's answer."""
    return str((await asked(api, **how)).choices[0].message.content)


def plain(api: openai.AsyncOpenAI) -> Any:
    """A client of the same address without any package's ways."""
    return browser(str(api.base_url).removesuffix("/v1/"))


async def switch(api: openai.AsyncOpenAI, *, connected: bool) -> None:
    """The page's switch."""
    async with plain(api) as client:
        assert (await client.post("/moa/link", json={"connected": connected})).status_code == 200


async def text_of(stream: Any) -> str:
    """The final text of a client that applies retractions."""
    text = ""
    async for chunk in stream:
        for choice in chunk.choices:
            text = text[: marks_of(choice).get("cut")] + (choice.delta.content or "")
    return text


def marks_of(choice: Any) -> dict[str, Any]:
    """What we say beside the text."""
    return (choice.model_extra or {}).get("moa") or {}


async def test_the_text_is_that_of_the_client_in_every_mode(linked: Served) -> None:
    client, api = linked
    done = [event async for event in client.generate(QUESTION)][-1]
    assert isinstance(done, Done)
    assert done.verified
    for mode in ("hold", "provisional", "keep"):
        assert await text_of(await asked(api, {"mode": mode}, stream=True)) == done.text
    whole = await asked(api)
    assert whole.choices[0].message.content == done.text
    assert whole.usage.completion_tokens == done.stats["tokens"]
    begun = [*QUESTION, {"role": "assistant", "content": done.text[:8]}]
    assert await truth_of(api, messages=begun) == done.text[8:], (
        "an answer that the client has begun goes on"
    )


async def test_the_first_question_waits_for_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(offline=True, settle_seconds=0) as (_, api):
        monkeypatch.setattr(ChatTemplate, "_start", None)
        assert await truth_of(api, max_tokens=2)


async def test_hold_waits_for_the_link_and_provisional_text_is_corrected(linked: Served) -> None:
    _, api = linked
    truth = await truth_of(api)
    await switch(api, connected=False)
    stream = await asked(api, {"mode": "provisional"}, stream=True)
    async for chunk in stream:
        if any(marks_of(choice).get("verified") == 0 for choice in chunk.choices):
            break  # there is text, and none of it is verified
    await stream.close()
    held = asyncio.create_task(truth_of(api))
    async with plain(api) as client:
        told = (await client.post("/moa/link", json={"connected": True})).json()
    assert "on purpose" not in told["detail"], "that is over"
    assert await held == truth


async def test_hold_waits_also_where_the_device_may_write_no_further(linked: Served) -> None:
    client, api = linked
    truth = await truth_of(api)
    before = client.settings
    client.settings = dataclasses.replace(before, max_offline_tokens=2, offline_after=0.0)
    await switch(api, connected=False)
    hold = {"mode": "hold", "patience": 0.1}
    with pytest.raises(openai.InternalServerError) as refused:
        await asked(api, hold)
    assert (refused.value.status_code, refused.value.code) == (503, "not_verified")
    with pytest.raises(openai.APIError) as broken:
        await text_of(await asked(api, hold, stream=True))
    assert broken.value.code == "not_verified"
    held = asyncio.create_task(asked(api, {"mode": "hold"}))
    await switch(api, connected=True)
    assert (await held).choices[0].message.content == truth
    client.settings = before


async def test_every_verified_token_has_its_log_probability_however_it_came(linked: Served) -> None:
    _, api = linked
    how: Any = {"logprobs": True, "top_logprobs": 3}
    truth = (await asked(api, **how)).choices[0]
    assert "".join(one.token for one in truth.logprobs.content) == truth.message.content
    for mode in ("provisional", "hold"):
        await switch(api, connected=False)
        told: list[Any] = []
        async for chunk in await asked(api, {"mode": mode}, stream=True, **how):
            for choice in chunk.choices:
                told += choice.logprobs.content if choice.logprobs is not None else []
            if not told:  # the first chunk is there, and nothing can be verified yet
                await switch(api, connected=True)
        assert [one.token for one in told] == [one.token for one in truth.logprobs.content]
        assert [one.logprob for one in told] == pytest.approx(
            [one.logprob for one in truth.logprobs.content], abs=1e-3
        )


async def test_without_a_verifier_hold_says_so_and_provisional_answers(alone: Served) -> None:
    _, api = alone
    with pytest.raises(openai.InternalServerError) as refused:
        await asked(api, {"mode": "hold", "patience": 0})
    assert refused.value.status_code == 503
    answer = await asked(api, {"mode": "provisional", "patience": 0})
    assert answer.choices[0].message.content
    assert marks_of(answer.choices[0])["verified"] is False


async def test_the_page_and_its_switch(alone: Served) -> None:
    async with plain(alone[1]) as client:
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert (await client.get("/moa/status")).json()["link"] == "none"
        assert (await client.post("/moa/link", json={"connected": False})).status_code == 400
        assert (
            await client.get("/", headers={"If-None-Match": page.headers["etag"]})
        ).status_code == 304


@pytest.mark.parametrize("name", LARGE)
async def test_no_request_keeps_others_from_the_event_loop(alone: Served, name: str) -> None:
    _, api = alone
    await check_that_the_loop_turns(
        str(api.base_url).removesuffix("/v1/"), large_request(MODEL, name)
    )


async def test_by_default_an_answer_goes_on_without_the_verifier_and_says_so(
    linked: Served,
) -> None:
    _, api = linked
    how: Any = {"messages": QUESTION, "model": MODEL}
    reply = await api.chat.completions.with_raw_response.create(**how)
    assert (reply.headers["x-moa-link"], reply.headers["x-moa-verified"]) == ("online", "true")
    await switch(api, connected=False)
    reply = await api.chat.completions.with_raw_response.create(**how)
    assert (reply.headers["x-moa-link"], reply.headers["x-moa-verified"]) == ("offline", "false")
    assert reply.parse().choices[0].message.content
    marks = []
    async for chunk in await asked(api, stream=True):
        assert len(chunk.choices) == 1, "some clients trip over chunks without choices"
        marks.append(marks_of(chunk.choices[0]))
    assert marks[1] == {"unverified": True}
    assert marks[-1]["all_verified"] is False
    await switch(api, connected=True)


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
async def test_what_was_written_offline_is_corrected_for_a_client_that_comes_again(
    linked: Served, route: str
) -> None:
    client, api = linked
    await client.wait_online(PATIENCE)
    truth = await truth_of(api)
    await switch(api, connected=False)
    body: Any = {
        "moa": {"mode": "provisional", "patience": 0, "resumable": True},
        "model": MODEL,
        "stream": True,
    }
    body |= {"messages": QUESTION} if route.startswith("chat") else {"input": QUESTION}
    async with plain(api) as http:
        first = await http.post(f"/v1/{route}", json=body)
        id = first.headers["x-request-id"]
        assert first.text.rstrip().endswith("[DONE]")
        await switch(api, connected=True)
        last = [
            line.removeprefix("id: ") for line in first.text.splitlines() if line.startswith("id: ")
        ][-1]
        again = ""
        async with asyncio.timeout(PATIENCE):
            # A stream that has ended is told to end once more, until its correction is there.
            while again.count("id: ") < 2:
                await asyncio.sleep(0.05)
                again = (await http.get(f"/v1/streams/{id}", headers={"Last-Event-ID": last})).text
        whole = (await http.get(f"/v1/streams/{id}")).text
        assert whole.count("[DONE]") == 1
        assert whole.endswith(again)
        if route == "responses":
            assert data_of(whole)[-2]["response"]["output"][0]["content"][0]["text"] == truth
            return
    text = ""
    verified = False
    for chunk in data_of(whole)[:-1]:
        for choice in chunk["choices"]:
            text = text[: choice.get("moa", {}).get("cut")] + choice["delta"].get("content", "")
            verified = choice.get("moa", {}).get("all_verified", False)
    assert (text, verified) == (truth, True)


async def test_the_model_may_be_left_out_and_the_end_ignored(alone: Served) -> None:
    async with plain(alone[1]) as http:
        for ignored in (False, True):
            body = {"messages": QUESTION, "max_tokens": 60, "ignore_eos": ignored}
            choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
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
    notices = [event.message for event in said if isinstance(event, Notice)]
    done = said[-1]
    assert isinstance(done, Done)
    stream = await asked(api, {"mode": "provisional"}, messages=long, stream=True)
    told = [(chunk.model_extra or {}).get("moa", {}).get("notice") async for chunk in stream]
    assert [notices[0]] == [notice for notice in told if notice]
    whole = await asked(api, messages=long)
    assert whole.choices[0].message.content == done.text
    assert str(whole.usage.model_extra["moa"]["left_out_messages"]) in notices[0]
    assert whole.usage.prompt_tokens + 60 <= client.shared.max_context
    response = await api.responses.create(model=MODEL, input=long)
    assert (response.output_text, response.truncation) == (done.text, "auto")
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        await api.responses.create(model=MODEL, input=long, truncation="disabled")
    longer = await asked(api, messages=[*turn * 400, *QUESTION])  # most of it is not read
    assert 0 < longer.usage.prompt_tokens <= client.shared.max_context - 60


async def test_tools_that_fill_the_context_are_left_out_unless_a_call_is_demanded(
    alone: Served,
) -> None:
    """Open WebUI offers 8,000 tokens of them with every message."""
    described = {"description": "what it is for " * 20}
    tools = [{"type": "function", "function": {"name": f"f{n}", **described}} for n in range(60)]
    async with plain(alone[1]) as http:
        texts = []
        for more in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "required"}):
            reply = await http.post(
                "/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 60, **more}
            )
            texts.append(reply.json().get("choices", [{}])[0].get("message", {}).get("content"))
    assert texts[0] == texts[1] != ""
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.slow
async def test_fifty_streams_are_exact_fair_and_bounded() -> None:
    settings = dataclasses.replace(SETTINGS, slots=64)
    questions = [[{"role": "user", "content": f"What is {n} + {n + 3} - 9?"}] for n in range(50)]
    async with (
        verifier(settings) as address,
        serving(verifier=address, ignore_eos=True, max_new_tokens=40) as (client, api),
    ):
        await client.wait_online(PATIENCE)

        async def streamed(messages: Any) -> tuple[str, float]:
            began = time.monotonic()
            text = await text_of(
                await asked(api, messages=messages, stream=True, extra_body={"ignore_eos": True})
            )
            return text, time.monotonic() - began

        alone = [
            event
            for one in questions
            async for event in client.generate(one)
            if isinstance(event, Done)
        ]
        await asyncio.gather(
            *map(streamed, questions)
        )  # after which the memory of so many conversations is in use
        before = resident_bytes()
        told = await asyncio.gather(*map(streamed, questions))
        assert resident_bytes() - before < 128e6
        assert [text for text, _ in told] == [done.text for done in alone]
        seconds = [took for _, took in told]
        assert max(seconds) < 3 * statistics.median(seconds)


async def test_a_wrong_key_is_told_in_the_log(
    alone: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it was, so that who had a wrong one looked elsewhere."""
    client, _ = alone
    settings = ServeSettings(api_keys=("right",), port=0)
    with caplog.at_level("WARNING", "moa.edge"):
        async with endpoint(client, settings, MODEL, Port("127.0.0.1", 0)) as address:
            for key in ("wrong", "right"):
                url = f"{address}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as api:
                    with contextlib.suppress(openai.AuthenticationError):
                        assert [model.id async for model in api.models.list()] == [MODEL]
    told = [one for one in caplog.records if getattr(one, "event", "") == "unauthorized"]
    assert [one.getMessage() for one in told] == ["refused with 401: a request with a wrong key"]
