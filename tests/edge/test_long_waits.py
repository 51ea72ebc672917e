"""Waits of many seconds through real sockets: a verifier process that is stopped, and a target of 15 s a forward."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.events import Token
from moa.model.target import Row, Step
from tests.edge import kit
from tests.edge.test_exact import truth
from tests.torture.server import server
from tests.verifier import kit as verifier_kit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOTH = pytest.mark.parametrize("draft", ["device", "server"])
IDS = verifier_kit.prompt(3, 12)
COUNT = 24


@BOTH
async def test_a_verifier_process_that_is_stopped_for_eleven_seconds(draft: Any) -> None:
    """SIGSTOP: the connection stays open, no bytes move. The device writes offline, and is corrected afterwards."""
    settings: dict[str, Any] = {"draft": draft, "max_new_tokens": 200, "ignore_eos": True, "settle_seconds": 120.0}
    prompt = "Write a story about a girl and a boat."
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(server())
        client = EdgeClient(verifier=f"ws://127.0.0.1:{running.port}", token=running.honest, **settings)
        client = await stack.enter_async_context(client)
        expected = kit.Reader()
        async for event in client.generate(prompt):
            expected.take(event)
        assert all(expected.verified)

        def go_on() -> None:
            running.process.send_signal(signal.SIGCONT)

        transcript, stopped_at = kit.Reader(), 0.0
        async for event in client.generate(prompt):
            transcript.take(event)
            if isinstance(event, Token) and not stopped_at and len(transcript.tokens) >= 10:
                running.process.send_signal(signal.SIGSTOP)
                stopped_at = time.perf_counter()
                asyncio.get_running_loop().call_later(11.0, go_on)
        assert time.perf_counter() - stopped_at >= 11.0
    assert "provisional" in {event.status for event in transcript.events if isinstance(event, Token)}
    assert transcript.tokens == expected.tokens
    assert all(transcript.verified)


@BOTH
async def test_a_target_of_fifteen_seconds_a_forward(draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings are answered meanwhile, so the connection is kept however long a forward takes."""
    device = kit.oracle([*IDS, *truth(IDS)], 1.0)
    async with (
        kit.verifier() as running,
        EdgeClient(verifier=running.transport.url, device=device, draft=draft, max_new_tokens=COUNT) as client,
    ):
        await client.wait_online(60)
        real, forwards = running.engine.target.forward, 0

        def slow(rows: Sequence[Row]) -> Step:
            nonlocal forwards
            forwards += 1
            time.sleep(15 if forwards <= 3 else 0)
            return real(rows)

        monkeypatch.setattr(running.engine.target, "forward", slow)
        transcript = await kit.transcribe(client, IDS, settle_seconds=120.0)
        assert client.link is not None
        assert client.link.connections == 1
    assert transcript.tokens == truth(IDS)[:COUNT]
    assert all(transcript.verified)
    assert "provisional" in {event.status for event in transcript.events if isinstance(event, Token)}
