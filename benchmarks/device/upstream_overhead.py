"""What `--upstream` costs beside asking the same engine plainly: first token, and many streams.

An engine is asked in turns: plainly, over one HTTP client, and through a verifier with `--upstream`
and a device. Both ask for the same chats, greedy. The device never writes here. The engine is one
that writes at a fixed pace, so that its own work does not share the cores with what is measured; or
a llama.cpp server over --gguf, or the one at --url.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import httpx2 as httpx

from benchmarks.device.upstreams import PROMPTS, EngineOptions, opened
from benchmarks.kit.figures import listing
from benchmarks.kit.llama_server import llama_server
from benchmarks.kit.paced_engine import paced_engine
from benchmarks.kit.progress import Progress
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Done, Token


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """Which engine, and how often. The bundle should have its tokenizer: else an answer of as many
    tokens is another text."""

    first_ms: float = 100.0
    """Of the paced engine: milliseconds to its first word."""
    token_ms: float = 20.0
    """And for each other word."""
    answers: int = 20
    """Answers one after another, for the first token."""
    streams: int = 16
    """Answers at once, for the throughput."""
    stream_tokens: int = 128
    """Tokens of each of these answers. An answer of 24 is over in half a second, of which the first
    word's tens of milliseconds are a large part: that is the figure of the first text, once more."""
    repeats: int = 9
    """Times that so many are asked for at once."""


@dataclass(frozen=True)
class Timed:
    """One answer."""

    first: float
    """Seconds to its first text."""
    characters: int


Ask = Callable[[str, int], Coroutine[Any, Any, Timed]]


async def measure(options: Options) -> dict[str, Any]:
    """Both ways in turns."""
    with contextlib.ExitStack() as stack:
        url = options.url
        if options.gguf:
            url = stack.enter_context(llama_server(options.gguf, parallel=options.streams))
        if not url:
            paced = paced_engine(first_ms=options.first_ms, token_ms=options.token_ms)
            url = stack.enter_context(paced)
            options = replace(options, api="chat")
        async with (
            httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http,
            opened(
                url,
                api=options.api,
                bundle=options.bundle,
                device=Device.load(options.bundle),
                tokens=options.tokens,
            ) as client,
        ):
            model = (await http.get(f"{url}/models")).json()["data"][0]["id"]

            async def plainly(prompt: str, tokens: int) -> Timed:
                return await plain(http, url, model, prompt, tokens)

            async def with_us(prompt: str, tokens: int) -> Timed:
                return await ours(client, prompt, tokens)

            return await compared({"plain": plainly, "ours": with_us}, options)


async def compared(ways: Mapping[str, Ask], options: Options) -> dict[str, Any]:
    """First tokens and throughput of each way."""
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    characters: dict[str, int] = {}
    progress = Progress(options.answers + options.repeats, "turns")
    for prompt in PROMPTS:  # every prompt has been read by each way before it counts
        for ask in ways.values():
            await ask(prompt, options.tokens)
    for number in range(options.answers):
        for name, ask in ways.items():
            one = await ask(PROMPTS[number % len(PROMPTS)], options.tokens)
            firsts[name].append(one.first)
        progress.step()
    for _ in range(options.repeats):
        for name, ask in ways.items():
            began = perf_counter()
            asked = [
                ask(PROMPTS[number % len(PROMPTS)], options.stream_tokens)
                for number in range(options.streams)
            ]
            told = await asyncio.gather(*asked)
            seconds = perf_counter() - began
            characters[name] = sum(one.characters for one in told)
            speeds[name].append(characters[name] / seconds)
        progress.step()
    pairs = zip(speeds["ours"], speeds["plain"], strict=True)
    return {
        "answers": options.answers,
        "streams": options.streams,
        "repeats": options.repeats,
        "tokens": options.tokens,
        "stream_tokens": options.stream_tokens,
        "engine": engine_of(options),
        "characters": characters,  # where they differ, one way has asked for a longer text
        "first_ms": {name: 1000 * median(found) for name, found in firsts.items()},
        "characters_per_second": {name: median(found) for name, found in speeds.items()},
        "throughput": median(mine / theirs for mine, theirs in pairs),
    }


def engine_of(options: Options) -> str:
    """What was asked, for readers."""
    if options.url:
        return "an engine that ran already"
    if options.gguf:
        return "llama.cpp's server"
    return (
        f"an engine that writes a word every {options.token_ms:.0f} ms, the first after "
        f"{options.first_ms:.0f} ms"
    )


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


async def ours(client: EdgeClient, prompt: str, tokens: int) -> Timed:
    """Through the device."""
    began = perf_counter()
    first = 0.0
    async for event in client.generate(
        [{"role": "user", "content": prompt}], max_new_tokens=tokens
    ):
        match event:
            case Token():
                first = first or perf_counter() - began
            case Done(text=text):
                return Timed(first, len(text))
    raise AssertionError("no end")


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
        f"{shown}\n\nEngine: {result['engine']}. First text: median of {result['answers']} answers "
        f"of up to {result['tokens']} tokens, one at a time, in turns. Characters: "
        f"{result['streams']} answers of up to {result['stream_tokens']} tokens at once, median of "
        f"{result['repeats']} turns; ours beside plain, turn by turn: {result['throughput']:.2f}."
    )
