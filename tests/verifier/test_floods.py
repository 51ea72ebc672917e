"""Hostile clients within the rules of the protocol: each is bounded, told the limit, and closed; others continue."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.sessions import channel
from cloud_verifier.sessions.record_sender import OutgoingRecords
from cloud_verifier.sessions.session import ServerSession
from moa.wire import PROTOCOL_VERSIONS, SUBPROTOCOL, ClientSession, Code, Refusal, decode_server, encode
from moa.wire.events import Advanced, Refused
from moa.wire.messages import Ack, Cancel, Error, Hello, Open, Opened, Sampling, Stream, Sync, Verify, Welcome
from tests.torture.raw import BINARY, PING, Raw, binary, frame, request
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


@pytest.fixture
def two(tmp_path: Any) -> tuple[Authenticator, str, str]:
    """Two principals: a normal one and one above its share."""
    return kit.principals(tmp_path, "honest", "greedy")


async def _until(what: Any) -> None:
    async with asyncio.timeout(kit.PATIENCE):
        while not what():
            await asyncio.sleep(0.01)


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
async def test_a_flood_is_slowed_down_then_told_and_cut_and_a_neighbour_goes_on(attack: bytes, limit: str) -> None:
    settings = kit.limited(
        max_empty_frames_per_second=200, max_refusals_per_second=20, max_bytes_per_second=20_000, burst_seconds=0.2,
        flood_seconds=0.3, max_bad_messages=10**6, connection_budgets_per_principal=100,
    )  # fmt: skip
    async with kit.verifier(settings) as running, kit.client(running) as good, Raw.of(running) as raw:
        session = await good.start(IDS, max_new_tokens=100)
        listening = asyncio.create_task(raw.listen())
        while not listening.done():
            raw.write(attack)
            assert isinstance(await good.advance(session, [session.log[-1]]), Advanced)
            await asyncio.sleep(0.005)
        assert raw.limits[-1] == limit
        assert raw.closed == (1008, limit)
        assert session.log[len(IDS) :] == kit.generated(IDS, len(session.log) - len(IDS))


async def test_conversations_that_find_no_slot_are_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = kit.limited(max_refusals_per_second=1, burst_seconds=1.0, flood_seconds=0.1)
    async with kit.verifier(settings) as running, kit.client(running) as client:

        def no_slot(session: ServerSession) -> None:
            raise Refusal(Code.BUSY, "all slots are busy", limit="slots")

        with monkeypatch.context() as full:
            full.setattr(running.service.table, "reserve", no_slot)
            for _ in range(20):  # each asks with its first round, as a device does that saves a round trip
                session = ClientSession(IDS)
                await client.send(session.open(), session.verify([IDS[-1]]))
                answers = [await client.receive(), await client.receive()]
                assert [getattr(answer, "code", "") for answer in answers] == ["busy", "unknown_session"]
        session = await client.start(IDS, max_new_tokens=3)
        assert isinstance(await client.advance(session, [IDS[-1]]), Advanced)


async def test_pongs_do_not_pile_up_for_one_that_never_reads_and_it_is_dropped() -> None:
    limits = {"max_empty_frames_per_second": 10**9, "max_bytes_per_second": 10**9, "send_timeout": 0.5}
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
        await _until(lambda: not running.service.connections)
        watching.cancel()
        assert 0 < most <= kit.LIMITS.send_buffer_bytes + 4096


async def test_one_that_asks_for_replays_and_never_reads_is_held_back_in_bounded_bytes() -> None:
    limits = {"max_empty_frames_per_second": 10**9, "max_bytes_per_second": 10**9, "send_timeout": 0.5}
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
            most = max(most, its._waiting)
            await asyncio.sleep(0)
        assert most <= 2 * kit.LIMITS.send_buffer_bytes
        assert its._waiting <= 2 * kit.LIMITS.send_buffer_bytes


async def test_answers_that_nobody_reads_end_the_connection_at_their_limit() -> None:
    async with (
        kit.verifier(kit.limited(max_waiting_bytes=100_000, send_timeout=60.0)) as running,
        Raw.of(running) as raw,
    ):
        raw.deaf()
        (its,) = running.service.connections
        for _ in range(300):
            its.answer(Error("busy", "x" * 10_000))
        assert its._waiting <= 110_000
        assert not its.has_answers, "what nobody reads is not kept"
        await raw.gone()
        await _until(lambda: not running.service.connections)


async def test_an_acknowledgement_costs_the_same_however_much_a_connection_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with kit.verifier() as running, kit.client(running, features=["records", "append"]) as edge:
        for number in range(kit.SETTINGS.slots):
            session = await edge.start(kit.prompt(number, 30), records="off")
            await edge.send(Sync(session.id, "off", held=[(2 * row, 2 * row + 1) for row in range(15)]))
        await edge.send(Verify(session.id, 5, 0, [1]))
        assert isinstance(await edge.receive(), Error)
        (its,) = running.service.connections
        await _until(lambda: not its.record_sender._offered)
        looked: list[Any] = []
        real = OutgoingRecords.newest_unsent
        monkeypatch.setattr(
            OutgoingRecords, "newest_unsent", lambda self, most: looked.append(self) or real(self, most)
        )
        for _ in range(50):
            await edge.send(Ack(0), Ack(2**40), Cancel(session.id, 9))
        await edge.send(Verify(session.id, 5, 0, [1]))  # answered after all of them
        assert isinstance(await edge.receive(), Error)
        assert looked == []


async def test_ranges_that_an_edge_says_it_holds_are_bounded() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS)
        held = [(2 * row, 2 * row + 1) for row in range(4000)]
        await edge.send(Sync(session.id, held=held), Verify(session.id, 5, 0, [1]))
        await edge.receive()
        ours = running.service.table.find(session.id, "anonymous")
        assert ours is not None
        assert len(ours.records.held) <= len(IDS)
        assert ours.records.held.runs <= len(IDS)


# ---- what is logged


async def test_the_log_says_nothing_of_tokens_and_text(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.log, "propagate", True)
    secret = "\x1b]0;geheim\x07"
    with caplog.at_level(logging.DEBUG, logger="cloud_verifier"):
        async with kit.verifier() as running, kit.client(running, client=secret) as edge:
            session = await edge.start(IDS, max_new_tokens=5)
            await edge.send(Verify(session.id, 1, len(IDS) - 1, [77]), Open(bytes(16), [1, 120_077]))
            await edge.connection.send(encode(Sync(session.id)).replace(b"int8", b"ge\x1bh"))
            for _ in range(3):
                assert isinstance(await edge.receive(), Error)
    # A test before may have left handlers of its own: a record counts once, however many of them it passes.
    refused = list({id(record): record for record in caplog.records if record.getMessage() == "refused"}.values())
    assert [record.code for record in refused] == ["conflict", "bad_message", "bad_message"]  # type: ignore[attr-defined]
    for record in caplog.records:
        for trace in ("geheim", "120077", "77", "\x1b", str(session.log[-1])):
            assert trace not in record.getMessage()


# ---- what is shared


async def test_a_principal_that_holds_every_slot_gives_one_to_another_between_two_rounds(
    two: tuple[Authenticator, str, str],
) -> None:
    auth, honest, greedy = two
    settings = dataclasses.replace(kit.limited(idle_seconds=1000.0), slots=4)
    async with kit.verifier(settings, auth=auth) as running, kit.client(running, token=greedy) as edge:
        ended = asyncio.Event()

        async def keep_busy() -> None:
            sessions = [await edge.start(kit.prompt(n, 9), max_new_tokens=2000, ignore_eos=True) for n in range(4)]
            for session in sessions:
                await edge.send(session.verify([session.log[-1]]))
            while not ended.is_set():
                message = await edge.receive()
                session = next(s for s in sessions if s.id == message.session)  # type: ignore[union-attr]
                event = session.receive(message)  # type: ignore[arg-type]
                if isinstance(event, Refused):
                    assert event.retry
                    await asyncio.sleep(0.02)
                    await edge.send(*session.unsettled)
                elif isinstance(event, Advanced) and not session.finish:
                    await edge.send(session.verify([session.log[-1]]))

        busy = asyncio.create_task(keep_busy())
        await _until(lambda: running.service.table.slots_free == 0)
        began = time.monotonic()
        async with kit.client(running, token=honest) as hers:
            session = await hers.start(IDS, max_new_tokens=10, patient=True)
            admitted = time.monotonic() - began
            while not session.finish:
                await hers.advance(session, [session.log[-1]])
        ended.set()
        busy.cancel()
        assert admitted < 10.0
        assert session.log[len(IDS) :] == kit.generated(IDS, 10)


async def test_ranges_of_held_rows_count_as_the_work_they_are() -> None:
    held = [(2 * row, 2 * row + 1) for row in range(4000)]
    async with kit.verifier(kit.limited(flood_seconds=0.2)) as running, Raw.of(running) as bad:
        session = ClientSession(IDS)
        bad.write(binary(session.open()))
        bad.write(binary(Sync(session.id, held=held)) * 40)  # a megabyte: within the budget of bytes
        await bad.listen()
        assert bad.limits == ["max_empty_frames_per_second"]


async def test_half_open_connections_do_not_keep_a_good_one_out() -> None:
    async with kit.verifier(kit.limited(max_half_open=8)) as running:
        silent = [await Raw.connect(running.transport.port) for _ in range(40)]
        async with kit.client(running) as edge:
            await edge.start(IDS)
        assert 0 < kit.metric(running, "moa_half_open_connections") <= 8
        assert kit.metric(running, "moa_half_open_dropped_total") >= 32
        for raw in silent:
            await raw.gone()


def _loops() -> list[Any]:
    plain = pytest.param(asyncio.run, id="asyncio")
    with contextlib.suppress(ImportError):
        import uvloop

        return [plain, pytest.param(uvloop.run, id="uvloop")]
    return [plain]


@pytest.mark.parametrize("run", _loops())
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
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.WARNING]


async def test_a_port_survives_that_something_else_takes_all_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel.log, "propagate", True)
    async with kit.verifier() as running:
        silent = await Raw.connect(running.transport.port)
        await _until(lambda: len(running.transport._half_open) == 1)
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
                    assert await silent.reader.read() == b"", "the oldest one that says nothing makes room"
        await silent.gone()
        async with kit.client(running) as edge:
            session = await edge.start(IDS)
            assert isinstance(await edge.advance(session, [session.log[-1]]), Advanced)
    assert any(getattr(record, "event", "") == "descriptors" for record in caplog.records)
    assert not [record for record in caplog.records if record.exc_info or record.name == "asyncio"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET //[ HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (request(extra=["Origin: http://["]), 403),
        (request(extra=["Origin: \xe9"]), 403),
        (request().replace(b"Host: x", b"Host: [::1:"), 101),
    ],
)
async def test_an_odd_head_of_a_stranger_is_no_defect_of_ours(
    head: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with kit.verifier() as running:
        raw = await Raw.connect(running.transport.port)
        raw.write(head)
        async with asyncio.timeout(kit.PATIENCE):
            assert int((await raw.reader.readuntil(b"\r\n\r\n")).split()[1]) == status
        await raw.gone()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_half_open_connections_are_bounded_behind_tls_too(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    made = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost")
    subprocess.run(["openssl", *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=str(certificate))
    trust.check_hostname = False
    settings = dataclasses.replace(kit.limited(max_half_open=8), tls_cert=certificate, tls_key=key)
    async with kit.verifier(settings) as running:
        silent = [await Raw.connect(running.transport.port) for _ in range(40)]
        wrong = await Raw.connect(running.transport.port)
        await wrong.pour(request())  # plain words where TLS should be
        assert not (await wrong.reader.read(1000)).startswith(b"HTTP")
        await wrong.gone()
        async with connect(running.transport.url, ssl=trust, subprotocols=[SUBPROTOCOL]) as raw:  # type: ignore[list-item]
            await raw.send(encode(Hello(list(PROTOCOL_VERSIONS), [])))
            assert isinstance(decode_server(await raw.recv()), Welcome)  # type: ignore[arg-type]
        assert 0 < kit.metric(running, "moa_half_open_connections") <= 8
        assert kit.metric(running, "moa_half_open_dropped_total") >= 32
        for one in silent:
            await one.gone()


async def test_logs_that_grow_are_bounded_too() -> None:
    """Not only at the opening: a session that grows counts, and one of nobody's goes first."""
    async with kit.verifier(kit.limited(max_log_bytes=2 * 4096 + 60 * 40)) as running, kit.client(running) as edge:
        one = await edge.start(kit.prompt(1, 20), max_new_tokens=100)
        two = await edge.start(kit.prompt(2, 20), max_new_tokens=100)
        store = running.service.table
        assert store.log_bytes == sum(session.counted for session in store)
        refused = None
        for _ in range(30):
            await edge.send(one.verify([one.log[-1]]))
            event = await edge.event(one)
            if isinstance(event, Refused):
                refused = event
                break
        assert refused is not None
        assert (refused.error.code, refused.error.limit) == ("busy", "max_log_bytes")
        assert store.log_bytes <= running.service.limits.max_log_bytes
        await edge.send(two.close())
        assert isinstance(await edge.advance(one, [one.log[-1]]) if not one.unsettled else None, Advanced | None)
        assert store.log_bytes == sum(session.counted for session in store)


