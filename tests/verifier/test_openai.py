"""The verifier as an OpenAI-shaped endpoint: the target's own text, many at once, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx2 as httpx
import openai
import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.auth import Authenticator
from cloud_verifier.openai.endpoint import endpoint
from cloud_verifier.settings import Settings
from moa.errors import ConfigError
from tests.edge.serve.pair import embedded, served
from tests.verifier.kit import PATIENCE, generate

SETTINGS = Settings(port=0, openai="0", slots=4, device="cpu", dtype="float32")
QUESTION = [{"role": "user", "content": "What is 17 + 25 - 9?"}]
MODEL = "moa-demo"


@contextlib.asynccontextmanager
async def running(settings: Settings = SETTINGS) -> AsyncIterator[tuple[Verifier, openai.AsyncOpenAI]]:
    """A verifier with its endpoint, and a client of it."""
    tokenizer, auth = embedded().target.tokenizer, Authenticator()
    async with (
        Verifier(served(settings), settings, auth).running() as verifier,
        endpoint(verifier, tokenizer=tokenizer, settings=settings, principals=auth.principal) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=3 * PATIENCE) as client,
    ):
        yield verifier, client


def truth(count: int) -> str:
    """The target's own greedy answer."""
    target = embedded().target
    ids = target.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    return str(target.tokenizer.decode(generate(target.model, ids, count), skip_special_tokens=True))


async def test_the_text_is_the_targets_own() -> None:
    async with running() as (verifier, client):
        answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == truth(40).split("<|")[0]
        assert answer.usage.completion_tokens <= 40
        assert not list(verifier.service.store)


async def test_many_at_once_and_streamed() -> None:
    async with running() as (_, client):

        async def one() -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=30, stream=True)  # type: ignore[call-overload]
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert set(await asyncio.gather(*(one() for _ in range(10)))) == {truth(30)}  # more than there are slots


async def test_a_prediction_changes_the_work_and_not_the_text() -> None:
    async with running() as (_, client):
        text = truth(40)
        wrong = text.replace("37", "38", 1)
        for said, accepted in [(text, True), (wrong, True), ("Nothing of the kind at all.", False)]:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,  # type: ignore[arg-type]
                max_tokens=40,
                prediction={"type": "content", "content": said},
            )
            assert answer.choices[0].message.content == text
            details = answer.usage and answer.usage.completion_tokens_details
            assert details is not None
            assert ((details.accepted_prediction_tokens or 0) > 10) == accepted


async def test_a_stop_text_and_a_seed() -> None:
    async with running() as (_, client):
        answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, stop="42")  # type: ignore[call-overload]
        assert (answer.choices[0].finish_reason, "42" in answer.choices[0].message.content) == ("stop", False)
        sampled = [
            await client.chat.completions.create(model=MODEL, messages=QUESTION, seed=5, temperature=1, max_tokens=20)  # type: ignore[call-overload]
            for _ in range(2)
        ]
        assert sampled[0].choices[0].message.content == sampled[1].choices[0].message.content


async def test_a_client_that_hangs_up_leaves_no_session() -> None:
    async with running() as (verifier, client):
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            stream=True,
            max_tokens=900,
            extra_body={"moa": {"ignore_eos": True}},
        )
        await anext(aiter(stream))
        await stream.close()
        async with asyncio.timeout(PATIENCE):
            while list(verifier.service.store) or verifier.service.channels:
                await asyncio.sleep(0.01)


async def test_what_does_not_fit_is_refused() -> None:
    async with running() as (verifier, client):
        for prompt in ("word " * 9000, [10**6]):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt=prompt)  # type: ignore[arg-type]
        assert not list(verifier.service.store)


async def test_the_operators_page_reads_the_metrics() -> None:
    async with running() as (_, client):
        await client.completions.create(model=MODEL, prompt="a", max_tokens=3)
        base = str(client.base_url).removesuffix("/v1/")
        async with httpx.AsyncClient(base_url=base, trust_env=False) as browser:
            page = await browser.get("/ui")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            for path in re.findall(r'(?:href|src)="([^"]+)"', page.text):
                assert (await browser.get(f"/{path}")).status_code == 200
            metrics = (await browser.get("/metrics")).text
            script = (await browser.get("/ui/ui.js")).text
    offered = {line.split("{")[0].split(" ")[0] for line in metrics.splitlines() if not line.startswith("#")}
    declared = {line.split(" ")[2] for line in metrics.splitlines() if line.startswith("# TYPE")}
    for name in set(re.findall(r'"(moa_\w+)"', script)):
        assert name in offered | declared, name


@pytest.mark.parametrize("address", ["x", "1:2:x", "99999", "0.0.0.0:80"])
def test_an_address_that_may_not_be(address: str) -> None:
    with pytest.raises(ConfigError):
        _ = replace(SETTINGS, openai=address).openai_address
