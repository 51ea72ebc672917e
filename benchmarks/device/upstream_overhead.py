"""What `--upstream` costs beside asking the same engine plainly: first token, and many streams.

A llama.cpp server over --gguf (or the engine at --url) is asked in turns: plainly, over one HTTP
client, and through a verifier with `--upstream` and a device. Both ask for the same chats, greedy.
The device never writes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import httpx2 as httpx

from benchmarks.device.upstreams import PROMPTS
from benchmarks.kit.figures import listing
from benchmarks.kit.llama_server import llama_server
from benchmarks.kit.progress import Progress
from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Done, Token
from moa.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which engine, and how often."""

    gguf: str = ""
    """A GGUF file for a llama.cpp server (wheel xllamacpp)."""
    url: str = ""
    """An engine that already runs."""
    bundle: str = ""
    """The device's bundle, with the engine's tokenizer: else an answer of as many tokens is another
    text."""
    api: str = "auto"
    """How the engine is asked."""
    answers: int = 20
    """Answers one after another, for the first token."""
    streams: int = 16
    """Answers at once, for the throughput."""
    repeats: int = 3
    """Times that so many are asked for at once."""
    tokens: int = 24
    """Tokens of an answer at most."""


@dataclass(frozen=True)
class Timed:
    """One answer."""

    first: float
    """Seconds to its first text."""
    characters: int


Ask = Callable[[str], Coroutine[Any, Any, Timed]]


async def measure(options: Options) -> dict[str, Any]:
    """Both ways in turns."""
    with contextlib.ExitStack() as stack:
        url = options.url
        if options.gguf:
            url = stack.enter_context(llama_server(options.gguf, parallel=options.streams))
        if not url:
            raise UsageError("no engine was named", hint="--gguf FILE or --url URL")
        async with (
            httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http,
            device(url, options) as client,
        ):
            model = (await http.get(f"{url}/models")).json()["data"][0]["id"]

            async def plainly(prompt: str) -> Timed:
                return await plain(http, url, model, prompt, options.tokens)

            async def with_us(prompt: str) -> Timed:
                return await ours(client, prompt)

            return await compared({"plain": plainly, "ours": with_us}, options)


async def compared(ways: Mapping[str, Ask], options: Options) -> dict[str, Any]:
    """First tokens and throughput of each way."""
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    progress = Progress(options.answers + options.repeats, "turns")
    for prompt in PROMPTS:  # every prompt has been read by each way before it counts
        for ask in ways.values():
            await ask(prompt)
    for number in range(options.answers):
        for name, ask in ways.items():
            firsts[name].append((await ask(PROMPTS[number % len(PROMPTS)])).first)
        progress.step()
    for _ in range(options.repeats):
        for name, ask in ways.items():
            began = perf_counter()
            asked = [ask(PROMPTS[n % len(PROMPTS)]) for n in range(options.streams)]
            told = await asyncio.gather(*asked)
            speeds[name].append(sum(one.characters for one in told) / (perf_counter() - began))
        progress.step()
    pairs = zip(speeds["ours"], speeds["plain"], strict=True)
    return {
        "answers": options.answers,
        "streams": options.streams,
        "repeats": options.repeats,
        "tokens": options.tokens,
        "first_ms": {name: 1000 * median(found) for name, found in firsts.items()},
        "characters_per_second": {name: median(found) for name, found in speeds.items()},
        "throughput": median(mine / theirs for mine, theirs in pairs),
    }


async def plain(http: httpx.AsyncClient, url: str, model: str, prompt: str, tokens: int) -> Timed:
    """As a plain program asks."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": tokens,
        "temperature": 0.0,
    }
    began = perf_counter()
    first = 0.0
    characters = 0
    async with http.stream("POST", f"{url}/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text = choice["delta"].get("content") or ""
                first = first or (perf_counter() - began if text else 0.0)
                characters += len(text)
    return Timed(first, characters)


async def ours(client: EdgeClient, prompt: str) -> Timed:
    """Through the device."""
    began = perf_counter()
    first = 0.0
    async for event in client.generate([{"role": "user", "content": prompt}]):
        match event:
            case Token():
                first = first or perf_counter() - began
            case Done(text=text):
                return Timed(first, len(text))
    raise AssertionError("no end")


@contextlib.asynccontextmanager
async def device(url: str, options: Options) -> AsyncIterator[EdgeClient]:
    """A verifier in front of the engine, and a device."""
    settings = Settings(port=0, upstream=(url,), upstream_api=options.api, bundle=options.bundle)
    async with (
        UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier,
        EdgeClient(
            device=Device.load(options.bundle),
            verifier=verifier.transport.url,
            offline_after=600.0,
            settle_seconds=600.0,
            max_new_tokens=options.tokens,
        ) as client,
    ):
        await client.wait_online(60)
        yield client


def tables(result: Mapping[str, Any]) -> str:
    """A row for each way."""
    rows = [
        {"way": name, "first": first, "speed": result["characters_per_second"][name]}
        for name, first in result["first_ms"].items()
    ]
    shown = listing(
        rows,
        {"way": "{way}", "first text, ms": "{first:.0f}", "characters a second": "{speed:.0f}"},
    )
    return (
        f"{shown}\n\nFirst text: median of {result['answers']} answers in turns, one at a time. Characters: "
        f"{result['streams']} answers at once, median of {result['repeats']} turns; ours beside plain, turn by turn: "
        f"{result['throughput']:.2f}."
    )
