"""The device as an endpoint, with the embedded pair: modes, the switch of the link, and the client's own text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from edge_client import Adopt, Confirm, Done, EdgeClient, Link, Notice, Prompt, Retract, Token
from edge_client.serve.answerer import Marks
from edge_client.serve.app import ServeSettings, endpoint
from moa.api.answer import Began, Counts, Cut, Ended, LinkNews, Note, Piece, Verified
from moa.errors import ConfigError
from tests.api.scripted import browser
from tests.edge.serve.pair import verifier

PATIENCE = 60.0
MODEL = "demo"
QUESTION: list[Any] = [{"role": "user", "content": "What is 17 + 25 - 9?"}]


@contextlib.asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[EdgeClient, openai.AsyncOpenAI]]:
    """The endpoint over a client with these settings, and the `openai` package's client of it."""
    async with (
        EdgeClient(**{"max_new_tokens": 60, "reconnect_seconds": 0.2, **settings}) as client,
        endpoint(client, ServeSettings(port=0), MODEL) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as api,
    ):
        yield client, api


async def switch(api: openai.AsyncOpenAI, *, connected: bool) -> None:
    """The page's switch."""
    async with browser(str(api.base_url).removesuffix("/v1/")) as client:
        assert (await client.post("/moa/link", json={"connected": connected})).status_code == 200


async def text_of(stream: Any) -> str:
    """What a client that knows retraction has at the end."""
    text = ""
    async for chunk in stream:
        for choice in chunk.choices:
            marks = (choice.model_extra or {}).get("moa") or {}
            text = text[: marks.get("cut")] + (choice.delta.content or "")
    return text


async def test_the_text_is_that_of_the_client_in_every_mode() -> None:
    async with verifier() as address, serving(verifier=address) as (client, api):
        await client.wait_online(PATIENCE)
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


async def test_hold_waits_for_the_link_and_provisional_text_is_corrected() -> None:
    async with verifier() as address, serving(verifier=address) as (client, api):
        await client.wait_online(PATIENCE)
        truth = (await api.chat.completions.create(model=MODEL, messages=QUESTION)).choices[0].message.content
        await switch(api, connected=False)
        body = {"moa": {"mode": "provisional"}}
        stream = await api.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, extra_body=body)
        marks = []
        async for chunk in stream:
            marks += [(choice.model_extra or {}).get("moa", {}).get("verified") for choice in chunk.choices]
            if 0 in marks:  # there is text, and nothing of it is verified
                break
        await stream.close()
        held = asyncio.create_task(api.chat.completions.create(model=MODEL, messages=QUESTION))
        await switch(api, connected=True)
        assert (await held).choices[0].message.content == truth


async def test_without_a_verifier_hold_says_so_and_provisional_answers() -> None:
    async with serving(offline=True, settle_seconds=0) as (_, api):
        with pytest.raises(openai.InternalServerError) as refused:
            await api.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"moa": {"patience": 0}})
        assert refused.value.status_code == 503
        body = {"moa": {"mode": "provisional", "patience": 0}}
        answer = await api.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=body)
        assert answer.choices[0].message.content
        assert (answer.choices[0].model_extra or {})["moa"]["verified"] is False


async def test_the_page_and_its_switch() -> None:
    async with serving(offline=True) as (_, api), browser(str(api.base_url).removesuffix("/v1/")) as client:
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert (await client.get("/moa/status")).json()["link"] == "none"
        assert (await client.post("/moa/link", json={"connected": False})).status_code == 400
        assert (await client.get("/", headers={"If-None-Match": page.headers["etag"]})).status_code == 304


def test_positions_in_tokens_become_positions_in_the_text() -> None:
    marks = Marks()
    stats = {"tokens": 2, "drafted": 4, "accepted": 3, "calls": 1, "seconds": 0.1}
    told = [
        marks.take(event)
        for event in [
            Prompt(ids=[1, 2, 3]),
            Token(position=3, id=7, text="ab", status="verified"),
            Token(position=4, id=8, text="", status="provisional"),
            Token(position=5, id=9, text="cde", status="provisional"),
            Confirm(start=4, stop=5),
            Retract(start=5, stop=6, characters=2),
            Token(position=5, id=6, text="f", status="provisional"),
            Adopt(start=5, stop=6),
            Link(state="offline", detail="gone"),
            Notice(message="far"),
            Done(reason="eos", verified=True, text="abf", stats=stats),
        ]
    ]
    counts = Counts(prompt_tokens=3, tokens=2, drafted=4, accepted=3, calls=1, more={"seconds": 0.1})
    assert told == [
        *(Began(3), Piece("ab"), Piece("", False), Piece("cde", False), Verified(2), Cut(2), Piece("f", False)),
        *(Verified(3), LinkNews("offline", "gone"), Note("far")),
        Ended(reason="eos", verified=True, text="abf", counts=counts),
    ]


def test_others_may_only_use_it_with_a_key() -> None:
    with pytest.raises(ConfigError):
        ServeSettings(host="0.0.0.0")
    assert ServeSettings(host="0.0.0.0", api_keys=("k",)).api_keys
    with pytest.raises(ConfigError):
        ServeSettings(api_keys=(" ",))
