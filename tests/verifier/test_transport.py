"""Unauthenticated, broken and slow clients are refused without effect on others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from cloud_verifier.serving.auth import Authenticator
from moa.wire import ClientSession, chain_hash, encode
from moa.wire.messages import Cancel, Close, Error, Goaway, Open, Opened, Resume, Sync, Verify
from moa.wire.session import Advanced, Ready, Recovered, Refused
from moa.wire.versions import SUBPROTOCOL, TOKEN_SUBPROTOCOL
from tests.verifier import kit

IDS = kit.prompt(1, 10)


@pytest.fixture
def tokens(tmp_path: Any) -> tuple[Authenticator, str, str]:
    return kit.principals(tmp_path, "alice", "bob")


async def _closed(raw: ClientConnection) -> int | None:
    async with asyncio.timeout(kit.PATIENCE):
        await raw.wait_closed()
    code: int | None = raw.close_code
    return code


async def test_health_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kit.verifier() as running:
        assert await kit.get(running.transport.url, "/health/live") == (200, "live\n")
        assert await kit.get(running.transport.url, "/health/ready") == (200, "ready\n")
        async with kit.client(running) as edge:
            session = await edge.start(IDS)
            await edge.advance(session, [IDS[-1], 5])
            async with asyncio.timeout(kit.PATIENCE):
                page = ""
                while 'moa_forward_seconds_sum{kind="draft"}' not in page:  # the engine counts after it has answered
                    status, page = await kit.get(running.transport.url, "/metrics")
        assert status == 200
        for line in (
            "moa_spec_decode_num_drafts_total 1.0",
            "moa_spec_decode_num_draft_tokens_total 1.0",
            'moa_sessions{state="live"} 1.0',
            "moa_connections 1.0",
            "moa_verify_seconds_count 1.0",
            "moa_verify_overhead_seconds_count 1.0",
            f"moa_slots_free {kit.SETTINGS.slots - 1}.0",
        ):
            assert line in page
        whole, overhead, forward = (
            float(page.split(f"moa_{name} ")[1].split()[0])
            for name in ("verify_seconds_sum", "verify_overhead_seconds_sum", 'forward_seconds_sum{kind="draft"}')
        )
        assert 0 < overhead < whole
        assert whole - overhead == pytest.approx(forward, rel=0.01), "of one session alone the rest is its forward"
        assert (await kit.get(running.transport.url, "/other"))[0] == 404
        monkeypatch.setattr(running.engine, "_probe", lambda: None)  # it would find that all is well
        running.engine.alive_at = -1000.0
        assert await kit.get(running.transport.url, "/health/ready") == (503, "no forward has succeeded lately\n")
        assert await kit.get(running.transport.url, "/health/live") == (503, "no forward has succeeded lately\n")
        assert await kit.get(running.transport.url, "/") == (503, "no forward has succeeded lately\n")
        running.engine.alive_at = time.monotonic()
        running.service.draining = True
        assert (await kit.get(running.transport.url, "/health/ready"))[0] == 503
        assert (await kit.get(running.transport.url, "/health/live"))[0] == 200


async def test_whoever_posts_is_told_what_this_port_is_for() -> None:
    async with kit.verifier() as running, asyncio.timeout(300):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.transport.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 405 Method Not Allowed\r\nAllow: GET\r\n")
    assert answer.endswith(b"websocket: point edge-client at it\n")


async def test_handshakes_that_are_turned_away(tokens: tuple[Authenticator, str, str]) -> None:
    auth, alice, bob = tokens
    ours, known = {"origin": "https://ours.example"}, [("Authorization", f"Bearer {alice}")]
    settings = dataclasses.replace(kit.SETTINGS, origins=("https://ours.example",))
    turned_away: list[tuple[int, dict[str, Any]]] = [
        *(
            (401, {"additional_headers": [("Authorization", f"Bearer {wrong}")]})
            for wrong in ("", "guess", alice + "x")
        ),
        (401, {}),
        (401, {"additional_headers": [*known, ("Authorization", f"Bearer {bob}")]}),
        (403, {"additional_headers": known, "origin": "https://evil.example"}),
        (400, {"additional_headers": known, "subprotocols": None}),
    ]
    async with kit.verifier(settings, auth=auth) as running:
        for status, options in turned_away:
            given = {"subprotocols": [Subprotocol(SUBPROTOCOL)], "proxy": None} | options
            with pytest.raises(InvalidStatus) as caught:
                await connect(running.transport.url, **given)
            assert caught.value.response.status_code == status, options
        for wrong in ("", "guess"):
            assert (await kit.get(running.transport.url, "/metrics", wrong))[0] == 401
        assert (await kit.get(running.transport.url, "/health/live"))[0] == 200
        assert (await kit.get(running.transport.url, "/metrics", alice))[0] == 200
        async with kit.client(running, token=alice) as edge:
            assert await edge.start(IDS)
        async with kit.connection(running, token=alice, **ours):
            pass


async def test_one_principal_cannot_touch_a_session_of_another(tokens: tuple[Authenticator, str, str]) -> None:
    auth, alice, bob = tokens
    async with kit.verifier(auth=auth) as running, kit.client(running, token=alice) as hers:
        session = await hers.start(IDS, max_new_tokens=5)
        async with kit.client(running, token=bob) as his:
            unknown = ClientSession(list(IDS))
            for theirs in (session, unknown):
                # His answer about her session equals that about a session that does not exist.
                resume = Resume(theirs.id, len(IDS), chain_hash(IDS), 0)
                verify = Verify(theirs.id, 1, len(IDS) - 1, [IDS[-1]])
                answers = []
                for message in (resume, verify, Cancel(theirs.id, 1), Sync(theirs.id)):
                    await his.send(message)
                    answers.append(await his.receive())
                assert getattr(answers[0], "outcome", "") == "gone"
                assert [getattr(answer, "code", "") for answer in answers[1:]] == ["unknown_session"] * 3
                await his.send(Close(theirs.id), Open(theirs.id, [1, 2]))
                assert isinstance(await his.receive(), Opened)
                await his.send(Close(theirs.id))
            await his.send(Open(bytes(16), [1, 2]))
            await his.receive()
        assert isinstance(await hers.advance(session, [session.log[-1]]), Advanced)


async def test_a_web_page_offers_its_token_as_a_subprotocol(tokens: tuple[Authenticator, str, str]) -> None:
    auth, alice, bob = tokens

    def offering(url: str, *given: str) -> connect:
        names = [SUBPROTOCOL, *(TOKEN_SUBPROTOCOL + token for token in given)]
        return connect(url, subprotocols=[Subprotocol(name) for name in names], proxy=None)

    async with kit.verifier(auth=auth) as running:
        async with offering(running.transport.url, alice) as opened:
            assert opened.subprotocol == SUBPROTOCOL, "the token is not sent back"
        for given in ((), (alice[:-1],), (alice, bob)):
            with pytest.raises(InvalidStatus) as caught:
                async with offering(running.transport.url, *given):
                    pass
            assert caught.value.response.status_code == 401


async def test_connections_are_bounded(tokens: tuple[Authenticator, str, str]) -> None:
    auth, alice, bob = tokens
    settings = kit.limited(max_connections=3, max_connections_per_principal=2)
    async with kit.verifier(settings, auth=auth) as running:
        async with kit.client(running, token=alice), kit.client(running, token=alice):
            with pytest.raises(InvalidStatus) as caught:
                async with kit.connection(running, token=alice):
                    pass
            assert caught.value.response.status_code == 503
            async with kit.client(running, token=bob):
                with pytest.raises(InvalidStatus):
                    async with kit.connection(running, token=bob):
                        pass
        async with kit.client(running, token=alice):
            pass


async def test_who_does_not_say_hello_is_hung_up_on() -> None:
    async with kit.verifier(kit.limited(hello_timeout=0.2)) as running:
        async with kit.connection(running) as raw:
            assert await _closed(raw) == 1002
        async with kit.connection(running) as raw:
            await raw.send(encode(Open(bytes(16), [1])))
            assert await _closed(raw) == 1002


async def test_a_handshake_that_dawdles_is_cut() -> None:
    async with kit.verifier(kit.limited(handshake_timeout=0.2)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.transport.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
        await writer.drain()
        async with asyncio.timeout(kit.PATIENCE):
            await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_half_open_connections_are_reaped() -> None:
    async with kit.verifier(kit.limited(ping_interval=0.1, ping_timeout=0.1)) as running, kit.client(running) as edge:
        edge.connection.transport.pause_reading()  # the network is gone, without a close
        async with asyncio.timeout(kit.PATIENCE):
            while running.service.connections:
                await asyncio.sleep(0.01)
        edge.connection.transport.abort()


@pytest.mark.parametrize(("frame", "code"), [("text", 1003), (b"x" * 300_000, 1009)], ids=["text", "too big"])
async def test_frames_that_are_none(frame: str | bytes, code: int) -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        await edge.connection.send(frame)
        assert await _closed(edge.connection) == code


async def test_senseless_frames_are_answered_and_then_enough_is_enough() -> None:
    async with kit.verifier() as running, kit.client(running) as good, kit.client(running) as edge:
        session = await good.start(IDS, max_new_tokens=6)
        for _ in range(kit.LIMITS.max_bad_messages):
            await edge.connection.send(b"\x00")
            error = await edge.receive()
            assert isinstance(error, Error)
            assert error.code == "bad_message"
        await edge.connection.send(b"\x00")
        assert await _closed(edge.connection) == 1002
        assert isinstance(await good.advance(session, [session.log[-1]]), Advanced)


async def test_the_log_of_what_went_wrong_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kit.verifier() as running, kit.client(running) as edge:

        def explode(*_: Any) -> None:
            raise RuntimeError("secret path /home/somebody")

        monkeypatch.setattr(running.service.table, "check_room", explode)
        await edge.send(Open(bytes(16), [1]))
        assert await _closed(edge.connection) == 1011
        assert "secret" not in edge.connection.close_reason
        monkeypatch.undo()
        async with kit.client(running) as another:
            await another.start(IDS)


async def test_a_rate_of_tokens_is_kept_per_principal(tokens: tuple[Authenticator, str, str]) -> None:
    auth, alice, bob = tokens
    async with kit.verifier(kit.limited(max_tokens_per_second=1.0, max_burst_tokens=30), auth=auth) as running:
        async with kit.client(running, token=alice) as edge:
            session = await edge.start(kit.prompt(0, 28), max_new_tokens=5)
            await edge.send(session.verify([session.log[-1], 1, 2, 3]))
            event = await edge.event(session)
            assert isinstance(event, Refused)
            assert event.retry
            assert (event.error.code, event.error.limit) == ("busy", "max_tokens_per_second")
            assert 500 < event.error.retry_after_ms <= 4000
        async with kit.client(running, token=bob) as edge:
            await edge.start(kit.prompt(0, 28))


async def test_a_stream_pays_for_what_it_has_run_and_goes_on_when_it_has_paid(
    tokens: tuple[Authenticator, str, str],
) -> None:
    auth, alice, bob = tokens
    truth = kit.generated(IDS, 40)
    settings = kit.limited(max_tokens_per_second=5.0, max_burst_tokens=len(IDS) + 10)
    async with kit.verifier(settings, auth=auth) as running:
        now = running.service.clock()
        running.service.clock = lambda: now
        async with kit.client(running, token=alice) as edge:
            session = await edge.start(IDS, max_new_tokens=40)
            refused = 0
            while not session.finish:
                if not session.unsettled:
                    await edge.send(session.stream())
                event = await edge.event(session)
                if isinstance(event, Refused):
                    assert (event.error.code, event.error.limit) == ("busy", "max_tokens_per_second")
                    refused += 1
                    now += event.error.retry_after_ms / 1000
                    await edge.send(*session.unsettled)
            assert session.log[len(IDS) :] == truth
            assert refused > 5
        async with kit.client(running, token=bob) as edge:
            await edge.start(IDS)


async def test_a_verify_that_waited_too_long_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=5)
        await edge.advance(session, [session.log[-1]])
        with kit.held_forward(running) as (entered, release):
            await edge.send(ClientSession(kit.prompt(1, 30)).open())
            assert await asyncio.to_thread(entered.wait, kit.PATIENCE)
            monkeypatch.setattr(running.service, "limits", kit.limited(request_seconds=0.001).limits)
            await edge.send(session.verify([session.log[-1]]))
            async with asyncio.timeout(kit.PATIENCE):
                while not running.work.queued:
                    await asyncio.sleep(0.002)
            await asyncio.sleep(0.002)
            release.set()
            event = await edge.event(session)
        assert isinstance(event, Refused)
        assert (event.error.code, event.retry) == ("deadline", True)
        session.unsettled.clear()
        monkeypatch.undo()
        assert isinstance(await edge.advance(session, [session.log[-1]]), Advanced)


async def test_a_drain_finishes_what_runs_and_sends_everybody_elsewhere() -> None:
    truth = kit.generated(IDS, 12)
    async with kit.verifier() as second, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(kit.verifier())
        async with kit.client(first) as edge:
            session = await edge.start(IDS, max_new_tokens=12)
            await edge.advance(session, [session.log[-1]])
            entered, release = stack.enter_context(kit.held_forward(first))
            await edge.send(session.verify([session.log[-1], *truth[1:4]]))
            assert await asyncio.to_thread(entered.wait, kit.PATIENCE)
            drain = asyncio.create_task(first.drain())
            goaway = await edge.receive()
            assert isinstance(goaway, Goaway)
            assert goaway.drain_ms > 0
            assert not drain.done()
            release.set()
            assert isinstance(await edge.event(session), Advanced), "what runs is finished"
            await edge.send(session.verify([session.log[-1]]))
            refused = await edge.event(session)
            assert isinstance(refused, Refused)
            assert refused.error.code == "draining"
            await drain
            with pytest.raises(InvalidStatus):
                async with kit.connection(first):
                    pass
            await stack.aclose()
            assert await _closed(edge.connection) == 1012
        async with kit.client(second) as edge:
            await edge.send(*session.recover())
            event = await edge.event(session)
            assert isinstance(event, Recovered)
            await edge.send(*event.resend)
            assert isinstance(await edge.event(session), Ready)
            assert isinstance(await edge.event(session), Advanced)
            while not session.finish:
                await edge.advance(session, [session.log[-1]])
        assert session.log[len(IDS) :] == truth
