"""A client of the endpoint that ends its TLS connection by halves: its answer is given up, its
connection freed, and others are served."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest

from moa.api import connections
from moa.api.connections import serving
from moa.process.listening import Port
from tests.api.scripted import PATIENCE, chat, endpoint, says
from tests.torture.tls import (
    WAYS,
    TlsPeer,
    certificate,
    end_by,
    share_of_the_processor,
    trusting,
)

BODY = msgspec.json.encode(chat(stream=True))
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)
SENT = {
    "TLS alone": b"",
    "half a head": HEAD[:40],
    "half a body": HEAD + BODY[:9],
    "in mid-answer": HEAD + BODY,
}


@pytest.mark.parametrize("state", SENT)
async def test_one_that_ends_by_halves_is_freed_at_once(
    state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name in ("_HEAD_SECONDS", "_BODY_SECONDS", "_IDLE_SECONDS"):
        monkeypatch.setattr(connections, name, 10_000.0)  # it is not freed by a limit of time
    chain, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(chain, key)
    never = asyncio.Event()
    async with (
        endpoint(lambda ask: [*says("x")[:2], never]) as (answerer, _, app),
        serving(app, Port("127.0.0.1", 0), tls=tls) as address,
        httpx.AsyncClient(
            base_url=address, verify=trusting(chain), trust_env=False, timeout=PATIENCE
        ) as other,
    ):
        for way in WAYS:
            peer = await TlsPeer.connect(int(address.rpartition(":")[2]), trusting(chain))
            await peer.write(SENT[state])
            if state == "in mid-answer":
                await peer.read_until(b'"x"')
                async with asyncio.timeout(PATIENCE):
                    await answerer.waits.wait()
            await end_by(way, peer)
            async with asyncio.timeout(PATIENCE):
                if state == "in mid-answer":
                    await answerer.closed.wait()
                peer.hear()
                await peer.poured_out()  # ends, as the server's half has
            assert await share_of_the_processor() < 0.5, way
            assert (await other.get("/health")).status_code == 200
            answerer.waits.clear()
            answerer.closed.clear()
            await peer.gone()
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record for record in caplog.records if record.name == "asyncio"]
