"""An answer is cut at a random byte: what its reader gets from four clients of the same endpoint.

The endpoint is our own, with the embedded target, or one that --upstream names. A proxy resets the
connection after so many bytes of the answer's body, and every later one until the endpoint is
"back". The `openai` package, LiteLLM's router and LangChain's fallbacks have the device's small
model as second endpoint where they can use one; ours is `--upstream` with the same small model on
the device. All get the same prompts, cuts and seeds; the uninterrupted text is asked for first.

LiteLLM and LangChain are not among our packages: --rivals names the Python of an environment that
has them, else they are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx

from benchmarks.kit.figures import listing
from benchmarks.kit.llama_server import llama_server
from benchmarks.kit.progress import Progress, say
from cloud_verifier.app import Verifier
from cloud_verifier.model import load
from cloud_verifier.openai.endpoint import endpoint as target_endpoint
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Confirm, Done, Retract, Token
from edge_client.serve.endpoint import endpoint as device_endpoint
from edge_client.serve.settings import ServeSettings
from moa.errors import MoaError
from moa.process.listening import Port

NEVER = 0.0
"""As seconds: the endpoint does not come back."""
PROMPTS = (
    "Tell me a short story with Ada, a fox and a garden.",
    "Tell me a short story with Tom, a boat and a lamp.",
    "Who are you?",
    "Tell me a short story with Mia, a cat and a river.",
)
_SCRIPT = Path(__file__).with_name("cut_clients.py")
_SETTLE_SECONDS = 45.0
"""Ours waits so long for the endpoint once its text is complete: past the longest outage."""
_REPEATED = 24
"""Characters of an answer's beginning that make it begin again."""
_SAMPLED = {"temperature": 0.8, "seed": 7}
_GREEDY = {"temperature": 0.0, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How often, and against what."""

    places: int = 12
    """Places of the cut for each time away, greedy and sampled each."""
    away: tuple[float, ...] = (2.0, 20.0, NEVER)
    """Seconds until the endpoint is back; 0: never."""
    tokens: int = 96
    """Tokens of an answer at most."""
    at_once: int = 12
    """Answers of a client at once."""
    rivals: str = ""
    """Python of an environment with litellm and langchain-openai."""
    upstream: str = ""
    """Another OpenAI endpoint, such as a service's https://api.example.com/v1."""
    gguf: str = ""
    """Or a llama.cpp server over this GGUF file (wheel xllamacpp), whose replay is a client more."""
    sampled: bool = True
    """Whether half of the answers are sampled. Ours goes on behind a cut with another draw where the
    endpoint does not score tokens, which cannot be compared with the text without a cut."""
    bundle: str = ""
    """The device's bundle; the embedded one without."""

    @property
    def ways(self) -> tuple[bool, ...]:
        """Whether texts are sampled: greedy ones, and sampled ones where these are asked for."""
        return (False, True) if self.sampled else (False,)


@dataclass(frozen=True)
class Case:
    """An answer that will be cut."""

    number: int
    away: float
    sampled: bool
    prompt: int
    at: int
    """Bytes of the body before the cut."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The request's settings."""
        return _SAMPLED if self.sampled else _GREEDY


@dataclass
class Seen:
    """What the reader has seen of an answer."""

    text: str = ""
    unmarked: str = ""
    """What is shown as the target's at the end."""
    pieces: list[float] = field(default_factory=list)
    ended: bool = False
    """Whether the client thinks that the answer is complete."""
    withdrawn: int = 0
    marked: bool = False
    """Whether text was shown as the device's own."""
    alone_at: float = 0.0
    """When the first of it was shown."""
    cut_at: float = 0.0
    error: str = ""


class Outage:
    """A proxy that resets an answer after so many bytes of it, and is away then."""

    def __init__(self, url: str, at: int, away: float) -> None:
        place = httpx.URL(url)
        self._there = (place.host, place.port or 80)
        self._left = at
        self._away = away
        self.path = place.path
        self.url = ""
        self.cut_at = 0.0
        self.seen_bytes = 0
        self._carried: set[asyncio.Task[None]] = set()

    @property
    def _is_away(self) -> bool:
        if not self.cut_at:
            return False
        return self._away == NEVER or time.monotonic() < self.cut_at + self._away

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Outage]:
        """Serve while the body runs."""
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{self.path}"
        try:
            yield self
        finally:
            server.close()
            carried = list(self._carried)
            for task in carried:
                task.cancel()
            await asyncio.gather(*carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)
        if self._is_away:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._there)
        answers = False

        async def up() -> None:
            nonlocal answers
            while data := await reader.read(65536):
                answers = answers or data.startswith(b"POST ")
                back.write(data)
                await back.drain()

        sending = asyncio.create_task(up())
        try:
            while data := await there.read(128):
                if answers:
                    self.seen_bytes += len(data)
                if answers and not self.cut_at and self.seen_bytes >= self._left > 0:
                    self.cut_at = time.monotonic()
                if self._is_away:
                    writer.transport.abort()
                    return
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass  # nobody but `running` cancels it
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()
            back.close()


