"""An upstream that has taken a connection and said nothing yet is called neither up nor away."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from collections.abc import AsyncIterator

import httpx2 as httpx
import pytest
from rich.console import Console

from cloud_verifier.settings import Settings
from cloud_verifier.upstream import app, client
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import UpstreamError
from edge_client import EdgeClient, Link
from edge_client.cli import chat, doctor, options
from edge_client.cli.serve import tell_of_the_verifier
from edge_client.serve.answerer import EdgeAnswerer
from edge_client.settings import ClientSettings
from tests.verifier.upstream.scripted import (
    MODELS,
    Request,
    Tasks,
    chunk,
    closed,
    running,
    stream,
    up,
    whole,
)

GOOD = stream(chunk(" The upstream says this."), chunk("", "stop"), "data: [DONE]\n\n")
UNANSWERED = "the upstream has not answered yet"


@contextlib.asynccontextmanager
async def unanswered(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A verifier in front of an upstream that is silent until the event is set, whose model the
    settings name; yields the verifier's address, and the event."""
    monkeypatch.setattr(app, "_PROBED_SECONDS", 0.0)
    speaks = asyncio.Event()

    async def models(request: Request, writer: asyncio.StreamWriter) -> None:
        await speaks.wait()
        await whole(MODELS)(request, writer)

    async with running(GOOD, models) as upstream:
        settings = Settings(
            port=0,
            upstream=(upstream.url,),
            upstream_api="completions",
            upstream_model="big",
        )
        async with UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier:
            yield verifier.transport.url, speaks
            speaks.set()


async def test_an_endpoint_calls_itself_online_only_once_its_upstream_has_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with unanswered(monkeypatch) as (url, speaks), EdgeClient(verifier=url) as device:
        await up(device)
        answerer = EdgeAnswerer(device)
        assert answerer.status()["link"] == "late"
        assert await answerer.unverified() == UNANSWERED
        telling = asyncio.create_task(tell_of_the_verifier(device, 0.01))
        told = ""
        async with asyncio.timeout(60):
            while "online: text is verified by" not in told:
                told += capsys.readouterr().err
                if "none of it is verified" in told:
                    speaks.set()
                await asyncio.sleep(0.01)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        assert answerer.status()["link"] == "online"
    assert f"not online yet: {UNANSWERED}\n" in told
    assert told.count("online") == 2


async def test_a_chat_says_that_its_upstream_has_not_answered_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with unanswered(monkeypatch) as (url, speaks), EdgeClient(verifier=url) as device:
        await up(device)
        for has_answered in (False, True):
            if has_answered:
                speaks.set()
            else:
                monkeypatch.setattr(chat, "_LOOK_SECONDS", 0.05)
            console = Console(file=io.StringIO(), width=200)
            trouble = await chat._welcome(device, console)
            said = console.file.getvalue()  # type: ignore[attr-defined]
            assert (trouble == "") == has_answered
            assert (UNANSWERED in said) != has_answered
            assert ("\nonline\n" in said) == has_answered
            monkeypatch.setattr(chat, "_LOOK_SECONDS", 60.0)


async def test_doctor_calls_an_upstream_that_says_nothing_neither_up_nor_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_UPSTREAM_SECONDS", 0.05)
    waited_for: list[str] = []

    def waiting(what: str) -> contextlib.AbstractContextManager[None]:
        waited_for.append(what)
        return contextlib.nullcontext()

    monkeypatch.setattr(options, "waiting", waiting)
    async with unanswered(monkeypatch) as (url, _):
        checks = {one.name: one async for one in doctor.examine(ClientSettings(verifier=url))}
    assert (checks["upstream"].state, checks["upstream"].finding) == ("warning", UNANSWERED)
    assert "verifier" not in checks
    assert waited_for == [f"connecting to {url}"], "a terminal is told"


async def test_an_answer_calls_the_link_online_only_once_its_upstream_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links: list[Link] = []
    async with (
        unanswered(monkeypatch) as (url, speaks),
        EdgeClient(verifier=url, offline_after=0.05) as device,
    ):
        await up(device)
        async for event in device.generate("What is 17 plus 25?"):
            if isinstance(event, Link):
                links.append(event)
                speaks.set()
    assert links[0] == Link(state="late", detail=UNANSWERED)
    assert links[-1].state == "online"


# ---- why nothing came, in words


@contextlib.asynccontextmanager
async def listening(*, closes: bytes | None = None) -> AsyncIterator[int]:
    """A port whose connections are closed with these bytes once something has come; without any,
    nobody ever says a word."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(2**16)
            if closes is None:
                await reader.read()
            else:
                writer.write(closes)
        finally:
            await closed(writer)

    connections = Tasks(serve)
    server = await asyncio.start_server(connections, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await connections.end()


async def why_away(url: str) -> str:
    """What is said of an upstream at this address."""
    upstreams = Upstreams([url])
    with pytest.raises(UpstreamError) as error:
        await upstreams.probe()
    await upstreams.close()
    return error.value.line()


PLAIN = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"
CUT = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"


@pytest.mark.parametrize(
    ("scheme", "closes", "says"),
    [
        ("http", None, "the upstream is not reached: it says nothing (is {} its address?)"),
        ("https", None, "the upstream is not reached: it does not speak TLS (did you mean {}?)"),
        ("https", PLAIN, "the upstream is not reached: it does not speak TLS (did you mean {}?)"),
        ("http", b"", "the upstream closed the connection without an answer (is {} its address?)"),
        ("http", CUT, "the upstream broke off its answer (is {} its address?)"),
    ],
)
async def test_why_nothing_came_is_said_in_our_words(
    scheme: str, closes: bytes | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PROBE", httpx.Timeout(0.5))
    async with listening(closes=closes) as port:
        line = await why_away(f"{scheme}://127.0.0.1:{port}/v1")
    assert line == says.format(f"http://127.0.0.1:{port}/v1")


async def test_a_port_where_nothing_listens_and_a_name_that_is_none_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:  # bound, and nothing listens
        taken.bind(("127.0.0.1", 0))
        line = await why_away(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
    assert "is not reached: nothing listens there (" in line

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    line = await why_away("http://nosuch.invalid/v1")
    assert "its name is not found" in line
    assert "Errno" not in line


@pytest.mark.parametrize(
    ("said", "is_doubted"), [("File Not Found", True), ("no model 'small'", False)]
)
async def test_an_address_below_which_nothing_is_found_is_doubted(
    said: str, is_doubted: bool
) -> None:
    not_found = whole({"error": {"message": said}}, "404 Not Found")
    async with running(not_found, not_found) as upstream:
        line = await why_away(upstream.url)
    assert said in line
    assert (f"(is {upstream.url} its address?)" in line) == is_doubted
