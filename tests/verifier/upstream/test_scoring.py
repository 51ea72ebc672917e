"""Engines that score tokens: the text is that of a verifier of our own, whoever drafts it, through
cuts and without the network."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from edge_client import Done, EdgeClient, Token
from edge_client.events import AnswerSoFar
from tests.edge.serve.pair import verifier
from tests.verifier.upstream.scoring_engine import ScoringEngine
from tests.verifier.upstream.scripted import Tasks, running
from tests.verifier.upstream.test_cuts import Cutting, text_of

PROMPT = "Tell me a short story with Ada, a fox and a garden."
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 7}
APIS = ["vllm", "sglang"]
_ALONE = 10
"""Tokens that the device writes before the engine is back: some may be confirmed by a stream that
was asked for before them, and the rest must be worth a request."""
HOW = pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
API = pytest.mark.parametrize("api", APIS)
pytestmark = pytest.mark.usefixtures("short_pauses")


class Side(NamedTuple):
    """An engine, the wire to it, and a verifier in front."""

    engine: ScoringEngine
    proxy: Cutting
    address: str


@contextlib.asynccontextmanager
async def behind(api: str, **more: Any) -> AsyncIterator[Side]:
    """All three, running."""
    engine = ScoringEngine(api, **more)
    async with running(engine.answer) as upstream:
        proxy = Cutting(upstream.url.removesuffix("/v1"))
        connections = Tasks(proxy.carry)
        server = await asyncio.start_server(connections, "127.0.0.1", 0)
        through = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        settings = Settings(port=0, upstream=(through,), upstream_api=api)
        async with UpstreamVerifier(settings, upstreams_of(settings)).open() as front:
            yield Side(engine, proxy, front.transport.url)
        server.close()
        await connections.end()


def client(address: str, **how: Any) -> EdgeClient:
    """A device that is patient: the machine may be busy."""
    return EdgeClient(verifier=address, settle_seconds=60, max_new_tokens=24, **how)


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    """What a verifier of our own answers."""
    return asyncio.run(answers_of_ours())


async def answers_of_ours() -> dict[str, str]:
    """Greedy and sampled."""
    texts = {}
    async with verifier() as address, client(address) as device:
        await device.wait_online(60)
        for name, how in (("greedy", {}), ("sampled", SAMPLED)):
            texts[name], _ = await text_of(device, PROMPT, **how)
    return texts


def name_of(how: dict[str, Any]) -> str:
    return "sampled" if how else "greedy"


@API
@HOW
@pytest.mark.parametrize("draft", ["none", "device"])
async def test_whoever_drafts_the_text_is_the_one_of_our_own_verifier(
    api: str, how: dict[str, Any], draft: str, ours: dict[str, str]
) -> None:
    async with behind(api) as side, client(side.address, draft=draft) as device:
        await device.wait_online(60)
        text, done = await text_of(device, PROMPT, **how)
        assert done.verified
        assert text == ours[name_of(how)]
        if draft == "device":
            assert side.engine.scored
            assert done.stats["accepted"]
        if draft == "none":
            assert not side.engine.scored


@API
@HOW
@pytest.mark.parametrize("draft", ["device", "server"])
async def test_cuts_change_nothing(
    api: str, how: dict[str, Any], draft: str, ours: dict[str, str]
) -> None:
    rng = random.Random(5)
    async with behind(api) as side, client(side.address, draft=draft) as device:
        await device.wait_online(60)
        for _ in range(3):
            side.proxy.bytes_left = rng.randrange(50, 3000)
            text, done = await text_of(device, PROMPT, **how)
            assert done.verified
            assert text == ours[name_of(how)]
        assert side.proxy.cuts


@API
@HOW
async def test_offline_text_is_checked_in_one_request(
    api: str, how: dict[str, Any], ours: dict[str, str]
) -> None:
    """What the device wrote alone is a draft, when the engine is back."""
    async with (
        behind(api) as side,
        client(side.address, draft="server", offline_after=0.05, reconnect_seconds=0.05) as device,
    ):
        await device.wait_online(60)
        side.engine.breaks_off = True
        alone = 0
        async for event in device.generate(PROMPT, **how):
            match event:
                case Token(status="provisional"):
                    alone += 1
                    if alone == _ALONE:
                        side.engine.away = False
                case Done(text=text, verified=verified):
                    assert verified
                    assert text == ours[name_of(how)]
        assert alone >= _ALONE
        assert side.engine.scored


@API
async def test_text_that_cannot_be_drawn_here_is_the_engines(api: str) -> None:
    """Without top-k any token may be drawn, and the engine tells some only."""
    async with behind(api) as side, client(side.address, draft="device") as device:
        await device.wait_online(60)
        text, done = await text_of(device, PROMPT, temperature=0.8, seed=7)
        assert text
        assert done.verified
        assert not side.engine.scored


async def test_the_welcome_says_what_is_checked() -> None:
    async with behind("vllm") as side, client(side.address) as device:
        await device.wait_online(60)
        welcome = device.shared.welcome
        assert welcome is not None
        assert {"foresee", "logprobs"} <= set(welcome.features)
        assert "top-k of 20 at most" in " ".join(welcome.notices)


async def test_an_engine_that_refuses_to_score_still_writes(
    ours: dict[str, str],
) -> None:
    """vLLM may have been started with `--max-logprobs 0`."""
    async with (
        behind("vllm", most_logprobs=0) as side,
        client(side.address, draft="device") as device,
    ):
        await device.wait_online(60)
        for _ in range(2):
            text, done = await text_of(device, PROMPT)
            assert done.verified
            assert text == ours["greedy"]
        refused = [body for body in side.engine.asked if "prompt_logprobs" in body]
        assert len(refused) == 1


@API
@pytest.mark.parametrize("draft", ["none", "device"])
async def test_log_probabilities_are_passed_on(api: str, draft: str) -> None:
    async with verifier() as address, client(address, draft=draft) as device:
        await device.wait_online(60)
        expected = await told(device)
    async with behind(api) as side, client(side.address, draft=draft) as device:
        await device.wait_online(60)
        found = await told(device)
    assert list(found) == list(expected)
    for position, own in found.items():
        assert own == pytest.approx(expected[position], abs=1e-3)


async def told(device: EdgeClient) -> dict[int, float]:
    """Log-probabilities of an answer's tokens, by position."""
    answer = AnswerSoFar()
    async for event in device.generate(PROMPT, logprobs=3):
        answer.take(event)
    assert len(answer.logprobs) == len(answer.ids)
    assert all(len(row.top) == 3 for row in answer.logprobs.values())
    return {position: row.logprob for position, row in answer.logprobs.items()}
