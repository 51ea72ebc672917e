"""Failures to reach a verifier, each with its one-line error."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from websockets import Headers
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosedError, InvalidMessage
from websockets.frames import Close
from websockets.http11 import Request, Response

from edge_client.client import EdgeClient
from edge_client.link.dialling import Dialling, explain, is_closed_port
from edge_client.link.retry import Retry
from edge_client.link.websocket import Endpoint, VerifierLink, tls_context
from moa.errors import LinkError, MoaError
from moa.process.listening import Port
from moa.wire import PROTOCOL_VERSIONS, SUBPROTOCOL, Code, encode
from moa.wire.messages import (
    Ack,
    Activations,
    ClientMessage,
    Error,
    Goaway,
    Hello,
    Message,
    Open,
    Opened,
    Resumed,
    Sampling,
    ServerMessage,
    Stream,
    StreamTokens,
)
from tests.edge import kit
from tests.torture.fake_verifier import WELCOME, fake
from tests.verifier.kit import principals

HELLO = Hello(list(PROTOCOL_VERSIONS), [])
STREAM = Stream(b"n" * 16, 1, 1)


async def trouble(url: str, **endpoint: Any) -> MoaError:
    """The error for this verifier."""
    async with VerifierLink(
        Endpoint(url=url, hello=HELLO, connect_seconds=2.0, **endpoint)
    ).running() as link:
        with link.mailbox() as box:
            async with asyncio.timeout(300):
                while link.dialling.last_error is None:
                    await box.wait(1)
        assert not link.up
        return link.dialling.last_error


def quick(url: str) -> VerifierLink:
    return VerifierLink(Endpoint(url=url, hello=HELLO), Dialling(Retry(0.001, 0.01)))


@contextlib.asynccontextmanager
async def stranger(
    *answers: bytes, tls: ssl.SSLContext | None = None, subprotocol: Any = SUBPROTOCOL
) -> AsyncIterator[str]:
    """A websocket server with scripted answers."""

    async def talk(connection: ServerConnection) -> None:
        for answer in answers:
            await connection.send(answer)
        with contextlib.suppress(Exception):
            await connection.wait_closed()

    offered = [subprotocol] if subprotocol else None
    choose = None if subprotocol else (lambda connection, offers: None)
    async with serve(
        talk, "127.0.0.1", 0, ssl=tls, subprotocols=offered, select_subprotocol=choose
    ) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"{'wss' if tls else 'ws'}://localhost:{port}"


async def test_a_wrong_token_or_no_tls(tmp_path: Path) -> None:
    auth, _ = principals(tmp_path, "edge")
    async with kit.verifier(auth=auth) as running:
        error = await trouble(running.transport.url, token="wrong")
        assert "refused the token" in str(error)
        assert "wants a token" in str(await trouble(running.transport.url))
        encrypted = running.transport.url.replace("ws://127.0.0.1", "wss://localhost")
        assert "wss://localhost" in str(await trouble(encrypted, tls=tls_context("")))
        async with EdgeClient(verifier=running.transport.url, device=kit.device()) as client:
            with pytest.raises(MoaError, match="wants a token"):
                await client.wait_online()
            transcript = await kit.transcribe(client, [5, 6])
            assert transcript.tokens, "the device answers all the same"
            assert not any(transcript.verified)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (Error(code=Code.VERSION, message="no protocol version in common"), "update the older end"),
        (Error(code=Code.TOKENIZER, message="another tokenizer"), "made for this target"),
        (Error(code="something_new", message="for reasons"), "for reasons"),
        (Opened(b"x" * 16, 3), "instead of a welcome"),
        (Goaway(reason="stopping", retry_after_ms=1), "instead of a welcome"),
        (b"\xc1nonsense", "an invalid message"),
        (None, "does not speak"),
    ],
    ids=[
        "version",
        "tokenizer",
        "unknown code",
        "out of turn",
        "goaway",
        "garbage",
        "another protocol",
    ],
)
async def test_a_verifier_that_says_no(answer: Any, what: str) -> None:
    frame = answer if isinstance(answer, bytes | None) else encode(answer)
    async with stranger(
        *[frame] if frame else [], subprotocol=SUBPROTOCOL if frame else None
    ) as url:
        assert what in (await trouble(url)).line()


async def test_a_busy_verifier_is_asked_again() -> None:
    async with stranger(encode(Error(code=Code.BUSY, message="full", retry_after_ms=1))) as url:
        async with quick(url).running() as link, asyncio.timeout(300):
            with link.mailbox() as box:
                while link.dialling.failures < 3:
                    await box.wait(1)
        assert link.dialling.refused is None


_CA = """
[ca]
default_ca = one
[one]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = names
[any]
commonName = supplied
[names]
subjectAltName = DNS:localhost
basicConstraints = CA:TRUE
"""


def make_certificate(folder: Path, start: str, end: str) -> tuple[Path, Path]:
    """A self-signed certificate of `localhost` and its key."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    (folder / "ca.cnf").write_text(_CA)
    (folder / "index.txt").touch()
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    openssl(
        "req",
        "-new",
        *curve,
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-keyout",
        "key.pem",
        "-out",
        "request.pem",
    )
    dates = ("-startdate", start, "-enddate", end)
    signed = ("-in", "request.pem", "-out", "cert.pem")
    openssl(
        "ca", "-batch", "-config", "ca.cnf", "-selfsign", "-keyfile", "key.pem", *dates, *signed
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
@pytest.mark.parametrize(
    ("start", "end", "what"),
    [
        ("20200101000000Z", "20200201000000Z", "expired"),
        ("20200101000000Z", "20990101000000Z", "the handshake was fine"),
    ],
)
async def test_certificates_are_checked(start: str, end: str, what: str, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, start, end)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    refusal = encode(Error(code=Code.VERSION, message="the handshake was fine"))
    async with stranger(refusal, tls=tls) as url:
        assert "not trusted" in (await trouble(url, tls=tls_context(""))).line()
        assert what in (await trouble(url, tls=tls_context(str(certificate)))).line()


def test_failures_to_connect_are_explained() -> None:
    """A link that is cut in the middle of a handshake looks like a port that speaks something else."""
    url = "ws://127.0.0.1:1"
    error = InvalidMessage("no valid HTTP response")
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)")
    assert str(explain(refused, url, tls=False)) == f"cannot reach {url}: nothing listens there"
    assert "TLS" in explain(error, url, tls=False).hint
    again = explain(error, url, tls=False, worked=True)
    assert (str(again), again.hint) == (f"{url} does not answer now", "")
    assert "cloud-verifier serve" in explain(refused, url, tls=False).hint
    gone = explain(refused, url, tls=False, worked=True)
    assert gone.hint == "the verifier was there before: it has ended, or is starting again"
    assert "port 80;" in explain(refused, "ws://localhost", tls=False).hint, (
        "an address without a port"
    )
    silent = ConnectionClosedError(None, Close(1011, "keepalive ping timeout"), None)
    assert str(explain(silent, url, tls=False, worked=True)) == f"no word from {url} any more"
    killed = ConnectionClosedError(None, None, None)
    assert str(explain(killed, url, tls=False, worked=True)) == f"the connection to {url} was lost"
    ended = ConnectionClosedError(Close(1012, "restarts"), Close(1012, "restarts"), True)
    assert str(explain(ended, url, tls=False, worked=True)).endswith("was lost: restarts")
    assert "port 80;" not in explain(refused, "wss://localhost", tls=True).hint
    plain_at_tls = InvalidMessage("no valid HTTP response")
    plain_at_tls.__cause__ = EOFError("the connection was closed")
    assert "is it a TLS port? then wss://" in explain(plain_at_tls, url, tls=False).hint
    unknown = explain(
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "ws://verifier.test:1", tls=False
    )
    assert str(unknown) == "cannot resolve verifier.test: Temporary failure"
    assert "is the name right" in unknown.hint


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        (10, "certificate has expired", "a new one"),
        (18, "self-signed certificate", "pass --tls-ca"),  # another one would be as good
        (62, "Hostname mismatch, certificate is not valid for 'x'.", "as its certificate has it"),
    ],
)
def test_a_certificate_that_is_not_trusted_is_told_with_what_helps(
    code: int, said: str, hint: str
) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, said
    explained = explain(error, "wss://x:1", tls=True)
    assert str(explained) == f"the verifier's certificate is not trusted: {said}"
    assert hint in explained.hint


