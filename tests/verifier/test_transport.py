"""Unauthenticated, broken and slow clients are refused without effect on others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from cloud_verifier.app import Verifier
from cloud_verifier.serving.auth import Authenticator
from moa.wire import ClientSession, Code, Refusal, chain_hash, encode
from moa.wire.messages import (
    Append,
    Cancel,
    Close,
    Error,
    Goaway,
    Hello,
    Open,
    Opened,
    Resume,
    Stream,
    Sync,
)
from moa.wire.session import Advanced, Ready, Recovered, Refused
from moa.wire.versions import SUBPROTOCOL, TOKEN_SUBPROTOCOL
from tests.torture.raw import Raw
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

        async def health(*paths: str) -> set[tuple[int, str]]:
            return {await kit.get(running.transport.url, path) for path in paths}

        assert await health("/health/live", "/health/ready") == {(200, "live\n"), (200, "ready\n")}
        async with kit.client(running) as edge:
            session = await edge.start(IDS)
            await edge.advance(session, [IDS[-1], 5])
            async with asyncio.timeout(kit.PATIENCE):
                page = ""
                while (
                    'moa_forward_seconds_sum{kind="draft"}' not in page
                ):  # the engine counts after it has answered
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
            for name in (
                "verify_seconds_sum",
                "verify_overhead_seconds_sum",
                'forward_seconds_sum{kind="draft"}',
            )
        )
        assert 0 < overhead < whole
        assert whole - overhead == pytest.approx(forward, rel=0.01), (
            "of one session alone the rest is its forward"
        )
        assert (await kit.get(running.transport.url, "/other"))[0] == 404
        monkeypatch.setattr(
            running.engine, "_probe", lambda: None
        )  # it would find that all is well
        running.engine.alive_at = -1000.0
        assert await health("/health/live", "/health/ready", "/") == {
            (503, "no forward has succeeded lately\n")
        }
        running.engine.alive_at = time.monotonic()
        running.service.draining = True
        assert await health("/health/ready", "/health/live") == {
            (503, "draining\n"),
            (200, "live\n"),
        }


async def test_whoever_posts_is_told_what_this_port_is_for() -> None:
    async with kit.verifier() as running:
        raw = await Raw.connect(running.transport.port)
        raw.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        async with asyncio.timeout(kit.PATIENCE):
            answer = await raw.reader.read()
        await raw.gone()
    assert answer.startswith(b"HTTP/1.1 405 Method Not Allowed\r\nAllow: GET\r\n")
    assert answer.endswith(b"websocket: point edge-client at it\n")


async def test_handshakes_that_are_turned_away(
    tokens: tuple[Authenticator, str, str], tmp_path: Path
) -> None:
    auth, alice, bob = tokens
    ours = {"origin": "https://ours.example"}
    known = [("Authorization", f"Bearer {alice}")]

    def offering(*given: str) -> dict[str, Any]:
        """As a web page does it: tokens are subprotocols."""
        return {
            "subprotocols": [
                Subprotocol(name) for name in (SUBPROTOCOL, *(TOKEN_SUBPROTOCOL + t for t in given))
            ]
        }

    def opened(**options: Any) -> connect:
        return connect(running.transport.url, **(offering() | {"proxy": None} | options))

    turned_away: list[tuple[int, dict[str, Any]]] = [
        *(
            (401, {"additional_headers": [("Authorization", f"Bearer {wrong}")]})
            for wrong in ("", alice + "x")
        ),
        *((401, offering(*given)) for given in ((), (alice[:-1],), (alice, bob))),
        (401, {"additional_headers": [*known, ("Authorization", f"Bearer {bob}")]}),
        (403, {"additional_headers": known, "origin": "https://evil.example"}),
        (400, {"additional_headers": known, "subprotocols": None}),
    ]
    async with kit.verifier(
        dataclasses.replace(kit.SETTINGS, origins=(ours["origin"],)), auth=auth
    ) as running:
        for status, options in turned_away:
            with pytest.raises(InvalidStatus) as caught:
                await opened(**options)
            assert caught.value.response.status_code == status, options
        for path, token, status in (
            ("/metrics", "guess", 401),
            ("/metrics", alice, 403),
            ("/health/live", "", 200),
        ):
            assert (await kit.get(running.transport.url, path, token))[0] == status
        async with opened(additional_headers=known, **ours), opened(**offering(alice)) as raw:
            assert raw.subprotocol == SUBPROTOCOL, "the token is not sent back"
        page = running.metrics.page().decode()
        for kind, count in (("missing", 1), ("unknown", 3), ("malformed", 3)):
            assert f'moa_unauthorized_total{{kind="{kind}",port="verifier"}} {count}.0' in page
        assert "moa_token_file_unread 0.0" in page
        # Their file cannot be taken any more: whoever watches the metrics sees it.
        (tmp_path / "tokens").write_text("a mistake\n")
        auth.end_revoked()
        assert "moa_token_file_unread 1.0" in running.metrics.page().decode()


async def test_one_principal_cannot_touch_a_session_of_another(
    tokens: tuple[Authenticator, str, str],
) -> None:
    auth, alice, bob = tokens
    async with kit.verifier(auth=auth) as running, kit.client(running, token=alice) as hers:
        session = await hers.start(IDS, max_new_tokens=5)
        async with kit.client(running, token=bob) as his:
            unknown = ClientSession(list(IDS))
            for theirs in (session, unknown):
                # His answer about her session equals that about a session that does not exist.
                resume = Resume(theirs.id, len(IDS), chain_hash(IDS), 0)
                stream = Stream(theirs.id, 1, len(IDS) - 1, waits=True)
                answers = []
                others = (
                    Cancel(theirs.id, 1),
                    Sync(theirs.id),
                    Stream(theirs.id, 1, 0),
                    Append(theirs.id, 1, [5]),
                )
                for message in (resume, stream, *others):
                    await his.send(message)
                    answers.append(await his.receive())
                assert getattr(answers[0], "outcome", "") == "gone"
                assert [getattr(answer, "code", "") for answer in answers[1:]] == [
                    "unknown_session"
                ] * 5
                await his.send(Close(theirs.id), Open(theirs.id, [1, 2]))
                assert isinstance(await his.receive(), Opened)
                await his.send(Close(theirs.id))
            await his.send(Open(bytes(16), [5] * 160))
            assert getattr(await his.receive(), "code", "") == "limit"
        assert isinstance(await hers.advance(session, [session.log[-1]]), Advanced)


async def test_connections_are_bounded(
    tokens: tuple[Authenticator, str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    caplog.set_level("INFO", "cloud_verifier")
    auth, alice, bob = tokens
    settings = kit.limited(max_connections=3, max_connections_per_principal=2)
    async with kit.verifier(settings, auth=auth) as running:
        async with kit.client(running, token=alice), kit.client(running, token=alice):
            with pytest.raises(InvalidStatus) as caught:
                async with kit.connection(running, token=alice):
                    pass
            assert caught.value.response.status_code == 503
            said = b"too many connections of your key (max_connections_per_principal)\n"
            assert caught.value.response.body == said, "the user's own limit, and no fault"
            async with kit.client(running, token=bob):
                with pytest.raises(InvalidStatus):
                    async with kit.connection(running, token=bob):
                        pass
            # The operator sees it: it was in no figure and in no line of the log.
            refused = running.service.metrics.page().decode()
            for limit in ("max_connections", "max_connections_per_principal"):
                assert f'moa_refusals_total{{code="busy",limit="{limit}"}} 1.0' in refused
                (line,) = (one for one in caplog.records if getattr(one, "limit", "") == limit)
                assert line.message == "refused"
                assert vars(line)["code"] == "busy", "as every line of a refusal says it"
                assert vars(line)["peer"].startswith("127.0.0.1:")
        async with kit.client(running, token=alice):
            pass


@pytest.mark.parametrize("first", [None, Open(bytes(16), [1]), Hello([1], [])])
async def test_who_does_not_say_hello_or_none_that_is_understood_is_hung_up_on(first: Any) -> None:
    async with (
        kit.verifier(kit.limited(hello_timeout=0.2)) as running,
        kit.connection(running) as raw,
    ):
        if first is not None:
            await raw.send(encode(first))
            assert isinstance(kit.decode_server(await raw.recv()), Error)  # type: ignore[arg-type]
        assert await _closed(raw) == 1002


async def test_a_handshake_that_dawdles_is_cut() -> None:
    async with kit.verifier(kit.limited(handshake_timeout=0.2)) as running:
        raw = await Raw.connect(running.transport.port)
        raw.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(kit.PATIENCE):
            await raw.reader.read()
        await raw.gone()


async def test_half_open_connections_are_reaped() -> None:
    async with (
        kit.verifier(kit.limited(ping_interval=0.1, ping_timeout=0.1)) as running,
        kit.client(running) as edge,
    ):
        edge.connection.transport.pause_reading()  # the network is gone, without a close
        await kit.until(lambda: not running.service.connections)
        edge.connection.transport.abort()


async def test_frames_that_are_none_end_their_connection_and_no_other() -> None:
    async with kit.verifier() as running, kit.client(running) as good:
        session = await good.start(IDS, max_new_tokens=6)
        senseless: list[tuple[int, list[Any]]] = [
            (1003, ["text"]),
            (1009, [b"x" * 300_000]),
            (1002, [b"\0"] * (kit.LIMITS.max_bad_messages + 1)),
        ]
        for code, frames in senseless:
            async with kit.client(running) as edge:
                for frame in frames:
                    await edge.connection.send(frame)
                for _ in frames[1:]:
                    assert getattr(await edge.receive(), "code", "") == "bad_message"
                assert await _closed(edge.connection) == code
        assert isinstance(await good.advance(session, [session.log[-1]]), Advanced)


def noticed_in_time(running: kit.Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each forward the event loop has taken what the one before it brought. On a busy machine
    the engine is some rounds ahead."""
    target = running.engine.target
    real = target.forward
    loop = asyncio.get_running_loop()

    def behind_the_loop(rows: Any) -> Any:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(kit.PATIENCE)
        return real(rows)

    monkeypatch.setattr(target, "forward", behind_the_loop)


