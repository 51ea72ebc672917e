"""A verifier that ends its TLS connection by halves, before the upgrade and in mid-answer: the
device dials again and goes on, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edge_client.client import EdgeClient
from tests.edge import kit
from tests.edge.test_exact import COUNT, truth
from tests.torture.tls import WAYS, TlsPeer, certificate, end_by, share_of_the_processor
from tests.verifier import kit as verifier_kit

IDS = verifier_kit.prompt(3, 70)
CALM: dict[str, Any] = {
    "offline_after": 1000.0,
    "settle_seconds": 1000.0,
    "answer_seconds": 1000.0,
    "keepalive_seconds": 1000.0,
    "connect_seconds": 1000.0,
    "reconnect_seconds": 0.05,
    "max_new_tokens": COUNT,
}
"""No limit of time ends a connection: it is left because it has ended."""


class Front:
    """TLS before a verifier, a connection of each device's to one of its own."""

    def __init__(self, port: int, tls: ssl.SSLContext, early: str = "") -> None:
        """The first connection ends in the way `early`, before it was upgraded, if there is one."""
        self._port = port
        self._tls = tls
        self._early = early
        self.peers: list[TlsPeer] = []
        """The device's connections so far."""
        self._carrying: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen while the body runs; yields the address."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"wss://localhost:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._carrying:
                task.cancel()
            await asyncio.gather(*self._carrying, return_exceptions=True)
            for end in self._ends:
                end.transport.abort()
            for peer in self.peers:
                await peer.gone()

    async def end(self, way: str) -> TlsPeer:
        """End the newest connection by its half. The verifier behind it hears nothing of it."""
        carrying = self._carrying[-1]
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)
        peer = self.peers[-1]
        await end_by(way, peer)
        return peer

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of the device's."""
        peer = TlsPeer(reader, writer, self._tls, server_side=True)
        await peer.shake()
        self.peers.append(peer)
        if self._early and len(self.peers) == 1:
            await end_by(self._early, peer)
            return
        self._carrying.append(asyncio.create_task(self._carry(peer)))

    async def _carry(self, peer: TlsPeer) -> None:
        """Carry bytes both ways until either end is gone."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends.append(writer)

        async def up() -> None:
            while data := await peer.read():
                writer.write(data)
                await writer.drain()

        async def down() -> None:
            while data := await reader.read(2**14):
                await peer.write(data)

        with contextlib.suppress(ConnectionError):
            await asyncio.gather(up(), down())


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate, and what a server has of it."""
    chain, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(chain, key)
    return chain, tls


async def closed(peer: TlsPeer) -> None:
    """Wait until the device has ended its half, too."""
    peer.hear()
    async with asyncio.timeout(verifier_kit.PATIENCE):
        await peer.poured_out()


@pytest.mark.parametrize("way", WAYS)
async def test_a_device_goes_on_over_another_connection(
    way: str, files: tuple[Path, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    chain, tls = files
    async with kit.verifier() as running:
        front = Front(running.transport.port, tls)
        async with (
            front.open() as url,
            EdgeClient(
                verifier=url, tls_ca=str(chain), device=kit.device(), draft="server", **CALM
            ) as client,
        ):
            await client.wait_online()
            with verifier_kit.held_forward(running, behind=len(IDS)) as (entered, release):
                asked = asyncio.create_task(kit.transcribe(client, IDS))
                assert await asyncio.to_thread(entered.wait, verifier_kit.PATIENCE)
                peer = await front.end(way)
                await verifier_kit.until(lambda: client.link is not None and client.link.up)
                await verifier_kit.until(lambda: len(front.peers) == 2)
                await closed(peer)
                assert await share_of_the_processor() < 0.5
                release.set()
            async with asyncio.timeout(verifier_kit.PATIENCE):
                reader = await asked
            assert reader.tokens == truth(IDS)
            assert all(reader.verified)
            assert len(front.peers) == 2
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_device_dials_again_where_the_upgrade_did_not_come(
    way: str, files: tuple[Path, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    chain, tls = files
    async with kit.verifier() as running:
        front = Front(running.transport.port, tls, early=way)
        async with (
            front.open() as url,
            EdgeClient(verifier=url, tls_ca=str(chain), device=kit.device(), **CALM) as client,
        ):
            reader = await kit.transcribe(client, IDS)
            await closed(front.peers[0])
            assert reader.tokens == truth(IDS)
            assert all(reader.verified)
            assert len(front.peers) == 2
            assert await share_of_the_processor() < 0.5
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record for record in caplog.records if record.name == "asyncio"]