@dataclass
class World:
    """The endpoint, the small model's endpoint, and the uninterrupted texts."""

    url: str
    model: str
    small_url: str
    small: str
    device: Device
    options: Options
    truth: dict[tuple[int, bool], str] = field(default_factory=dict)
    sizes: dict[tuple[int, bool], int] = field(default_factory=dict)
    repeats: int = 0
    """How many of the uninterrupted texts came again when they were asked for again."""

    async def learn(self) -> None:
        """Ask for every text without a cut, twice."""
        for prompt in range(len(PROMPTS)):
            for sampled in self.options.ways:
                case = Case(0, NEVER, sampled, prompt, 0)
                for again in (False, True):
                    text, size = await self._ask(case)
                    if again:
                        self.repeats += text == self.truth[prompt, sampled]
                    self.truth[prompt, sampled] = text
                    self.sizes[prompt, sampled] = size

    async def _ask(self, case: Case) -> tuple[str, int]:
        """The text, and the bytes that it came in."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": PROMPTS[case.prompt]}],
            "stream": True,
            "max_tokens": self.options.tokens,
            **case.sampling,
        }
        text = ""
        size = 0
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream("POST", f"{self.url}/chat/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                size += len(line.encode()) + 1
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
        if not text:
            raise MoaError(f"the endpoint does not answer: HTTP {answer.status_code}")
        return text, size

    def task(self, case: Case, proxy: Outage) -> dict[str, Any]:
        """The case for another client."""
        return {
            "id": case.number,
            "url": proxy.url,
            "model": self.model,
            "fallback": self.small_url,
            "small": self.small,
            "prompt": PROMPTS[case.prompt],
            "tokens": self.options.tokens,
            **case.sampling,
        }


async def measure(options: Options) -> dict[str, Any]:
    """Every client under the same cuts."""
    logging.getLogger("cloud_verifier").setLevel(logging.ERROR)  # that it is away is meant so
    async with world(options) as there:
        await there.learn()
        cases = cases_of(there, options)
        say(f"{len(cases)} cuts for each client")
        runs = []
        clients = [("openai", sys.executable)]
        if options.rivals:
            clients += [("litellm", options.rivals), ("langchain", options.rivals)]
        if options.gguf:
            clients.append(("replay", sys.executable))
        for name, python in clients:
            version, seen = await through_other(there, name, python, cases)
            runs += rows(version, there, cases, seen)
        runs += rows("ours, --upstream", there, cases, await through_ours(there, cases))
    return {
        "cuts": len(cases),
        "prompts": len(PROMPTS),
        "sampled": options.sampled,
        "repeats": there.repeats,
        "model": there.model,
        "offline_after": 1.0,
        "runs": runs,
        "faults": sum(run["wrong"] for run in runs if run["client"].startswith("ours")),
    }


def cases_of(there: World, options: Options) -> list[Case]:
    """The same random places for every time away."""
    rng = random.Random(11)
    cases: list[Case] = []
    for place in range(options.places):
        for sampled in options.ways:
            prompt = place % len(PROMPTS)
            at = rng.randrange(1, there.sizes[prompt, sampled])
            for away in options.away:
                cases.append(Case(len(cases), away, sampled, prompt, at))
    return cases


@contextlib.asynccontextmanager
async def world(options: Options) -> AsyncIterator[World]:
    """Both endpoints: the small model's in this process, and ours, too."""
    device = Device.load(options.bundle)
    async with contextlib.AsyncExitStack() as stack:
        small = await stack.enter_async_context(EdgeClient(device=device, offline=True))
        port = stack.enter_context(Port("127.0.0.1", 0))
        small_url = await stack.enter_async_context(
            device_endpoint(small, ServeSettings(port=0), "small", port)
        )
        if options.gguf:
            url = stack.enter_context(llama_server(options.gguf, parallel=options.at_once))
        else:
            url = options.upstream or await stack.enter_async_context(own_endpoint(options))
        async with httpx.AsyncClient() as http:
            listed = (await http.get(f"{url}/models")).json()["data"]
        yield World(
            url=url,
            model=listed[0]["id"],
            small_url=f"{small_url}/v1",
            small="small",
            device=device,
            options=options,
        )