async def test_a_port_that_hangs_up_is_not_taken_for_another_protocol() -> None:
    """A tunnel or a load balancer whose verifier is not up yet accepts, and closes."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        error = await trouble(f"ws://127.0.0.1:{port}")
    assert str(error).endswith("the connection was closed without an answer")
    assert "cloud-verifier serve" in error.hint


@contextlib.asynccontextmanager
async def reading(
    refuses: Callable[[ClientMessage], bool],
) -> AsyncIterator[tuple[str, list[ClientMessage]]]:
    """A verifier that opens sessions, and cannot read some messages; and what it was sent."""
    seen: list[ClientMessage] = []

    def answers(message: ClientMessage, right: list[Message]) -> list[Message]:
        seen.append(message)
        if refuses(message):
            return [Error(Code.BAD_MESSAGE, "not a message of this protocol")]
        return right if isinstance(message, Hello | Open) else []

    async with fake(answers, (5,), {}) as made:
        yield made.url, seen


async def answer_to(link: VerifierLink, message: Open | Stream) -> ServerMessage:
    with link.mailbox() as box:
        await link.send(message, box)
        async with asyncio.timeout(30):
            await box.wait(None)
        return box.take()[0][1]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Open(bytes(16), [1, 2], stop=["x" * 129]), "length <= 128"),
        (Open(bytes(16), [1, 2], stop=["\ud800"]), "surrogates"),
        (Open(bytes(16), [2**31]), "<= 2147483647"),
        (Open(bytes(16), list(range(2**16, 2**17))), "bytes in a frame"),
        (Open(bytes(16), [1], sampling=Sampling(seed=2**64)), "serialize ints"),
    ],
    ids=["a long stop text", "half a character", "a large id", "a large frame", "a large seed"],
)
async def test_what_a_verifier_could_not_read_is_not_sent(message: Open, why: str) -> None:
    """Its session is refused; the connection stays, and with it the others' sessions."""
    async with reading(lambda _: False) as (url, seen), quick(url).running() as link:
        await link.wait_up(30)
        error = await answer_to(link, message)
        assert isinstance(error, Error)
        assert error.session == message.session
        assert why in error.message
        assert isinstance(await answer_to(link, Open(b"n" * 16, [1, 2])), Opened)
        assert link.connections == 1
        assert [type(one) for one in seen] == [Hello, Open]


