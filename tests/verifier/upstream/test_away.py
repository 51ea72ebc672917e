"""An upstream that dies in the middle of an answer, and is back later."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.contract import Continuation, Piece, UpstreamError
from edge_client import Done
from edge_client.cli.chat import ChatLoop
from edge_client.cli.dialogue import Dialogue
from edge_client.client import EdgeClient
from edge_client.settings import ClientSettings
from edge_client.turn.deadlines import Patience
from moa.errors import LinkError
from moa.sampling import SamplingSettings
from tests.edge.test_offline_check import Waits, sees
from tests.verifier.upstream.scripted import (
    Job,
    Request,
    Upstream,
    chunk,
    engine_and_turn,
    running,
    stream,
    up,
    whole,
)

SAID = " The upstream says this about a dog and its garden."
QUESTION = "Tell me a story about a dog and a garden."
pytestmark = pytest.mark.usefixtures("short_pauses")


class Dying:
    """Says half of its answer, and fails from then on until it is `back`; the rest comes then."""

    def __init__(self) -> None:
        self.back = False
        self.failed = 0
        """Requests that it has failed since it died."""

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        prompt = str(request.body["prompt"])
        said = next(at for at in range(len(SAID), -1, -1) if prompt.endswith(SAID[:at]))
        if self.back:
            answer = stream(chunk(SAID[said:]), chunk("", "stop"), "data: [DONE]\n\n")
        elif not said and not self.failed:
            answer = stream(chunk(SAID[: len(SAID) // 2]), 0.01)  # cut there
        else:
            self.failed += 1
            answer = whole("", "503 Service Unavailable")
        await answer(request, writer)


@contextlib.asynccontextmanager
async def behind(upstream: Upstream) -> AsyncIterator[ClientSettings]:
    """A verifier in front of it; yields the settings of a device."""
    settings = Settings(port=0, upstream=(upstream.url,), upstream_api="completions")
    async with UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier:
        yield ClientSettings(
            verifier=verifier.transport.url,
            offline_after=0.05,
            settle_seconds=0.1,
            max_new_tokens=40,
            max_offline_tokens=40,
        )


async def chat_behind(upstream: Upstream, reader: Waits) -> Dialogue:
    """A chat by these lines; returns what it has become."""
    async with behind(upstream) as settings:
        dialogue = Dialogue(settings)
        console = Console(file=reader.screen, width=200, markup=False, highlight=False)
        async with EdgeClient(settings) as client, client.conversation() as conversation:
            await client.wait_online(60)
            parts: Any = (client, conversation, dialogue, reader, console)
            await ChatLoop(*parts).run()
    return dialogue


async def waits(reader: Waits) -> None:
    """Until the check waits for the upstream."""
    async with asyncio.timeout(60):
        while "checked when the verifier is back" not in reader.shown[-1]:
            await asyncio.sleep(0.01)


async def test_a_chat_corrects_its_answer_when_the_upstream_is_back() -> None:
    dying = Dying()
    screen = io.StringIO()

    async def fails_again(reader: Waits) -> None:
        """Until it has been asked in the check and has failed."""
        failed_before = dying.failed
        async with asyncio.timeout(60):
            while dying.failed < failed_before + 2:
                await asyncio.sleep(0.01)

    async def returns(reader: Waits) -> None:
        dying.back = True

    async with running(dying) as upstream:
        reader = Waits(screen, QUESTION, waits, fails_again, waits, returns, sees("· verified"))
        dialogue = await chat_behind(upstream, reader)
    assert dialogue.messages[1]["content"].strip() == SAID.strip()
    assert "the verifier is back, and corrects the last answer:" in screen.getvalue()
    assert "it stays so" not in screen.getvalue()


async def test_a_program_that_asks_for_a_check_is_not_kept_until_the_upstream_is_back() -> None:
    """Its next question was asked when the upstream was back."""
    dying = Dying()
    async with (
        running(dying) as upstream,
        behind(upstream) as settings,
        EdgeClient(settings) as client,
        client.conversation() as conversation,
    ):
        await client.wait_online(60)
        async with asyncio.timeout(60):
            answer = [event async for event in conversation.generate(QUESTION)]
            assert isinstance(answer[-1], Done)
            assert not answer[-1].verified
            check = [event async for event in conversation.recheck()]
            assert isinstance(check[-1], Done)
            assert not check[-1].verified
            dying.back = True
            while conversation.unverified:
                check = [event async for event in conversation.recheck()]
    assert isinstance(check[-1], Done)
    assert check[-1].text.strip() == SAID.strip()


async def test_all_answers_of_an_outage_wait_for_the_upstream() -> None:
    """The check of several ended as soon as the upstream had refused for as long as an answer is
    waited for."""
    dying = Dying()
    screen = io.StringIO()

    async def fails_on(reader: Waits) -> None:
        failed_before = dying.failed
        async with asyncio.timeout(60):
            while dying.failed == failed_before:
                await asyncio.sleep(0.01)

    async def returns(reader: Waits) -> None:
        dying.back = True

    async def both_are_verified(reader: Waits) -> None:
        async with asyncio.timeout(60):
            while screen.getvalue().count("· verified") < 2:
                await asyncio.sleep(0.01)

    async with running(dying) as upstream:
        # Else the next question waits for the check, which waits for the upstream.
        questions = (QUESTION, fails_on, waits, "And another?", fails_on)
        reader = Waits(screen, *questions, returns, both_are_verified)
        dialogue = await chat_behind(upstream, reader)
    assert "it stays so" not in screen.getvalue()
    for answer in dialogue.messages[1::2]:
        assert answer["content"].strip() == SAID.strip()


async def test_a_program_that_waits_for_the_verifier_hears_that_the_upstream_is_away() -> None:
    """It went on at once: what verifies was a part of its own program."""
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind(("127.0.0.1", 0))
        nowhere = Upstream(whole(""), url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        async with behind(nowhere) as settings, EdgeClient(settings) as device:
            with pytest.raises(LinkError, match="nothing listens there"):
                await device.wait_online(60)


async def test_a_device_knows_that_nothing_listens_where_its_upstream_should_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It writes as fast as it can: the pace of text that may be withdrawn soon would take 20 minutes
    for a token here."""
    monkeypatch.setattr(ClientSettings, "patience", Patience(late_pace=1200.0, settle_unheard=0.0))
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind(("127.0.0.1", 0))
        nowhere = Upstream(whole(""), url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        async with behind(nowhere) as settings, EdgeClient(settings) as device:
            await up(device)
            async with asyncio.timeout(60):
                events = [event async for event in device.generate(QUESTION)]
    assert device.link is not None
    assert "is not reached" in device.link.behind.away
    done = events[-1]
    assert isinstance(done, Done)
    assert done.stats["tokens"] > 8
    assert not done.verified


async def test_an_upstream_that_fails_while_its_answer_is_broken_off_leaves_nothing_behind() -> (
    None
):
    """Else asyncio logs a traceback of an exception that was never retrieved."""
    job = Job()

    async def go_on(asked: Continuation) -> AsyncGenerator[Piece, None]:
        job.cancelled = True
        raise UpstreamError("no upstream may be asked yet")
        yield Piece()

    upstreams = SimpleNamespace(go_on=go_on)
    engine, turn = engine_and_turn(upstreams, job)
    asked = Continuation(ids=[1], text="", sampling=SamplingSettings(), most=1)
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    assert [piece async for piece in engine._pieces(turn, asked)] == []
    gc.collect()
    assert complaints == []