@contextlib.asynccontextmanager
async def own_endpoint(options: Options) -> AsyncIterator[str]:
    """The embedded target behind our OpenAI endpoint."""
    settings = Settings(port=0, slots=options.at_once + 4, dtype="float32", openai="0")
    served = load(settings)
    verifier = Verifier(served, settings)
    with Port("127.0.0.1", 0) as port:
        async with (
            verifier.running(),
            target_endpoint(
                verifier,
                port=port,
                tokenizer=served.target.tokenizer,
                settings=settings,
                auth=Authenticator(),
            ) as address,
        ):
            yield f"{address}/v1" if not address.endswith("/v1") else address


# ---- clients


async def through_other(
    there: World, client: str, python: str, cases: Sequence[Case]
) -> tuple[str, dict[int, Seen]]:
    """Its version, and what its readers see."""
    async with contextlib.AsyncExitStack() as stack:
        proxies = {
            case.number: await stack.enter_async_context(
                Outage(there.url, case.at, case.away).running()
            )
            for case in cases
        }
        task = {
            "client": client,
            "at_once": there.options.at_once,
            "cases": [there.task(case, proxies[case.number]) for case in cases],
        }
        return await other_client(python, task, proxies)


async def other_client(
    python: str, task: Mapping[str, Any], proxies: Mapping[int, Outage]
) -> tuple[str, dict[int, Seen]]:
    """Run `cut_clients.py` and read what it says."""
    process = await asyncio.create_subprocess_exec(
        python,
        str(_SCRIPT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(task).encode())
    process.stdin.close()
    version = ""
    seen = {number: Seen() for number in proxies}
    progress = Progress(len(seen), f"answers of {task['client']}")
    async for line in process.stdout:
        if not line.startswith(b"{"):
            continue  # a package that talks
        told = json.loads(line)
        if "version" in told:
            version = told["version"]
            continue
        one = seen[told["id"]]
        if "text" in told:
            one.text += told["text"]
            one.pieces.append(told["at"])
        else:
            one.error = told["error"]
            one.ended = not one.error and bool(one.text)
            progress.step()
    if await process.wait():
        raise MoaError(f"{task['client']} did not run in {python}")
    for number, one in seen.items():
        one.unmarked = one.text
        one.cut_at = proxies[number].cut_at
    return version, seen


async def through_ours(there: World, cases: Sequence[Case]) -> dict[int, Seen]:
    """What readers of a device with `--upstream` see."""
    room = asyncio.Semaphore(there.options.at_once)
    progress = Progress(len(cases), "answers of ours")
    seen: dict[int, Seen] = {}

    async def one(case: Case) -> None:
        async with room:
            seen[case.number] = await ours(there, case)
        progress.step()

    await asyncio.gather(*map(one, cases))
    return seen


async def ours(there: World, case: Case) -> Seen:
    """One answer."""
    seen = Seen()
    shown: list[tuple[str, bool]] = []
    first = -1
    async with Outage(there.url, case.at, case.away).running() as proxy:
        settings = Settings(
            port=0,
            upstream=(proxy.url,),
            upstream_model=there.model,
            upstream_api="chat",
            bundle=there.options.bundle,
        )
        async with (
            UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier,
            EdgeClient(
                device=there.device,
                verifier=verifier.transport.url,
                settle_seconds=_SETTLE_SECONDS,
                max_new_tokens=there.options.tokens,
                **case.sampling,
            ) as client,
        ):
            await client.wait_online(60)
            chat = [{"role": "user", "content": PROMPTS[case.prompt]}]
            async for event in client.generate(chat):
                match event:
                    case Token(position=position, text=text, status=status):
                        first = position if first < 0 else first
                        shown.append((text, status == "verified"))
                        seen.pieces.append(time.monotonic())
                        if status != "verified" and not seen.marked:
                            seen.marked = True
                            seen.alone_at = seen.pieces[-1]
                    case Confirm(start=start, stop=stop):
                        for at in range(start - first, stop - first):
                            shown[at] = (shown[at][0], True)
                    case Retract(start=start, stop=stop):
                        del shown[len(shown) - (stop - start) :]
                        seen.withdrawn += 1
                    case Done():
                        seen.text = event.text
                        seen.ended = event.reason not in ("link", "guard")
                        seen.unmarked = (
                            event.text if event.verified else verified_text(shown, event.text)
                        )
        seen.cut_at = proxy.cut_at
    return seen


def verified_text(shown: Sequence[tuple[str, bool]], text: str) -> str:
    """The part that is not marked as the device's own: what came verified, first."""
    length = 0
    for piece, verified in shown:
        if not verified:
            break
        length += len(piece)
    return text[:length]


# ---- what it comes to


def rows(
    client: str, there: World, cases: Sequence[Case], seen: Mapping[int, Seen]
) -> list[dict[str, Any]]:
    """A row for each time away."""
    found = []
    for away in sorted({case.away for case in cases}, key=lambda seconds: seconds or 1e9):
        mine = [case for case in cases if case.away == away]
        judged = [judge(seen[case.number], there.truth[case.prompt, case.sampled]) for case in mine]
        waits = [one["next"] for one in judged if one["next"] is not None]
        counts = {
            name: sum(bool(one[name]) for one in judged) for name in judged[0] if name != "next"
        }
        found.append(
            {
                "client": client,
                "away": away,
                "asked": len(mine),
                **counts,
                "timeouts": sum(seen[case.number].error.startswith("Timeout") for case in mine),
                "went_on": len(waits),
                "next": median(waits) if waits else None,
                "errors": sorted({seen[case.number].error[:120] for case in mine} - {""}),
            }
        )
    return found


def judge(seen: Seen, truth: str) -> dict[str, Any]:
    """What an answer is, beside the uninterrupted one."""
    begins = truth[:_REPEATED]
    foreign = not truth.startswith(seen.unmarked)
    # Text that was on its way may still come after a cut: who ends with an error has not gone on.
    after = [piece for piece in seen.pieces if seen.ended and piece >= seen.cut_at > 0]
    if seen.marked:
        after = [seen.alone_at]
    same = seen.ended and seen.unmarked == truth
    return {
        "ended": seen.ended,
        "same": same,
        "twice": len(begins) == _REPEATED and seen.text.count(begins) > truth.count(begins),
        "lost": not foreign and seen.text == seen.unmarked and len(seen.unmarked) < len(truth),
        "wrong": foreign,
        "marked": seen.text != seen.unmarked,
        "corrected": seen.marked and same,
        "next": after[0] - seen.cut_at if after else None,
    }


def tables(result: Mapping[str, Any]) -> str:
    """A row for each client and time away."""

    def share(name: str) -> Any:
        return lambda run: f"{run[name]} of {run['asked']}"

    shown = listing(
        result["runs"],
        {
            "client": "{client}",
            "endpoint back": lambda run: f"after {run['away']:g} s" if run["away"] else "never",
            "an answer with an end": share("ended"),
            "seconds to the next text": lambda run: (
                f"{run['next']:.2f} ({run['went_on']})" if run["next"] is not None else "never"
            ),
            "same text as without the cut": share("same"),
            "text twice": share("twice"),
            "text lost": share("lost"),
            "other text shown as the model's": share("wrong"),
            "text left marked as the device's own": share("marked"),
            "device's text first, then the model's": share("corrected"),
        },
    )
    sampled = result.get("sampled", True)  # results of 2026-11-25 do not say so
    kinds = "half greedy, half sampled" if sampled else "greedy"
    texts = result["prompts"] * (2 if sampled else 1)
    late = sum(run["timeouts"] for run in result["runs"])
    return (
        f"{shown}\n\n{result['cuts']} cuts for each client at random bytes of the answer's body, {kinds}; "
        "connections are reset until the endpoint is back. Seconds: median of those that went on, their "
        f"number in brackets. The endpoint repeated {result['repeats']} of {texts} uninterrupted texts "
        f"exactly. {late} answers of others were given up after 300 s. Ours waits a second before the device writes, "
        "and up to 45 s for the endpoint at the end."
    )
