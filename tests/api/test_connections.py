"""Connections that send nothing, or not enough: bounded in number and time, whoever opens them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest

from moa.api import connections
from moa.api.answer import AnswerEvent, AnswerRequest
from moa.api.connections import serving
from moa.process import half_open, listening
from moa.process.listening import Port
from tests.api.scripted import (
    PATIENCE,
    browser,
    chat,
    endpoint,
    post_from_a_thread,
    says,
    served,
)
from tests.api.test_app import CHAT
from tests.torture.tls import certificate, trusting

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
LIMITS = ("_HEAD_SECONDS", "_BODY_SECONDS", "_IDLE_SECONDS")


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent nothing."""
    return await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"G",
        HEAD,
        HEAD + b"Content-Length: 9\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["nothing", "a byte", "half a head", "half a body", "a request, and nothing more"],
)
async def test_a_connection_without_a_whole_request_ends(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LIMITS:
        monkeypatch.setattr(connections, name, 0.1)
    async with served(says("x")) as (_, address):
        reader, writer = await connect(address)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                await reader.read()
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_stops_tells_whoever_waits_for_an_answer(
    stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_ENDING_SECONDS", 0.1)
    caplog.set_level("WARNING")
    *begun, _ = says("x")
    never = asyncio.Event()
    async with served(lambda ask: [*begun, never]) as (answerer, address):
        asking = asyncio.create_task(post_from_a_thread(address, CHAT, json=chat(stream=stream)))
        async with asyncio.timeout(PATIENCE):
            await answerer.waits.wait()
            await asyncio.sleep(0)  # the first piece of a stream is on its way
    reply = await asking
    if stream:
        *_, error, done = reply.text.split("\n\n")[:-1]
        assert done == "data: [DONE]"
        told = msgspec.json.decode(error.removeprefix("data: "))
    else:
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        told = reply.json()
    assert told["error"]["code"] == "server_stopping"
    (line,) = caplog.messages
    assert line.endswith("before their answers were complete: 1")


async def test_a_client_that_leaves_within_its_body_is_no_defect_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(says("x")) as (_, address), browser(address) as client:
        reader, writer = await connect(address)
        writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            await reader.readline()  # the body is waited for
            writer.close()
            while "moa_api_hang_ups_total 1.0" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
    assert not caplog.records


async def test_a_client_that_leaves_in_mid_stream_is_counted_and_so_is_what_it_has_cost() -> None:
    """Neither was: only a whole answer that nobody waited for was a hang-up."""
    never = asyncio.Event()
    begins = [*says("x", "y")[:-1], never, says("x", "y")[-1]]
    async with served(lambda ask: begins) as (answerer, address), browser(address) as client:
        body = msgspec.json.encode(chat(stream=True))
        reader, writer = await connect(address)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(PATIENCE):
            while b'"y"' not in await reader.readline():
                pass
            writer.close()
            await answerer.closed.wait()
            while "moa_api_hang_ups_total 1.0" not in (page := (await client.get("/metrics")).text):
                await asyncio.sleep(0.01)
    assert 'moa_api_tokens_total{kind="answer"} 2.0' in page
    assert 'moa_api_tokens_total{kind="prompt"}' in page


async def test_nothing_is_written_to_a_client_that_left_in_mid_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would have a line for each write but the first few. Here none of them is left out,
    and the client leaves where the server is told of it only after the rest of the answer."""
    monkeypatch.setattr(listening, "_TO_NOBODY", ())
    connected: list[connections.HttpConnection] = []
    enter = connections.Connections.enter

    def remembered(self: connections.Connections, one: connections.HttpConnection) -> None:
        connected.append(one)
        enter(self, one)

    monkeypatch.setattr(connections.Connections, "enter", remembered)

    def leaves(ask: AnswerRequest) -> Iterator[AnswerEvent]:
        for place, event in enumerate(says(*"x" * 50)):
            if place == 3:
                connected[0].abort()
            yield event

    async with served(leaves) as (answerer, address):
        reader, writer = await connect(address)
        body = msgspec.json.encode(chat(stream=True))
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                await reader.read()
        async with asyncio.timeout(PATIENCE):
            await answerer.closed.wait()
        writer.close()
    assert not caplog.records


async def test_bytes_now_and_then_do_not_prolong_it_and_an_answer_may_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in LIMITS:
        monkeypatch.setattr(connections, name, 0.2)
    go = asyncio.Event()
    async with (
        served(lambda ask: [says("x")[0], go, *says("x")[1:]]) as (_, address),
        browser(address) as client,
    ):
        held = asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
        reader, writer = await connect(address)
        over = asyncio.create_task(reader.read())
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                while not over.done():
                    writer.write(b"X")
                    await asyncio.wait({over}, timeout=0.02)
                await over
            writer.close()
            go.set()
            assert (await held).status_code == 200


@pytest.mark.parametrize("secured", [False, True])
async def test_idle_connections_make_room_for_others(
    secured: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(half_open, "_free_descriptors", lambda: 40)
    tls, trust = contexts(tmp_path) if secured else (None, None)
    async with (
        endpoint(says("x")) as (_, _, app),
        serving(app, Port("127.0.0.1", 0), tls=tls) as address,
    ):
        idle = [await connect(address) for _ in range(60)]
        verify = trust if trust is not None else True
        async with httpx.AsyncClient(
            base_url=address, verify=verify, trust_env=False, timeout=PATIENCE
        ) as client:
            for _ in range(5):
                assert (await client.get("/health")).status_code == 200
        for reader, writer in idle[:40]:
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE):
                    assert await reader.read() == b""
            writer.close()
        for _, writer in idle[40:]:
            writer.close()
    assert 1 <= len(caplog.records) < 5, "nothing that a stranger sends is logged line by line"


async def test_what_brings_no_request_is_counted_and_logged_now_and_then(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tls, _ = contexts(tmp_path)
    async with endpoint(says("x")) as (_, api, app), asyncio.timeout(PATIENCE):
        for secured, kind in ((None, "no_request"), (tls, "no_tls")):
            async with serving(app, Port("127.0.0.1", 0), tls=secured) as address:
                counted = api.metrics.failed_connections.labels(kind)._value
                for times in (1, 2, 3):
                    reader, writer = await connect(address)
                    line = b"GET / HTTP/1.1\r\n\r\n" if secured else b"\x00\x01\r\n\r\n"
                    writer.write(line)
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
                    writer.close()
                    while counted.get() < times:
                        await asyncio.sleep(0.01)
    no_request, no_tls = caplog.messages
    assert [vars(line)["kind"] for line in caplog.records] == ["no_request", "no_tls"]
    assert no_request.startswith("what came is no HTTP request")
    assert no_tls.startswith("plain bytes on a port with TLS")


async def test_a_refused_prompt_is_logged_now_and_then_and_nothing_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(says("x")) as (_, address), browser(address) as client:
        for secret in ("secret", "secrets"):
            wrong = await client.post("/v1/chat/completions", json=chat(n=secret))
            assert wrong.status_code == 400
        large = await client.post("/v1/chat/completions", json=chat("x" * 2**21))
        assert large.status_code == 413
        assert (await client.get("/favicon.ico")).status_code == 404
    assert caplog.messages == [
        "refused with 400: POST /v1/chat/completions",
        "refused with 413: POST /v1/chat/completions (body_too_long)",
    ]


async def test_a_parameter_that_is_not_supported_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(says("x")) as (_, address), browser(address) as client:
        body = {"model": "m", "prompt": "a", "suffix": "secret"}
        assert (await client.post("/v1/completions", json=body)).status_code == 400
    assert caplog.messages == [
        "refused with 400: POST /v1/completions (unsupported_parameter, suffix)"
    ]


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context, and a client's that trusts it."""
    chain, key = certificate(folder)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(chain, key)
    return server, trusting(chain)
