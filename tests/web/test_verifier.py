"""The browser's client, in node, against a real verifier: the text is the target's own, whatever
happens to the link or to the page."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from edge_client.events import Event
from edge_client.tools.emulated_network import LinkProxy
from moa.sampling import SamplingSettings
from testing.tiny import EOS
from tests.edge import kit
from tests.edge.test_exact import keep_cutting
from tests.verifier import kit as verifier_kit
from tests.web.device import Browser, browser
from tests.web.node import camel

COUNT = 40
WAYS: dict[str, dict[str, Any]] = {
    "device": {"draft": "device", "guessAhead": False},
    "server": {"draft": "server"},
    "auto": {"draft": "auto", "guessAhead": False},
    "auto, guessing ahead": {"draft": "auto", "guessAhead": True},
}
MANY = partial(pytest.param, marks=pytest.mark.slow)
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3}
FAST = {
    "offlineAfter": 0.15,
    "reconnectSeconds": 0.05,
    "settleSeconds": 20.0,
    "maxOfflineTokens": 24,
}


def truth(ids: list[int], sampling: dict[str, Any]) -> list[int]:
    return verifier_kit.generated(ids, COUNT, SamplingSettings(**sampling))


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[LinkProxy, Browser]]:
    """The link to a verifier, and a browser."""
    async with (
        kit.verifier() as running,
        LinkProxy("127.0.0.1", running.transport.port) as link,
        browser() as page,
    ):
        yield link, page


async def transcribe(
    page: Browser, id: int, ids: list[int] | None, reader: kit.Reader, **how: Any
) -> kit.Reader:
    async for event in page.turn(id, ids, **how):
        reader.done = None  # the turn has one, and each check after it
        reader.take(event)
    return reader


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompts", [2, MANY(200)])
async def test_the_text_is_the_targets(way: str, sampling: dict[str, Any], prompts: int) -> None:
    accepted = rows = 0
    async with kit.verifier() as running, browser() as page:
        for seed in range(prompts):
            ids = verifier_kit.prompt(seed, 12)
            expected = truth(ids, sampling)
            settings = {**WAYS[way], **camel(sampling), "maxNewTokens": COUNT, "offlineAfter": 20.0}
            id = page.client(running.transport.url, [*ids, *expected], **settings)
            reader = await transcribe(page, id, ids, kit.Reader())
            assert reader.tokens == expected
            assert all(reader.verified)
            assert reader.done is not None
            assert reader.done.reason == ("eos" if expected[-1] == EOS else "length")
            accepted = accepted + reader.done.stats["accepted"]
            rows = rows + reader.done.stats["record_rows"]
            page.ask(id, end=True)
        assert way != "device" or (accepted > 0 and rows > 0)


async def test_turns_of_a_conversation_share_a_session() -> None:
    async with kit.verifier() as running, browser() as page:
        ids = verifier_kit.prompt(1, 12)
        id = page.client(running.transport.url, ids, maxNewTokens=10, offlineAfter=20.0)
        for _ in range(3):
            reader = await transcribe(page, id, ids, kit.Reader())
            assert reader.tokens == verifier_kit.generated(ids, 10)
            ids = [*ids, *reader.tokens, 5, 6, 7]
        assert len(running.service.table) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cuts", [2, MANY(50)])
async def test_connections_that_are_cut(way: str, cuts: int) -> None:
    """Nothing is lost, nothing comes twice, and all is verified in the end."""
    async with linked() as (link, page):
        cutting = asyncio.create_task(keep_cutting(link, random.Random(way), most=800))
        for seed in range(
            20 * cuts
        ):  # where a cut falls depends on timing, and so does how many runs it takes
            if link.connections - seed >= cuts:
                break
            ids = verifier_kit.prompt(seed, 12)
            expected = truth(ids, {})
            settings = {**WAYS[way], **FAST, "maxNewTokens": COUNT}
            id = page.client(link.url, [*ids, *expected], right=0.6, **settings)
            reader = await transcribe(page, id, ids, kit.Reader(), checks=20)
            assert reader.tokens == expected
            assert all(reader.verified)
            page.ask(id, end=True)
        cutting.cancel()
        assert link.connections - seed >= cuts


async def test_offline_from_the_start_and_checked_later() -> None:
    async with linked() as (link, page):
        link.go_down()
        ids = verifier_kit.prompt(4, 12)
        expected = truth(ids, {})
        settings = {**FAST, "maxNewTokens": COUNT, "maxOfflineTokens": 0, "settleSeconds": 0.1}
        id = page.client(link.url, [*ids, *expected], right=0.9, **settings)
        reader = await transcribe(page, id, ids, kit.Reader())
        assert len(reader.tokens) == COUNT
        assert not any(reader.verified)
        link.restore()
        async with asyncio.timeout(verifier_kit.PATIENCE):
            while not link.connections:
                await asyncio.sleep(0.01)
        settled = await transcribe(page, id, None, reader, checks=20)
        assert settled.tokens == expected
        assert all(settled.verified)


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("seeds", [1, MANY(13)])
async def test_a_page_that_is_killed_goes_on(offline: bool, seeds: int) -> None:
    """A new process takes the snapshot up, after exactly the events that were shown."""
    rng = random.Random(offline)
    async with kit.verifier() as running, LinkProxy("127.0.0.1", running.transport.port) as link:
        for seed in range(seeds):
            ids = verifier_kit.prompt(seed, 12)
            lives = [rng.randrange(2, 8), rng.randrange(1, 4), 10**9]
            draft = rng.choice(["device", "server", "auto"])
            reader = await three_lives(link, ids, draft, lives, offline=offline)
            assert reader.tokens == truth(ids, {})
            assert all(reader.verified)


async def three_lives(
    link: LinkProxy, ids: list[int], draft: str, lives: list[int], *, offline: bool
) -> kit.Reader:
    """A turn whose page is killed after so many events, again and again."""
    reader = kit.Reader()
    snapshot = None

    def take(event: Event) -> None:
        reader.done = None
        reader.take(event)

    for shown in lives:
        async with browser() as page:
            if offline and snapshot is None:
                link.go_down()
            settings = {**FAST, "maxNewTokens": COUNT, "draft": draft, "snapshot": snapshot}
            id = page.client(link.url, [*ids, *truth(ids, {})], right=0.7, **settings)
            async with aclosing(
                page.turn(id, ids if snapshot is None else None, checks=20)
            ) as events:
                async for event in events:
                    take(event)
                    shown -= 1
                    if not shown:
                        break
            snapshot = await page.snapshot(id, take)
        link.restore()
        assert snapshot["ids"] == [*ids, *reader.tokens]
        assert snapshot["verified"] == len(ids) + sum(reader.verified)
    return reader


async def test_a_turn_that_is_cancelled() -> None:
    async with kit.verifier() as running, browser() as page:
        ids = verifier_kit.prompt(2, 12)
        expected = truth(ids, {})
        id = page.client(
            running.transport.url,
            [*ids, *expected],
            maxNewTokens=COUNT,
            draft="single",
            offlineAfter=20.0,
        )
        reader = kit.Reader()
        async for event in page.turn(id, ids):
            reader.take(event)
            if len(reader.tokens) == 3:
                page.ask(id, cancel=True)
        assert reader.done is not None
        assert reader.done.reason == "cancelled"
        assert reader.tokens == expected[: len(reader.tokens)]
        again = await transcribe(page, id, [*ids, 9], kit.Reader())
        assert again.tokens == verifier_kit.generated([*ids, 9], COUNT)
