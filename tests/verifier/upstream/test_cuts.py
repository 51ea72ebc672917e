"""Our own endpoint as somebody else's: through cuts the text is the one that it gives without them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator

import httpx2 as httpx
import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.openai.endpoint import endpoint
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from edge_client import Done, EdgeClient, Retract, Token
from moa.process.listening import Port
from tests.edge.serve.pair import SETTINGS, served
from tests.verifier.upstream.scripted import Tasks, closed

ENDPOINT = dataclasses.replace(SETTINGS, openai="0")
PROMPTS = ["What is 17 plus 25?", "Tell me a short story with Ada, a fox and a garden."]
SAMPLED = {"temperature": 0.8, "seed": 7}
pytestmark = pytest.mark.usefixtures("short_pauses")


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """An OpenAI endpoint of the embedded target."""
    verifier = Verifier(served(), SETTINGS)
    with Port("127.0.0.1", 0) as port:
        async with (
            verifier.running(),
            endpoint(
                verifier,
                port=port,
                tokenizer=served().target.tokenizer,
                settings=ENDPOINT,
                auth=Authenticator(),
            ) as address,
        ):
            yield address


class Cutting:
    """A proxy whose connections are reset after so many bytes of an answer; infinite: never."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self.bytes_left = float("inf")
        self.goes_away = False
        """Whether nothing listens any more once a connection was cut."""
        self.cuts = 0
        self._open: set[asyncio.StreamWriter] = set()
        """Those who are connected: one that waits for its next request serves a retry, too."""

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except ConnectionError:
            await closed(writer)
            return

        async def up() -> None:
            while data := await reader.read(4096):
                back.write(data)
                await back.drain()

        sending = asyncio.create_task(up())
        self._open.add(writer)
        try:
            while data := await there.read(256):
                self.bytes_left -= len(data)
                if self.bytes_left < 0:
                    self.cuts += 1
                    self.bytes_left = float("inf")
                    writer.transport.abort()
                    if self.goes_away:
                        self._port = 1  # nothing listens there
                        for other in self._open:
                            other.transport.abort()
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._open.discard(writer)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await closed(writer, back)


async def text_of(client: EdgeClient, prompt: str, **how: float) -> tuple[str, Done]:
    """The answer, followed event by event as a reader sees it."""
    shown: list[str] = []
    async for event in client.generate(prompt, **how):  # type: ignore[arg-type]
        match event:
            case Token(text=text):
                shown.append(text)
            case Retract(start=start, stop=stop):
                del shown[len(shown) - (stop - start) :]
            case Done():
                assert "".join(shown) == event.text
                return event.text, event
    raise AssertionError("no end")


@pytest.fixture
async def pair(api: str) -> AsyncIterator[tuple[Cutting, EdgeClient]]:
    async with engine() as url:
        proxy = Cutting(url)
        connections = Tasks(proxy.carry)
        server = await asyncio.start_server(connections, "127.0.0.1", 0)
        through = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        settings = Settings(port=0, upstream=(through,), upstream_api=api)
        async with (
            UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier,
            EdgeClient(
                verifier=verifier.transport.url, settle_seconds=300, max_new_tokens=60
            ) as client,
        ):
            await client.wait_online(60)
            yield proxy, client
        server.close()
        await connections.end()


@pytest.mark.parametrize("api", ["auto", "chat", "chat-whole"])
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_cuts_change_nothing(
    pair: tuple[Cutting, EdgeClient], how: dict[str, float], api: str
) -> None:
    """Our endpoint's chance is a function of seed and position, so sampled text goes on, too, and is
    the same when it is asked for anew."""
    proxy, client = pair
    rng = random.Random(5)
    for prompt in PROMPTS:
        plain, done = await text_of(client, prompt, **how)
        assert done.verified
        before = proxy.cuts
        for _ in range(5 if api == "auto" else 2):
            proxy.bytes_left = rng.randrange(50, 3000)
            text, done = await text_of(client, prompt, **how)
            assert text == plain
            assert done.verified
        assert proxy.cuts > before


@pytest.mark.parametrize("api", ["auto", "chat"])
async def test_the_text_is_the_one_that_the_endpoint_gives_itself(
    pair: tuple[Cutting, EdgeClient],
) -> None:
    """Its prompt, too: the start token of the template is there, which this tokenizer never adds."""
    proxy, client = pair
    text, done = await text_of(client, PROMPTS[1])
    messages = [{"role": "user", "content": PROMPTS[1]}]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy._port}") as http:
        asked = {"messages": messages, "max_tokens": 60}
        plain = (await http.post("/v1/chat/completions", json=asked, timeout=60)).json()
    assert text == plain["choices"][0]["message"]["content"]
    read = done.stats["upstream_usage"]["prompt_tokens"]
    assert read == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize("api", ["auto", "chat"])
async def test_an_upstream_that_goes_and_comes_back_confirms_what_the_device_wrote(
    pair: tuple[Cutting, EdgeClient],
) -> None:
    proxy, client = pair
    plain, _ = await text_of(client, PROMPTS[1])
    port = proxy._port
    # Where its answer has just begun: a busy engine sends it in fewer pieces, of fewer bytes in all.
    proxy.bytes_left = 600
    proxy.goes_away = True
    statuses: list[str] = []
    shown: list[str] = []
    async for event in client.generate(PROMPTS[1]):
        match event:
            case Token(text=text, status=status):
                statuses.append(status)
                shown.append(text)
                if status == "provisional":
                    proxy._port = port
            case Retract(start=start, stop=stop):
                del shown[len(shown) - (stop - start) :]
            case Done(text=text, verified=verified):
                assert verified
                assert text == "".join(shown) == plain
    assert "provisional" in statuses
