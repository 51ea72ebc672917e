"""Records of TLS that bring nothing: whoever sends many is cut, before they cost anything, and
others are served."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from moa.api.connections import SecuredHttpConnection, serving
from moa.process import secured
from moa.process.listening import Port
from moa.process.secured import _SmallRecords
from moa.wire import PROTOCOL_VERSIONS
from moa.wire.messages import Hello
from tests.api.scripted import PATIENCE, chat, endpoint, says
from tests.torture.raw import PING, binary, frame, request
from tests.torture.tls import TlsPeer, certificate, trusting
from tests.verifier import kit

IDS = kit.prompt(1, 10)
COUNT = 20
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.mark.parametrize("seed", range(5))
def test_small_records_are_counted_wherever_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 22, 255, 256, 257, 5000]) for _ in range(200)]
    stream = b"".join(
        bytes([23, 3, 3]) + size.to_bytes(2, "big") + rng.randbytes(size) for size in sizes
    )
    records = _SmallRecords()
    found = 0
    while stream:
        cut = rng.choice([1, 2, 3, 7, 500, 20_000])
        found += records.count(memoryview(stream[:cut]))
        stream = stream[cut:]
    assert found == sum(size < 256 for size in sizes)


async def in_pieces(peer: TlsPeer, data: bytes, count: int) -> None:
    """Send so many records of a byte each; the other end may hang up meanwhile."""
    try:
        for place in range(count):
            await peer.write(data[place : place + 1])
    except ConnectionError:
        pass


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kit.Settings:
    """With TLS, whose certificate clients trust; no other limit ends anything."""
    chain, key = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(chain))
    limits = kit.limited(
        handshake_timeout=10_000.0,
        max_empty_frames_per_second=10**9,
        max_bytes_per_second=10**9,
    )
    return dataclasses.replace(limits, tls_cert=chain, tls_key=key)


@pytest.mark.parametrize("run", kit.loops())
@pytest.mark.parametrize("known", [False, True], ids=["stranger", "client"])
def test_a_verifier_cuts_who_sends_them_and_serves_others(
    known: bool,
    run: Run,
    settings: kit.Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # However slow the machine is, no time passes for them.
    monkeypatch.setattr(secured, "_SMALL_PER_SECOND", 0.0)
    monkeypatch.setattr(secured, "_SMALL_AT_ONCE", 150.0)
    assert settings.tls_cert is not None
    trusts = trusting(settings.tls_cert)

    async def cut() -> None:
        async with kit.verifier(settings) as running, kit.client(running) as good:
            session = await good.start(IDS, max_new_tokens=COUNT)
            peer = await TlsPeer.connect(running.transport.port, trusts)
            if known:
                await in_pieces(peer, request(), 40)  # few enough for a stranger
                await peer.write(request()[40:])
                await peer.read_until(b"\r\n\r\n")
                await peer.write(binary(Hello(list(PROTOCOL_VERSIONS), [])))
                await peer.read()
                await in_pieces(peer, frame(PING) * 100, 200)
            else:
                await in_pieces(peer, request(extra=["X: " + "x" * 200]), 200)
            async with asyncio.timeout(kit.PATIENCE):
                await peer.poured_out()
            await kit.until(lambda: len(running.service.connections) == 1)
            await kit.until(lambda: not len(running.transport._half_open))
            await peer.gone()
            await good.stream(session)
            assert session.log[len(IDS) :] == kit.generated(IDS, COUNT)

    monkeypatch.setattr("cloud_verifier.serving.connection.log.propagate", True)
    run(cut())
    floods = [one for one in caplog.records if getattr(one, "event", "") == "flood"]
    assert len(floods) == 1
    assert not [one for one in caplog.records if one.exc_info or one.name == "asyncio"]


async def test_so_does_an_endpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SecuredHttpConnection, "_most_of_a_stranger", 20)
    chain, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(chain, key)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"
    async with (
        endpoint(says("x")) as (_, _, app),
        serving(app, Port("127.0.0.1", 0), tls=tls) as address,
        httpx.AsyncClient(
            base_url=address, verify=trusting(chain), trust_env=False, timeout=PATIENCE
        ) as other,
    ):
        peer = await TlsPeer.connect(int(address.rpartition(":")[2]), trusting(chain))
        await peer.write(head)
        await in_pieces(peer, b"{" * 100, 100)
        async with asyncio.timeout(PATIENCE):
            await peer.poured_out()
        await peer.gone()
        for _ in range(30):  # more requests than a stranger may send records
            assert (await other.get("/health")).status_code == 200
        assert (await other.post("/v1/chat/completions", json=chat())).status_code == 200
    assert not [one for one in caplog.records if one.exc_info or one.name == "asyncio"]
