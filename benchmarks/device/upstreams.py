"""Greedy answers through engines that are not ours, cut and resumed: the engine's own text?

Each engine is asked through `--upstream` without a cut, again without a cut (does it repeat
itself?), and then with a connection that is reset at a random byte of the answer and is back at
once. The device never writes here: what is compared is the engine's text behind a cut with its text
without one. Engines: a llama.cpp server over --gguf, our own endpoint, and whatever already runs at
--url (vLLM, SGLang, a service). An engine asked by tokens needs a --bundle with its tokenizer.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device import cuts
from benchmarks.device.cuts import Outage, own_endpoint
from benchmarks.kit.figures import listing
from benchmarks.kit.llama_server import llama_server
from benchmarks.kit.progress import Progress
from benchmarks.real.lines import Lines
from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Done
from moa.errors import MoaError

PROMPTS = (
    "Write a Python function that reverses a linked list.",
    "Explain what a mutex is in two sentences.",
    "What is the capital of France, and why is it famous?",
    "Write a haiku about rain.",
    "How do I sort a dict by value in Python?",
    "Translate 'good morning' into French, German and Spanish.",
    "What does HTTP status 503 mean?",
    "Name three uses of a hash table.",
    "Tell me a short story with Ada, a fox and a garden.",
    "Write a SQL query that counts users by country.",
)
_BACK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine is asked, and how."""

    gguf: str = ""
    """A GGUF file for a llama.cpp server (wheel xllamacpp)."""
    bundle: str = ""
    """The device's bundle, with the engine's tokenizer where that matters; the embedded one without."""
    url: str = ""
    """An engine that already runs."""
    api: str = "auto"
    """How that is asked."""
    tokens: int = 24
    """Tokens of an answer at most."""


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """Which engines, and how often."""

    own: bool = True
    """Our own endpoint, with the embedded target."""
    cuts: int = 10
    """Cut answers for each of the ten prompts."""
    apis: tuple[str, ...] = ()
    """Several ways to ask the engine at --url, in place of --api."""
    name: str = "at --url"
    """What the engine at --url is called in the table."""
    kept: str = ""
    """A file for the rows, each as soon as it is measured. An engine whose row is there is not asked
    again, so that one engine after another can be started."""


@dataclass(frozen=True)
class Engine:
    """What is asked, and how."""

    name: str
    url: str
    api: str
    bundle: str


async def measure(options: Options) -> dict[str, Any]:
    """All engines, one after another."""
    logging.getLogger("cloud_verifier").setLevel(logging.ERROR)
    if not (options.own or options.gguf or options.url):
        raise MoaError("no engine was named", hint="--gguf FILE, --url URL or --own")
    rows = Rows(options)
    if options.own:
        async with own_endpoint(cuts.Options(at_once=4)) as url:
            for api in ("completions", "chat", "chat-whole"):
                await rows.add(Engine("our endpoint", url, api, ""))
    if options.gguf:
        with llama_server(options.gguf) as url:
            await rows.add(Engine("llama.cpp's server", url, "chat", ""))
            if options.bundle:
                await rows.add(Engine("llama.cpp's server", url, "llama-server", options.bundle))
    if options.url:
        for api in options.apis or (options.api,):
            await rows.add(Engine(options.name, options.url, api, options.bundle))
    return {"prompts": len(PROMPTS), "tokens": options.tokens, "runs": rows.found}


class Rows:
    """The rows of the table, in the order in which they were asked for."""

    def __init__(self, options: Options) -> None:
        self.found: list[dict[str, Any]] = []
        self._options = options
        self._kept = Lines(Path(options.kept)) if options.kept else None

    async def add(self, engine: Engine) -> None:
        """Measure one, unless it has been kept."""
        options = self._options
        key = f"{engine.name}, {engine.api}: {options.cuts} cuts, {options.tokens} tokens"
        if self._kept is not None and key in self._kept:
            kept = self._kept.found[key]
            self.found.append({name: value for name, value in kept.items() if name != "key"})
            return
        row = await through(engine, options)
        if self._kept is not None:
            self._kept.add(key, **row)
        self.found.append(row)


async def through(engine: Engine, options: Options) -> dict[str, Any]:
    """Counts of one engine."""
    device = Device.load(engine.bundle)
    rng = random.Random(3)
    truth: list[str] = []
    sizes: list[int] = []
    repeated = 0
    for prompt in PROMPTS:
        await answer(engine, device, options, prompt, 0)  # it reads the prompt for the first time
        plain, size, _ = await answer(engine, device, options, prompt, 0)
        again, _, _ = await answer(engine, device, options, prompt, 0)
        truth.append(plain.text)
        sizes.append(size)
        repeated += plain.text == again.text
    same = verified = cut = 0
    progress = Progress(len(PROMPTS) * options.cuts, f"cut answers of {engine.name}")
    for _ in range(options.cuts):
        for number, prompt in enumerate(PROMPTS):
            at = rng.randrange(1, sizes[number])
            done, _, was_cut = await answer(engine, device, options, prompt, at)
            cut += was_cut
            verified += done.verified
            same += done.verified and done.text == truth[number]
            progress.step()
    return {
        "engine": engine.name,
        "api": engine.api,
        "answers": len(PROMPTS) * options.cuts,
        "cut": cut,
        "verified": verified,
        "same": same,
        "repeated": repeated,
        "asked_again": len(PROMPTS),
    }


async def answer(
    engine: Engine, device: Device, options: Options, prompt: str, at: int
) -> tuple[Done, int, bool]:
    """The answer, the bytes of its stream, and whether it was cut."""
    async with (
        Outage(engine.url, at, _BACK_SECONDS).running() as proxy,
        opened(
            proxy.url, api=engine.api, bundle=engine.bundle, device=device, tokens=options.tokens
        ) as client,
    ):
        async for event in client.generate([{"role": "user", "content": prompt}]):
            if isinstance(event, Done):
                return event, proxy.seen_bytes, bool(proxy.cut_at)
    raise MoaError("an answer never ended")


@contextlib.asynccontextmanager
async def opened(
    url: str, *, api: str, bundle: str, device: Device, tokens: int
) -> AsyncIterator[EdgeClient]:
    """A device, which never writes by itself, and a verifier in front of the engine at `url`."""
    settings = Settings(port=0, upstream=(url,), upstream_api=api, bundle=bundle)
    async with (
        UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier,
        EdgeClient(
            device=device,
            verifier=verifier.transport.url,
            offline_after=600.0,
            settle_seconds=600.0,
            max_new_tokens=tokens,
        ) as client,
    ):
        await client.wait_online(60)
        yield client
    # A verifier refers to itself in a circle. In a program of its own that does not matter;
    # here hundreds of them would wait for the collector, each with two tokenizers of 150,000 tokens.
    gc.collect()


def tables(result: Mapping[str, Any]) -> str:
    """A row for each engine and interface."""
    shown = listing(
        result["runs"],
        {
            "engine": "{engine}",
            "--upstream-api": "`{api}`",
            "answers cut": "{cut} of {answers}",
            "verified": "{verified} of {answers}",
            "same text as without a cut": "{same} of {answers}",
            "the engine repeats itself without a cut": "{repeated} of {asked_again}",
        },
    )
    return f"{shown}\n\nGreedy, {result['prompts']} prompts, up to {result['tokens']} tokens of the device."
