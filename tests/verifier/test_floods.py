"""Hostile clients within the rules of the protocol: each is bounded, told the limit, and closed;
others continue."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.sessions import channel
from cloud_verifier.sessions.record_sender import OutgoingRecords
from cloud_verifier.sessions.session import ServerSession
from moa.wire import PROTOCOL_VERSIONS, ClientSession, Code, Refusal, decode_server, encode
from moa.wire.events import Advanced
from moa.wire.messages import Ack, Cancel, Error, Hello, Open, Stream, Sync, Welcome
from tests.torture.raw import BINARY, PING, Raw, binary, frame
from tests.torture.raw import request as head
from tests.torture.tls import certificate
from tests.verifier import kit

IDS = kit.prompt(1, 10)


FLOOD = """
import socket, sys
held = []
for _ in range(600):
    held.append(socket.socket())
    held[-1].settimeout(5)
    try:
        held[-1].connect(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        pass
print("held", flush=True)
sys.stdin.read()
"""
"""Another process holds 600 connections that say nothing, until its input ends."""


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    """A flood must not get far with what a small machine has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- what arrives


@pytest.mark.parametrize(
    ("attack", "limit"),
    [
        (frame(PING) * 200, "max_empty_frames_per_second"),
        (binary(Ack(0)) * 200, "max_empty_frames_per_second"),
        (binary(Cancel(bytes(16), 1)) * 50, "max_refusals_per_second"),
        (frame(BINARY, b"\xc1" * 4000) * 5, "max_bytes_per_second"),
    ],
    ids=["pings", "acknowledgements", "cancels", "bytes"],
)
async def test_a_flood_is_slowed_down_then_told_and_cut_and_a_neighbour_goes_on(
    attack: bytes, limit: str
) -> None:
    settings = kit.limited(
        max_empty_frames_per_second=200,
        max_refusals_per_second=20,
        max_bytes_per_second=20_000,
        burst_seconds=0.2,
        flood_seconds=0.3,
        max_bad_messages=10**6,
        connection_budgets_per_principal=100,
    )
    async with (
        kit.verifier(settings) as running,
        kit.client(running) as good,
        Raw.of(running) as raw,
    ):
        session = await good.start(IDS, max_new_tokens=100)
        listening = asyncio.create_task(raw.listen())
        while not listening.done():
            raw.write(attack)
            if len(session.log) == len(IDS) + 100:  # a busy machine cuts late
                session = await good.start(IDS, max_new_tokens=100)
            assert isinstance(await good.advance(session, [session.log[-1]]), Advanced)
            await asyncio.sleep(0.005)
        assert raw.limits[-1] == limit
        assert raw.closed == (1008, limit)
        assert session.log[len(IDS) :] == kit.generated(IDS, len(session.log) - len(IDS))


async def test_conversations_that_find_no_slot_are_no_flood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = kit.limited(max_refusals_per_second=1, burst_seconds=1.0, flood_seconds=0.1)
    async with kit.verifier(settings) as running, kit.client(running) as client:

        def no_slot(session: ServerSession) -> None:
            raise Refusal(Code.BUSY, "all slots are busy", limit="slots")

        with monkeypatch.context() as full:
            full.setattr(running.service.table, "reserve", no_slot)
            for _ in range(
                20
            ):  # each asks with its first round, as a device does that saves a round trip
                session = ClientSession(IDS)
                await client.send(session.open(), session.stream())
                answers = [await client.receive(), await client.receive()]
                assert [getattr(answer, "code", "") for answer in answers] == ["busy", "busy"]
        session = await client.start(IDS, max_new_tokens=3)
        assert isinstance(await client.advance(session, [IDS[-1]]), Advanced)


async def test_pongs_do_not_pile_up_for_one_that_never_reads_and_it_is_dropped() -> None:
    limits = {
        "max_empty_frames_per_second": 10**9,
        "max_bytes_per_second": 10**9,
        "send_timeout": 0.5,
    }
    async with (
        kit.verifier(kit.limited(connection_budgets_per_principal=1, **limits)) as running,
        Raw.of(running) as raw,
    ):
        raw.deaf()
        (ours,) = running.transport._server.connections  # type: ignore[union-attr]
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, ours.transport.get_write_buffer_size())
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        raw.write(frame(PING, bytes(125)) * 80_000)  # 10 MB
        await kit.until(lambda: not running.service.connections)
        watching.cancel()
        assert 0 < most <= kit.LIMITS.send_buffer_bytes + 4096