@dataclasses.dataclass
class Now:
    """The time by which a verifier counts rates."""

    seconds: float


@contextlib.asynccontextmanager
async def five_tokens_a_second(
    auth: Authenticator | None = None,
) -> AsyncIterator[tuple[Verifier, Now]]:
    """A verifier that runs so many for each principal, and `IDS` and ten at once; its time stands
    still."""
    settings = kit.limited(max_tokens_per_second=5.0, max_burst_tokens=len(IDS) + 10)
    async with kit.verifier(settings, auth=auth) as running:
        now = Now(running.service.clock())
        running.service.clock = lambda: now.seconds
        yield running, now


async def test_a_principal_pays_for_drafts_and_streams_and_goes_on_when_it_has_paid(
    tokens: tuple[Authenticator, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    auth, alice, bob = tokens
    truth = kit.generated(IDS, 40)
    async with five_tokens_a_second(auth) as (running, now):
        noticed_in_time(running, monkeypatch)
        async with kit.client(running, token=alice) as edge:
            session = await edge.start(IDS, max_new_tokens=40)
            refused = 0
            while not session.finish:
                if not session.unsettled:
                    await edge.send(session.stream())
                event = await edge.event(session)
                if isinstance(event, Refused):
                    assert (event.error.code, event.error.limit) == (
                        "busy",
                        "max_tokens_per_second",
                    )
                    refused += 1
                    now.seconds += event.error.retry_after_ms / 1000
                    await edge.send(*session.unsettled)
                elif not refused:
                    # One more begins when none is left, and one may run while that is noticed.
                    assert len(session.log) <= len(IDS) + 12, "ten tokens are left"
            assert session.log[len(IDS) :] == truth
            assert refused > 5
        async with kit.client(running, token=bob) as edge:
            await edge.start(IDS)


async def test_a_question_at_the_rate_is_refused_with_its_round_and_asked_again_in_its_session() -> (
    None
):
    """The round was refused as a `conflict`, on which a session is opened anew: all of the
    conversation was read and charged once more."""
    question = kit.prompt(2, 12)
    async with five_tokens_a_second() as (running, now), kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=4)
        await edge.stream(session)
        assert session.finish == "length"
        answered = list(session.log)
        append = session.append(question, max_new_tokens=4)
        await edge.send(append, session.stream())
        refusals = [await edge.receive() for _ in range(2)]
        assert all(isinstance(refusal, Error) for refusal in refusals)
        first, behind = refusals
        assert isinstance(first, Error)
        assert isinstance(behind, Error)
        assert (first.code, first.limit, first.round) == ("busy", "max_tokens_per_second", 0)
        assert behind == msgspec.structs.replace(first, round=2)
        page = running.metrics.page().decode()
        now.seconds += 60  # more than it says: the answer is to come in one stream
        await edge.send(*session.unsettled)
        while not session.finish:
            await edge.event(session)
        truth = kit.generated(answered + question, 4)
        assert session.log == [*answered, *question, *truth]
    counted = [line for line in page.splitlines() if line.startswith("moa_refusals_total{")]
    assert counted == ['moa_refusals_total{code="busy",limit="max_tokens_per_second"} 1.0']


async def test_a_prompt_that_is_refused_for_want_of_a_slot_costs_none_of_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that asked again for a slot paid for its prompt each time."""
    settings = kit.limited(max_tokens_per_second=1e-6, max_burst_tokens=len(IDS) + 20)
    question = kit.prompt(2, 8)

    def no_room(*_: object) -> None:
        raise Refusal(Code.BUSY, "no room", limit="slots")

    async with kit.verifier(settings) as running, kit.client(running) as edge:
        table = running.service.table
        with monkeypatch.context() as full:
            full.setattr(table, "reserve", no_room)
            for _ in range(5):
                refused = await edge.start(IDS)
                assert refused.settled == 0
        session = await edge.start(IDS, max_new_tokens=4)
        await edge.stream(session)
        append = session.append(question, max_new_tokens=4)
        with monkeypatch.context() as full:
            full.setattr(table, "check_logs", no_room)
            for _ in range(5):
                await edge.send(append)
                event = await edge.event(session)
                assert isinstance(event, Refused)
                assert event.error.limit == "slots"
        await edge.send(append)
        assert isinstance(await edge.event(session), Ready)


async def test_a_session_in_place_of_another_pays_for_what_is_new_alone(
    tokens: tuple[Authenticator, str, str],
) -> None:
    """A question behind an answer that was not wholly verified begins a session of its own: the whole
    conversation was charged again, though the verifier had it in memory."""
    auth, alice, bob = tokens
    prompt, question = kit.prompt(1, 60), kit.prompt(2, 8)
    settings = kit.limited(max_tokens_per_second=0.01, max_burst_tokens=len(prompt) + 24)
    async with kit.verifier(settings, auth=auth) as running:
        async with kit.client(running, token=alice) as edge:
            session = await edge.start(prompt, max_new_tokens=4)
            await edge.stream(session)
            another = await edge.start([*session.log, *question], max_new_tokens=4)
            assert another.settled == len(session.log) + len(question)
            await edge.send(session.close())
            await edge.stream(another)
            assert another.log[-4:] == kit.generated([*session.log, *question], 4)
            refused = await edge.start(kit.prompt(3, 60))
            assert refused.settled == 0, "another text is charged whole"
        async with kit.client(running, token=bob) as edge:
            assert (await edge.start(prompt)).settled
            longer = [*session.log, *question, *kit.prompt(4, 20)]
            assert not (await edge.start(longer)).settled, "hers are of no use to him"


async def test_a_device_that_guesses_wrong_gets_as_much_text_as_another_and_is_told_the_limit(
    tokens: tuple[Authenticator, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its limit no guess of it is run, and no stream waits for one."""
    auth, alice, _ = tokens
    truth = kit.generated(IDS, 40)
    async with five_tokens_a_second(auth) as (running, _):
        noticed_in_time(running, monkeypatch)
        async with kit.client(running, token=alice) as edge:
            session = await edge.start(IDS, max_new_tokens=40)
            ran = told = 0
            stream = session.stream(waits=True)
            await edge.send(stream)
            while not told:
                wrong = [session.log[-1], *[(session.log[-1] + 1 + n) % 7 for n in range(3)]]
                await edge.send(session.foresee(wrong, [-1, 0, 1, 2], [0] * 4))
                event = await edge.event(session)
                if isinstance(event, Refused):
                    assert event.error.limit == "max_tokens_per_second"
                    assert event.error.round == 0, "that is said while the stream still ends"
                    told = len(session.log) - len(IDS)
                elif isinstance(event, Advanced):
                    ran += event.foreseen
            assert 10 <= told <= 12, "text is paid, and nothing else"
            most = len(IDS) + 10 + 3  # one forward may run while that is noticed
            assert 0 < ran <= most, "wrong guesses have a budget of the same size"
            assert truth[:told] == session.log[len(IDS) :]


async def test_a_drain_finishes_what_runs_and_sends_everybody_elsewhere() -> None:
    truth = kit.generated(IDS, 12)
    async with kit.verifier() as second, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(kit.verifier())
        async with kit.client(first) as edge:
            session = await edge.start(IDS, max_new_tokens=12)
            await edge.advance(session, [session.log[-1]])
            entered, release = stack.enter_context(kit.held_forward(first))
            await edge.send(session.stream(waits=True))
            chain = [session.log[-1], *truth[1:4]]
            await edge.send(session.foresee(chain, [-1, 0, 1, 2], [0] * 4))
            assert await asyncio.to_thread(entered.wait, kit.PATIENCE)
            drain = asyncio.create_task(first.drain())
            goaway = await edge.receive()
            assert isinstance(goaway, Goaway)
            assert goaway.drain_ms > 0
            assert not drain.done()
            release.set()
            while session.busy:
                assert isinstance(await edge.event(session), Advanced), "what runs is finished"
            assert session.log[len(IDS) :] == truth[:5]
            await edge.send(session.stream())
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


async def test_a_website_with_a_rebound_name_reads_nothing_where_nobody_needs_a_token() -> None:
    async with kit.verifier() as running:
        port = running.transport.port

        async def status(host: str, path: str) -> int:
            raw = await Raw.connect(port)
            raw.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            async with asyncio.timeout(kit.PATIENCE):
                answer = await raw.reader.read()
            await raw.gone()
            return int(answer.split()[1])

        assert await status("evil.example", "/metrics") == 403
        assert await status(f"evil.example:{port}", "/") == 403
        assert await status("localhost@evil.example", "/metrics") == 403
        assert await status("evil.example", "/health/live") == 200
        for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}"):
            assert await status(host, "/metrics") == 200