async def test_what_the_verifier_cannot_read_costs_its_session_only() -> None:
    """As a verifier with smaller bounds than ours would answer. Where only one session has asked
    for a round, it is meant; else each may have lost its message, and all are resumed."""

    def unread(message: ClientMessage) -> bool:
        if isinstance(message, Open):
            return bool(message.stop)
        return isinstance(message, Stream) and message.session == STREAM.session

    async with reading(unread) as (url, seen), quick(url).running() as link, asyncio.timeout(60):
        await link.wait_up(30)
        for id in (b"n" * 16, b"m" * 16):
            assert isinstance(await answer_to(link, Open(id, [1, 2])), Opened)
        for message in (Open(bytes(16), [1, 2], stop=["x"]), STREAM):
            error: Any = await answer_to(link, message)
            assert (error.code, error.session) == (Code.BAD_MESSAGE, message.session)
        assert isinstance(await answer_to(link, Open(b"l" * 16, [1, 2])), Opened)
        assert link.connections == 1
        await link.send(Stream(b"m" * 16, 1, 1))
        while not isinstance(seen[-1], Stream):
            await asyncio.sleep(0.01)
        await link.send(STREAM)
        while link.connections < 2:
            await asyncio.sleep(0.01)


GOAWAY = Goaway(reason="stopping", drain_ms=20_000)
REFUSED = Error(Code.DRAINING, "stopping", STREAM.session, STREAM.round)
FIRST, LAST = (StreamTokens(STREAM.session, 1, 1, [5], done) for done in (False, True))