# ---- what is asked of the model


async def test_a_temperature_that_leaves_the_range_of_numbers_is_refused() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        for temperature in (5e-324, 1e-308, 1e-9, float("nan"), float("inf"), -1.0, 1e308):
            await edge.send(Open(bytes(16), IDS, sampling=Sampling(temperature=temperature, top_p=0.9)))
            answer = await edge.receive()
            assert isinstance(answer, Error)
            assert answer.code == "bad_message"
            assert "temperature" in answer.message
        await edge.send(Open(bytes(16), IDS, sampling=Sampling(temperature=1e-3, top_p=0.9)))
        assert isinstance(await edge.receive(), Opened)


async def test_a_session_longer_than_a_prompt_may_be_comes_back_after_a_restart() -> None:
    settings = kit.limited(max_prompt_tokens=20)
    async with kit.verifier(settings) as first, kit.verifier(settings) as second:
        session = ClientSession(kit.prompt(1, 15), max_new_tokens=10, ignore_eos=True)
        async with kit.client(first) as edge:
            edge.sessions[session.id] = session
            await edge.send(session.open())
            await edge.event(session)
            while not session.finish:
                await edge.advance(session, [session.log[-1]])
            await edge.send(session.append(kit.prompt(2, 15), max_new_tokens=10))
            await edge.event(session)
            await edge.advance(session, [session.log[-1]])
        assert len(session.log) > 40
        async with kit.client(second) as edge:
            edge.sessions[session.id] = session
            for request in session.recover():
                await edge.send(request)
            for request in (await edge.event(session)).resend:  # type: ignore[union-attr]
                await edge.send(request)
            await edge.event(session)
            assert isinstance(await edge.advance(session, [session.log[-1]]), Advanced)


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    """After a flood nothing stays in the event loop."""
    yield
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if "converse" in repr(task) or "_write" in repr(task)]
    assert not left