async def test_one_that_asks_for_replays_and_never_reads_is_held_back_in_bounded_bytes() -> None:
    limits = {
        "max_empty_frames_per_second": 10**9,
        "max_bytes_per_second": 10**9,
        "send_timeout": 0.5,
    }
    async with kit.verifier(kit.limited(**limits)) as running, Raw.of(running) as raw:
        raw.write(binary(Open(session=bytes(16), ids=IDS, max_new_tokens=100, ignore_eos=True)))
        stream = Stream(bytes(16), 1, len(IDS) - 1)
        raw.write(binary(stream))
        while not getattr(await raw.message(), "done", False):
            pass
        raw.deaf()
        (its,) = running.service.connections
        raw.write(binary(stream) * 40_000)
        most = 0
        while running.service.connections:
            most = max(most, its._waiting_bytes)
            await asyncio.sleep(0)
        assert most <= 2 * kit.LIMITS.send_buffer_bytes
        assert its._waiting_bytes <= 2 * kit.LIMITS.send_buffer_bytes


async def test_answers_that_nobody_reads_end_the_connection_at_their_limit() -> None:
    settings = kit.limited(max_waiting_bytes=100_000, send_timeout=60.0)
    async with kit.verifier(settings) as running, Raw.of(running) as raw:
        raw.deaf()
        (its,) = running.service.connections
        for _ in range(300):
            its.answer(Error("busy", "x" * 10_000))
        assert its._waiting_bytes <= 110_000
        assert not its.has_answers, "what nobody reads is not kept"
        await raw.gone()
        await kit.until(lambda: not running.service.connections)


async def test_acknowledgements_and_repeated_cancels_look_at_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, records="off")
        (its,) = running.service.connections
        await kit.until(lambda: not its.record_sender._offered)
        monkeypatch.setattr(OutgoingRecords, "newest_unsent", None)
        for _ in range(50):
            await edge.send(Ack(0), Ack(2**40), Cancel(session.id, 9))
        await edge.send(Stream(session.id, 5, 0))  # answered after all of them
        assert isinstance(await edge.receive(), Error)


# ---- what is logged


async def test_the_log_says_nothing_of_tokens_and_text(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.log, "propagate", True)
    secret = "\x1b]0;geheim\x07"
    with caplog.at_level(logging.DEBUG, logger="cloud_verifier"):
        async with kit.verifier() as running, kit.client(running, client=secret) as edge:
            session = await edge.start(IDS, max_new_tokens=5)
            await edge.send(Stream(session.id, 1, len(IDS) - 2), Open(bytes(16), [1, 120_077]))
            await edge.connection.send(encode(Sync(session.id)).replace(b"int8", b"ge\x1bh"))
            for _ in range(3):
                assert isinstance(await edge.receive(), Error)
    # A test before may have left handlers of its own: a record counts once, however many of them it
    # passes.
    refused = list(
        {
            id(record): record for record in caplog.records if record.getMessage() == "refused"
        }.values()
    )
    assert [record.code for record in refused] == ["conflict", "bad_message", "bad_message"]  # type: ignore[attr-defined]
    for record in caplog.records:
        for trace in ("geheim", "120077", "77", "\x1b", str(session.log[-1])):
            assert trace not in record.getMessage()


async def test_a_round_right_behind_a_refused_opening_is_no_refusal_of_its_own() -> None:
    """It stood beside each `busy` in log and metrics, as if something were wrong."""
    async with kit.verifier(kit.limited(max_sessions_per_principal=1)) as running:
        async with kit.client(running) as edge:
            session = await edge.start(IDS, max_new_tokens=5)
            another = ClientSession(IDS)
            opening = another.open()
            # Its user has stopped it meanwhile.
            await edge.send(opening, another.stream(), Cancel(another.id, 1))
            codes = [getattr(await edge.receive(), "code", "") for _ in range(2)]
            assert codes == ["busy", "busy"]
            await edge.stream(session)
            assert session.finish
        page = running.metrics.page().decode()
    counted = [line for line in page.splitlines() if line.startswith("moa_refusals_total{")]
    assert counted == ['moa_refusals_total{code="busy",limit="max_sessions_per_principal"} 1.0']


async def test_a_round_right_behind_a_prompt_that_is_too_long_is_no_refusal_of_its_own() -> None:
    """Each such question was counted twice, as a `limit` and as an `unknown_session`."""
    async with kit.verifier() as running:
        async with kit.client(running) as edge:
            session = ClientSession(kit.prompt(1, 200))
            opening, stream = session.open(), session.stream()
            await edge.send(opening, stream, stream)
            errors = [await edge.receive() for _ in range(3)]
        page = running.metrics.page().decode()
    codes = [getattr(error, "code", "") for error in errors]
    assert codes == ["limit", "limit", "unknown_session"], "one round is behind it, and no more"
    counted = sorted(line for line in page.splitlines() if line.startswith("moa_refusals_total{"))
    assert counted == [
        'moa_refusals_total{code="limit",limit="max_prompt_tokens"} 1.0',
        'moa_refusals_total{code="unknown_session",limit=""} 1.0',
    ]


