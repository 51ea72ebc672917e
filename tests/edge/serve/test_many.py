"""Fifty streams at once through one endpoint, and what the endpoint costs beside the client alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.model import load
from edge_client import Done, EdgeClient, Token
from edge_client.serve.app import endpoint
from edge_client.serve.settings import ServeSettings
from moa.process.listening import Port
from tests.edge.serve.pair import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MODEL = "demo"
PATIENCE = 300.0
STREAMS = 50
TOKENS = 40


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[EdgeClient, openai.AsyncOpenAI]]:
    settings = dataclasses.replace(SETTINGS, slots=64)
    async with (
        Verifier(load(settings), settings).open() as running,
        EdgeClient(verifier=running.transport.url, ignore_eos=True, max_new_tokens=TOKENS) as client,
        endpoint(client, ServeSettings(), MODEL, Port("127.0.0.1", 0)) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as api,
    ):
        await client.wait_online(PATIENCE)
        yield client, api


def question(number: int) -> Any:
    return [{"role": "user", "content": f"What is {number} + {number + 3} - 9?"}]


def resident() -> int:
    """Megabytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 // 2**20


async def streamed(api: openai.AsyncOpenAI, number: int) -> tuple[str, float, float]:
    """The text, and the seconds to its beginning and to its end."""
    began, first, parts = time.monotonic(), 0.0, []
    how: Any = {"model": MODEL, "messages": question(number), "extra_body": {"ignore_eos": True}}
    stream: Any = await api.chat.completions.create(**how, stream=True)
    async for chunk in stream:
        parts.append(chunk.choices[0].delta.content or "")
        if parts[-1] and not first:
            first = time.monotonic() - began
    return "".join(parts), first, time.monotonic() - began


async def alone(client: EdgeClient, number: int) -> str:
    return [event async for event in client.generate(question(number)) if isinstance(event, Done)][-1].text


async def test_fifty_streams_are_exact_fair_and_bounded() -> None:
    async with serving() as (client, api):
        truth = [await alone(client, number) for number in range(STREAMS)]

        async def all_at_once() -> list[tuple[str, float, float]]:
            return await asyncio.gather(*(streamed(api, number) for number in range(STREAMS)))

        await all_at_once()  # after which the verifier's memory of so many conversations is in use
        before = resident()
        told = await all_at_once()
        grown = resident() - before
        assert [text for text, _, _ in told] == truth
        firsts, lasts = sorted(first for _, first, _ in told), sorted(last for _, _, last in told)
        print(f"\n{STREAMS} streams of {TOKENS} tokens, {grown} MB more than before; seconds to the first text: "
              f"p50 {statistics.median(firsts):.2f}, max {firsts[-1]:.2f}; to the end: "
              f"p50 {statistics.median(lasts):.2f}, max {lasts[-1]:.2f}")  # fmt: skip
        assert grown < 128
        assert lasts[-1] < 3 * statistics.median(lasts)


async def test_a_client_that_hangs_up_frees_its_place_within_a_second() -> None:
    async with serving() as (_, api), httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as plain:
        status = str(api.base_url).removesuffix("v1/") + "moa/status"
        how: Any = {"model": MODEL, "stream": True, "max_tokens": 900}
        streams = [await api.chat.completions.create(**how, messages=question(number)) for number in range(8)]
        assert (await plain.get(status)).json()["running"] == len(streams)
        began = time.monotonic()
        for stream in streams:
            await stream.close()
        while (await plain.get(status)).json()["running"]:
            await asyncio.sleep(0.01)
        seconds = time.monotonic() - began
        print(f"\n{len(streams)} places free after {1000 * seconds:.0f} ms")
        assert seconds < 1


async def test_what_the_endpoint_costs_a_token_beside_the_client() -> None:
    async with serving() as (client, api):
        times: dict[str, list[float]] = {"client": [], "endpoint": []}
        for number in range(21):
            for way in times:
                began = time.perf_counter()
                if way == "client":
                    tokens = [e async for e in client.generate(question(number)) if isinstance(e, Token)]
                    assert len(tokens) == TOKENS
                else:
                    await streamed(api, number)
                if number:  # the first is to warm up
                    times[way].append(1000 * (time.perf_counter() - began) / TOKENS)
        p50 = {way: statistics.median(each) for way, each in times.items()}
        more = statistics.median(b - a for a, b in zip(times["client"], times["endpoint"], strict=True))
        print(f"\nms a token, p50: client {p50['client']:.2f}, endpoint {p50['endpoint']:.2f}, {more:.2f} more")
        assert more < 5, "2 on a machine with nothing else to do"
