"""A client that ends its TLS connection by halves, before and after the upgrade and in mid-answer:
it is freed at once, its session waits for its return, and nobody else notices."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier import logs
from cloud_verifier.app import Verifier
from cloud_verifier.sessions import channel
from moa.wire import PROTOCOL_VERSIONS, ClientSession
from moa.wire.events import Recovered
from moa.wire.messages import Hello, Resume
from tests.torture.raw import binary, request
from tests.torture.tls import (
    WAYS,
    TlsPeer,
    certificate,
    end_by,
    share_of_the_processor,
    trusting,
)
from tests.verifier import kit

IDS = kit.prompt(1, 10)
HIS = kit.prompt(2, 90)
"""Longer than her prompt and answer together."""
COUNT = 40
NEVER = 10_000.0
STATES = ("TLS alone", "half a head", "upgraded", "welcomed", "in mid-answer")
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kit.Settings:
    """With TLS. No limit of time ends anything: who has gone is freed because he has gone."""
    chain, key = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(chain))
    limits = kit.limited(
        handshake_timeout=NEVER,
        hello_timeout=NEVER,
        ping_interval=NEVER,
        ping_timeout=NEVER,
        send_timeout=NEVER,
    )
    return dataclasses.replace(limits, tls_cert=chain, tls_key=key)


async def reach(state: str, running: Verifier, chain: Path, asked: ClientSession) -> TlsPeer:
    """A client that has come so far."""
    peer = await TlsPeer.connect(running.transport.port, trusting(chain))
    if state == "TLS alone":
        return peer
    head = request()
    if state == "half a head":
        await peer.write(head[: len(head) // 2])
        return peer
    await peer.write(head)
    await peer.read_until(b"\r\n\r\n")
    if state == "upgraded":
        return peer
    await peer.write(binary(Hello(list(PROTOCOL_VERSIONS), [])))
    await peer.read()
    if state == "in mid-answer":
        await peer.write(binary(asked.open()) + binary(asked.stream(speculate=False)))
    return peer


def is_free(running: Verifier) -> bool:
    """Whether nothing is left of the client but its session, and the neighbour's connection."""
    transport = running.transport
    assert transport._server is not None
    return (
        len(running.service.connections) == 1
        and not len(transport._half_open)
        and len(transport._server.connections) == 1
    )


@pytest.mark.parametrize("run", kit.loops())
@pytest.mark.parametrize("state", STATES)
def test_one_that_ends_by_halves_is_freed_at_once(
    state: str,
    run: Run,
    settings: kit.Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(channel.log, "propagate", True)

    async def each_way() -> None:
        async with kit.verifier(settings) as running, kit.client(running) as good:
            neighbour = await good.start(HIS, max_new_tokens=COUNT)
            for way in WAYS:
                await one(running, way)
                await good.advance(neighbour, [neighbour.log[-1]])
            await good.stream(neighbour)
            assert neighbour.log[len(HIS) :] == kit.generated(HIS, COUNT)

    async def one(running: Verifier, way: str) -> None:
        assert settings.tls_cert is not None
        asked = ClientSession(list(IDS), max_new_tokens=COUNT)
        peer = await reach(state, running, settings.tls_cert, asked)
        in_mid_answer = state == "in mid-answer"
        with kit.held_forward(running, behind=len(IDS)) as (entered, release):
            if in_mid_answer:
                assert await asyncio.to_thread(entered.wait, kit.PATIENCE)
            await end_by(way, peer)
            await kit.until(lambda: is_free(running))
            assert await share_of_the_processor() < 0.5, way
            release.set()
        peer.hear()
        async with asyncio.timeout(kit.PATIENCE):
            await peer.poured_out()  # ends, as the server's half has
        await peer.gone()
        if in_mid_answer:
            async with kit.client(running) as back:
                await recovered(back, asked)

    async def recovered(edge: kit.Client, asked: ClientSession) -> None:
        """Its session was kept, and its answer goes on to the end."""
        edge.sessions[asked.id] = asked
        await edge.send(*asked.recover())
        while asked.busy:  # its round has ended where the connection did
            assert not isinstance(await edge.event(asked), Recovered), "nothing was lost"
        assert not asked.finish
        await edge.stream(asked)
        assert asked.log[len(IDS) :] == kit.generated(IDS, COUNT)
        await edge.send(asked.close())

    with caplog.at_level(logging.WARNING):
        run(each_way())
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_answers_to_one_that_has_ended_by_half_cost_no_line_each(
    settings: kit.Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """asyncio has a line for each write that goes nowhere, and all clients would share its lines."""
    assert settings.tls_cert is not None
    limits = dataclasses.replace(
        settings.limits,
        max_empty_frames_per_second=10**9,
        max_bytes_per_second=10**9,
        max_refusals_per_second=10**9,
    )
    logs.configure("info", limits, "json")
    asked = ClientSession(list(IDS))
    async with (
        kit.verifier(dataclasses.replace(settings, limits=limits)) as running,
        kit.client(running),
    ):
        peer = await reach("welcomed", running, settings.tls_cert, asked)
        many = [binary(Resume(bytes(16), 1, bytes(16), 0))] * 1000
        await peer.write(b"".join(many))
        await peer.end_tcp()
        await kit.until(lambda: is_free(running))
        await peer.gone()
        logging.getLogger("asyncio").error("socket.accept() out of system resource")
    said = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert "SSL connection is closed" not in said
    assert "more lines of this source are left out" not in said
    assert "socket.accept() out of system resource" in said
