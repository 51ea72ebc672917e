"""The verifier behind a server that owns the sockets: the same answers as on its own port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from cloud_verifier.app import Verifier
from cloud_verifier.cli import main
from cloud_verifier.serving.asgi import AsgiVerifier
from cloud_verifier.serving.auth import Authenticator
from moa.process.listening import Port
from moa.wire import SUBPROTOCOL, encode
from moa.wire.messages import Cancel, Error
from testing import client as wire_client
from tests.verifier import kit

IDS = kit.prompt(1, 10)


@contextlib.asynccontextmanager
async def behind_uvicorn(auth: Authenticator | None = None, **limits: Any) -> AsyncIterator[str]:
    settings = kit.limited(**limits)
    verifier = Verifier(kit.served(settings), settings, auth)
    app = AsgiVerifier(verifier, ["https://here"])
    config = uvicorn.Config(
        app, ws="websockets-sansio", lifespan="off", log_level="error", server_header=False
    )
    server = uvicorn.Server(config)
    with Port("127.0.0.1", 0) as port:
        async with verifier.running():
            task = asyncio.create_task(server._serve([port.listen(128)]))
            await kit.until(lambda: server.started)
            try:
                yield port.url("ws")
            finally:
                server.should_exit = True
                await task


def bare(url: str, **options: Any) -> connect:
    return connect(url, **({"subprotocols": [Subprotocol(SUBPROTOCOL)], "proxy": None} | options))


async def test_http_and_refused_handshakes_are_answered_as_on_its_own_port(tmp_path: Any) -> None:
    auth, token, operator = kit.principals(tmp_path, "alice", "operator")
    known = {"Authorization": f"Bearer {token}"}
    async with behind_uvicorn(auth) as url:
        for path, status in {
            "/health/live": 200,
            "/health/ready": 200,
            "/metrics": 401,
            "/": 401,
        }.items():
            assert (await kit.get(url, path))[0] == status
        for path, status in {"/metrics": 403, "/nothing": 404, "/": 426}.items():
            assert (await kit.get(url, path, token))[0] == status
        assert (await kit.get(url, "/metrics", operator))[0] == 200
        for status, options in (
            (401, {}),
            (400, {"additional_headers": known, "subprotocols": None}),
            (403, {"additional_headers": known, "origin": "https://elsewhere"}),
        ):
            with pytest.raises(InvalidStatus) as refused:
                await bare(url, **options)
            assert refused.value.response.status_code == status
        async with bare(url, additional_headers=known, origin="https://here") as raw:
            assert raw.subprotocol == SUBPROTOCOL


async def test_text_is_the_targets_own_and_what_breaks_the_rules_or_floods_is_closed() -> None:
    limits = {
        "max_empty_frames_per_second": 20,
        "burst_seconds": 0.5,
        "flood_seconds": 0.2,
        "max_frame_bytes": 8192,
    }
    async with behind_uvicorn(**limits) as url, wire_client.client(url) as edge:
        for frame, wanted in (("text", 1003), (b"\0" * 9000, 1009)):
            async with bare(url) as raw:
                await raw.send(frame)  # type: ignore[arg-type]
                assert (await _until_closed(raw))[1] == wanted
        session = await edge.start(IDS, max_new_tokens=12, ignore_eos=True)
        await edge.stream(session)
        assert session.log[len(IDS) :] == kit.generated(IDS, 12)
        for _ in range(200):
            await edge.connection.send(encode(Cancel(bytes(16), 1)))
        frames, code = await _until_closed(edge.connection)
        told = {
            message.limit
            for message in map(kit.decode_server, frames)
            if isinstance(message, Error)
        } - {""}
        assert told
        assert told <= {"max_empty_frames_per_second", "max_refusals_per_second"}
        assert code == 1008


async def test_a_connection_whose_token_is_revoked_is_closed(tmp_path: Path) -> None:
    auth, token, other = kit.principals(tmp_path, "alice", "bob")
    file = tmp_path / "tokens"
    async with (
        behind_uvicorn(auth) as url,
        wire_client.client(url, token=token) as hers,
        wire_client.client(url, token=other) as his,
    ):
        with pytest.raises(SystemExit):
            main(["token", "revoke", str(file), "alice"])
        _, code = await _until_closed(hers.connection)
        assert (code, hers.connection.close_reason) == (1008, "the token was revoked")
        session = await his.start(IDS, max_new_tokens=12, ignore_eos=True)
        await his.stream(session)
        assert session.log[len(IDS) :] == kit.generated(IDS, 12)


async def test_the_engine_runs_as_long_as_the_server() -> None:
    verifier = Verifier(kit.served(), kit.SETTINGS)
    said: asyncio.Queue[Any] = asyncio.Queue()
    heard: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(AsgiVerifier(verifier)({"type": "lifespan"}, said.get, heard.put))
    async with asyncio.timeout(kit.PATIENCE):
        await said.put({"type": "lifespan.startup"})
        assert (await heard.get())["type"] == "lifespan.startup.complete"
        assert verifier.engine.running
        await said.put({"type": "lifespan.shutdown"})
        assert (await heard.get())["type"] == "lifespan.shutdown.complete"
        await life
    assert not verifier.engine.running


async def _until_closed(raw: ClientConnection) -> tuple[list[bytes], int | None]:
    frames: list[Any] = []
    async with asyncio.timeout(kit.PATIENCE):
        with contextlib.suppress(ConnectionClosed):
            while True:
                frames.append(await raw.recv())
    return frames, raw.close_code