async def test_ranges_of_held_rows_count_as_the_work_they_are() -> None:
    held = [(2 * row, 2 * row + 1) for row in range(4000)]
    async with kit.verifier(kit.limited(flood_seconds=0.2)) as running, Raw.of(running) as bad:
        session = ClientSession(IDS)
        bad.write(binary(session.open()))
        bad.write(
            binary(Sync(session.id, held=held)) * 40
        )  # a megabyte: within the budget of bytes
        await bad.listen()
        assert bad.limits == ["max_empty_frames_per_second"]


@pytest.fixture
def certified(tmp_path: Path) -> dict[str, Path]:
    """Settings of TLS."""
    chain, key = certificate(tmp_path)
    return {"tls_cert": chain, "tls_key": key}


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
async def test_half_open_connections_do_not_keep_a_good_one_out(
    secured: bool, request: pytest.FixtureRequest
) -> None:
    files = request.getfixturevalue("certified") if secured else {}
    options: dict[str, Any] = {}
    if secured:
        options["ssl"] = ssl.create_default_context(cafile=str(files["tls_cert"]))
        options["ssl"].check_hostname = False
    async with kit.verifier(dataclasses.replace(kit.limited(max_half_open=8), **files)) as running:
        silent = [await Raw.connect(running.transport.port) for _ in range(40)]
        if secured:
            wrong = await Raw.connect(running.transport.port)
            await wrong.pour(head())  # plain words where TLS should be
            assert not (await wrong.reader.read(1000)).startswith(b"HTTP")
            await wrong.gone()
        async with kit.connection(running, **options) as raw:
            await raw.send(encode(Hello(list(PROTOCOL_VERSIONS), [])))
            assert isinstance(decode_server(await raw.recv()), Welcome)  # type: ignore[arg-type]
        assert 0 < kit.metric(running, "moa_half_open_connections") <= 8
        assert kit.metric(running, "moa_half_open_dropped_total") >= 32
        for one in silent:
            await one.gone()


@pytest.mark.parametrize("run", kit.loops())
def test_idle_connections_beyond_the_descriptors_keep_nobody_out_and_write_little_into_the_log(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many descriptors as a small machine has, and more connections that say nothing than these."""
    monkeypatch.setattr(channel.log, "propagate", True)

    async def flooded() -> None:
        async with kit.verifier() as running:
            port = str(running.transport.port)
            flood = await asyncio.create_subprocess_exec(
                sys.executable, "-c", FLOOD, port, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert flood.stdin
            assert flood.stdout
            async with asyncio.timeout(kit.PATIENCE):
                await flood.stdout.readline()
            for number in range(20):
                async with kit.client(running) as edge:
                    session = await edge.start(kit.prompt(number, 9))
                    assert isinstance(await edge.advance(session, [session.log[-1]]), Advanced)
            flood.stdin.close()
            await flood.wait()

    with caplog.at_level(logging.INFO):
        run(flooded())
    assert not [record for record in caplog.records if record.exc_info]
    assert not [
        record
        for record in caplog.records
        if record.name == "asyncio" and record.levelno >= logging.WARNING
    ]


async def test_a_port_survives_that_something_else_takes_all_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel.log, "propagate", True)
    async with kit.verifier() as running:
        silent = await Raw.connect(running.transport.port)
        await kit.until(lambda: len(running.transport._half_open) == 1)
        with contextlib.ExitStack() as held, caplog.at_level(logging.INFO):
            sockets = [held.enter_context(socket.socket()) for _ in range(10)]
            with contextlib.suppress(OSError):
                while True:
                    held.callback(os.close, os.dup(0))
            for sock in sockets:
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", running.transport.port))
            async with asyncio.timeout(kit.PATIENCE):
                with contextlib.suppress(ConnectionError):
                    assert await silent.reader.read() == b"", (
                        "the oldest one that says nothing makes room"
                    )
        await silent.gone()
        async with kit.client(running) as edge:
            session = await edge.start(IDS)
            assert isinstance(await edge.advance(session, [session.log[-1]]), Advanced)
    assert any(getattr(record, "event", "") == "descriptors" for record in caplog.records)
    assert not [record for record in caplog.records if record.exc_info or record.name == "asyncio"]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET //[ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 404),
        (b"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 404),
        (head(extra=["Origin: http://["]), 403),
        (head(extra=["Origin: \xe9"]), 403),
        (head().replace(b"Host: 127.0.0.1", b"Host: [::1:"), 403),
    ],
)
async def test_an_odd_head_of_a_stranger_is_no_defect_of_ours(
    said: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with kit.verifier() as running:
        raw = await Raw.connect(running.transport.port)
        raw.write(said)
        async with asyncio.timeout(kit.PATIENCE):
            assert int((await raw.reader.readuntil(b"\r\n\r\n")).split()[1]) == status
        await raw.gone()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    """After a flood nothing stays in the event loop."""
    yield
    await asyncio.sleep(0)
    left = [
        task for task in asyncio.all_tasks() if "converse" in repr(task) or "_write" in repr(task)
    ]
    assert not left