@pytest.mark.parametrize(
    ("opened", "streamed", "acknowledged"),
    [
        ([GOAWAY], [], []),  # nothing of ours runs there
        ([], [GOAWAY, LAST], []),
        ([], [LAST, GOAWAY], []),
        ([], [FIRST, GOAWAY], [LAST]),  # what runs is brought to its end there
        ([], [FIRST, GOAWAY], [REFUSED]),
        ([], [REFUSED], []),  # it has missed the word of farewell
    ],
    ids=["idle", "ended", "ends", "runs", "is cut off", "refused"],
)
async def test_a_verifier_that_is_about_to_stop_is_left_when_no_stream_runs_there(
    opened: list[Message], streamed: list[Message], acknowledged: list[Message]
) -> None:
    """Another connection leads elsewhere, where a load balancer stands in between."""
    connections = 0

    def answers(message: ClientMessage, right: list[Message]) -> list[Message]:
        nonlocal connections
        match message:
            case Hello():
                connections += 1
            case Open() if connections == 1:
                return [*right, *opened]
            case Stream():
                return streamed
            case Ack():
                return acknowledged
        return right

    async with (
        fake(answers, (5,), {}) as made,
        quick(made.url).running() as link,
        asyncio.timeout(60),
    ):
        await link.wait_up(30)
        with link.mailbox() as box:
            await link.send(Open(STREAM.session, [1, 2]), box)
            if not opened:
                await box.wait(None)
                box.take()
                await link.send(STREAM, box)
            if acknowledged:
                heard: list[ServerMessage] = []
                while len(heard) < len(streamed) - 1:  # a goaway is no conversation's
                    await box.wait(None)
                    heard += [message for _, message in box.take()]
                while not link._stops:
                    await asyncio.sleep(0)
                assert link.up
                assert link.connections == 1
                await link.send(Ack(8), box)
            while link.connections < 2:
                box.take()
                await box.wait(None)
        assert isinstance(await answer_to(link, Open(b"m" * 16, [1, 2])), Opened)
        assert link.connections == 2, "the other one is not left"


@pytest.mark.parametrize("greets", [True, False])
async def test_where_no_other_verifier_is_attempts_become_rare(greets: bool) -> None:
    """One that is about to stop answers 503; one in front of it may let us in all the same."""
    connections = 0

    def refuse(connection: ServerConnection, request: Request) -> Response | None:
        nonlocal connections
        connections += 1
        if greets or connections == 1:
            return None
        headers = Headers({"Content-Type": "text/plain", "Content-Length": "9"})
        return Response(503, "Service Unavailable", headers, b"draining\n")

    async def talk(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(encode(WELCOME))
        await connection.send(encode(GOAWAY))
        await connection.wait_closed()

    offered: Any = [SUBPROTOCOL]
    async with serve(talk, "127.0.0.1", 0, subprotocols=offered, process_request=refuse) as server:
        url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        retry = Retry(0.001, 300.0, jitter=lambda: 1.0)
        link = VerifierLink(Endpoint(url=url, hello=HELLO), Dialling(retry))
        async with link.running(), asyncio.timeout(60):
            with link.mailbox() as box:
                while link.dialling.failures < 6:
                    await box.wait(None)
            ended = link.dialling.last_error
    assert retry.attempts == 6, "none counts as the first again"
    said = "is about to stop" if greets else "not available now (HTTP 503: draining)"
    assert said in str(ended)


async def test_records_that_nobody_waits_for_are_acknowledged() -> None:
    """Otherwise every conversation would use up part of the window, until no more records come."""
    link = VerifierLink(Endpoint(url="ws://127.0.0.1:9", hello=HELLO))
    with link.mailbox() as box:
        await link.send(Open(b"n" * 16, [1, 2]), box)
        for id in (b"n" * 16, b"m" * 16):
            link.deliver(1.0, Activations(id, 0, 0, 1, "int8", 1, 2, bytes(8)), 50)
        assert link.flow.acknowledge() == Ack(8), "those of a session that is over"
    assert link.flow.acknowledge() == Ack(16), "and those that a conversation has left"


@pytest.mark.parametrize(
    ("message", "longest"),
    [
        (StreamTokens(b"n" * 16, 1, 1, [5]), 1.0),
        (Resumed(b"n" * 16, "resumed", tail=[5]), 1.0),
        (StreamTokens(b"n" * 16, 1, 1, [], True), 16.0),
        (Resumed(b"n" * 16, "resumed"), 16.0),
    ],
    ids=["tokens", "tail", "no tokens", "no tail"],
)
def test_a_connection_that_brings_tokens_is_followed_by_another_at_once(
    message: Any, longest: float
) -> None:
    """However soon it is cut: a link that is cut after every 800 bytes would rest for 5 s after
    each token."""
    dialling = Dialling(Retry(1.0, 64.0, jitter=lambda: 1.0))
    link = VerifierLink(Endpoint(url="ws://127.0.0.1:9", hello=HELLO), dialling)
    for now in range(0, 500, 100):
        dialling.welcomed(now)
        link.deliver(now, message, 10)
        dialling.ended(LinkError("cut"), now)
    assert dialling.retry.not_before == now + longest


def test_tokens_before_a_welcome_say_nothing_of_the_next_connection() -> None:
    """An attempt that fails later is not forgotten for them."""
    dialling = Dialling(Retry(1.0, 64.0, jitter=lambda: 1.0))
    dialling.won()
    dialling.ended(LinkError("no welcome"), 0)
    dialling.welcomed(100)
    dialling.ended(LinkError("cut"), 100)
    assert dialling.retry.not_before == 100 + 2.0


async def test_a_port_where_nothing_listens_is_told_from_one_that_does_not_answer() -> None:
    """Also where a name has several addresses: asyncio makes one error of those of all."""
    closed = Port("127.0.0.1", 0)  # it is taken, so that nobody else listens there
    with closed.socket:
        try:
            async with asyncio.timeout(60):
                await asyncio.open_connection("127.0.0.1", closed.number)
        except OSError as error:
            refused = error
        assert is_closed_port(refused)
        assert is_closed_port(OSError(f"Multiple exceptions: {refused}, [Errno 99] Cannot assign"))
    assert not is_closed_port(TimeoutError())
    assert not is_closed_port(OSError(errno.EHOSTUNREACH, "No route to host"))
    assert not is_closed_port(LinkError(f"[Errno {errno.ECONNREFUSED}]"))


async def test_a_new_connection_begins_its_estimate_of_a_round_trip_anew() -> None:
    """The slow welcome of a verifier that had just started stood on the page for minutes."""
    async with stranger(encode(WELCOME)) as url:
        link = quick(url)
        link.rtt.add(7.0)
        async with link.running(), asyncio.timeout(300):
            await link.wait_up(60)
            while link.rtt.smoothed > 1.0:
                await asyncio.sleep(0)


async def test_a_pause_ends_when_the_user_asks_for_a_connection() -> None:
    """But not more than one attempt a second is made for it."""
    link = VerifierLink(
        Endpoint(url="ws://127.0.0.1:9", hello=HELLO), Dialling(Retry(300.0, 300.0))
    )
    async with link.running():
        with link.mailbox() as box:
            async with asyncio.timeout(60):
                for _ in range(2):
                    failures = link.dialling.failures
                    began = asyncio.get_running_loop().time()
                    while link.dialling.failures == failures:
                        link.new_turn()
                        await box.wait(0.1)
                assert link.dialling.failures == 2
                assert asyncio.get_running_loop().time() - began > 0.8


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (
            "text/plain; charset=utf-8",
            b"too many connections\n",
            " (HTTP 503: too many connections)",
        ),
        ("text/plain", b"\x1b[31mred", " (HTTP 503: \\x1b[31mred)"),
        ("text/plain", b"two\nlines", " (HTTP 503)"),
        ("text/plain", b"x" * 101, " (HTTP 503)"),
        ("text/html", b"<h1>Gateway</h1>", " (HTTP 503)"),
    ],
)
async def test_a_verifier_that_is_full_says_why(kind: str, body: bytes, said: str) -> None:
    """It said no more than 503, like one that is being restarted. Pages are not quoted."""

    def refuse(connection: ServerConnection, request: Request) -> Response:
        headers = Headers({"Content-Type": kind, "Content-Length": str(len(body))})
        return Response(503, "Service Unavailable", headers, body)

    async def talk(connection: ServerConnection) -> None: ...

    async with serve(talk, "127.0.0.1", 0, process_request=refuse) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        error = await trouble(f"ws://127.0.0.1:{port}")
    assert error.line() == f"the verifier is not available now{said}"
