"""The websocket to the verifier: dialled in the background, shared by all conversations; a shell
around `Dialling`.

Each message goes to the mailbox of the conversation whose session it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Literal
from urllib.parse import urlsplit

from msgspec.structs import replace
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from edge_client.link.connection import Connection
from edge_client.link.dialling import Dialling, explain, is_closed_port, refusal
from edge_client.link.estimates import RoundTrip
from edge_client.link.mailbox import Mailbox
from edge_client.link.record_flow import RecordFlow
from moa.api.access import is_loopback
from moa.errors import LinkError, MoaError, ProtocolError, UsageError
from moa.wire import (
    PROTOCOL_VERSIONS,
    SUBPROTOCOL,
    Code,
    Refusal,
    client_frame,
    decode_server,
    encode,
)
from moa.wire.messages import (
    Activations,
    Append,
    Behind,
    ClientMessage,
    Close,
    Error,
    Goaway,
    Hello,
    Open,
    ServerMessage,
    Stream,
    StreamTokens,
    Welcome,
)
from moa.wire.versions import SESSION_HEADER

_MAX_FRAME = 4 * 1024 * 1024
_MAX_TO_CLOSE = 256
_SEND_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_SILENT_PINGS = 1.5
"""A verifier answers a ping; one that sends nothing for so many times as long as from ping to ping
is silent. The connection is closed later: a silence may end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The verifier's address, the contents of hello, and timeouts."""

    url: str
    token: str = ""
    hello: Hello
    tls: ssl.SSLContext | None = None
    connect_seconds: float = 10.0
    keepalive_seconds: float = 5.0
    """Seconds between pings; a connection is closed if a ping is not answered for twice as long."""
    upstream: str = ""
    """What the verifier stands in front of, where it is a part of this program: the engine's address,
    with its model if that was named. The round trip to such a verifier is none over a network."""

    @property
    def name(self) -> str:
        """The address to show: of the engine, where the verifier is a part of this program."""
        return self.upstream or self.url


@dataclass(eq=False)
class VerifierLink:
    """One connection at a time, replaced whenever it is lost."""

    endpoint: Endpoint
    dialling: Dialling = field(default_factory=Dialling)
    flow: RecordFlow = field(default_factory=RecordFlow)
    rtt: RoundTrip = field(default_factory=RoundTrip)
    welcome: Welcome | None = None
    up: bool = False
    behind: Behind = field(default_factory=Behind)
    """What the verifier has said of the engine behind it, if there is one."""
    away_since: float | None = None
    """Since when that engine is known to be away; None while it is not."""
    has_brought_tokens: bool = False
    """Whether any token has come over this link so far."""
    limited: str = ""
    """That this user's own rate at the verifier is used up, in words."""
    limited_until: float = float("-inf")
    """Until then that counts, on `perf_counter`."""
    connections: int = 0
    """Number of the current connection; counts those that were welcomed."""
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    """Identifies this client to load balancers, so that it reaches the verifier with its sessions
    again."""
    sent_bytes: int = 0
    received_bytes: int = 0
    _mailboxes: dict[bytes, Mailbox] = field(default_factory=dict)
    _listening: set[Mailbox] = field(default_factory=set)
    _to_close: deque[bytes] = field(default_factory=deque)
    """Sessions to close on the next connection."""
    _opening: dict[bytes, None] = field(default_factory=dict)
    """Sessions whose opening, or next turn, was sent on this connection and is not answered; the
    oldest first."""
    _asking: dict[bytes, None] = field(default_factory=dict)
    """Sessions whose round was sent on this connection, and nothing has come since."""
    _streaming: set[bytes] = field(default_factory=set)
    """Sessions whose round was sent on this connection, and has not ended."""
    _stops: bool = False
    """Whether the verifier of this connection is about to stop, and takes no new work."""
    _connection: Connection | None = None
    _redial: asyncio.Event = field(default_factory=asyncio.Event)
    _wanted: bool = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[VerifierLink]:
        """Connect to the verifier in the background, and again whenever that is lost, while the
        body runs."""
        self.dialling.down_since = perf_counter()
        task = asyncio.create_task(self._keep_connected())
        try:
            yield self
        finally:
            self._wanted = False
            if self._connection is not None:
                await _close(self._connection)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # ---- for conversations

    @property
    def state(self) -> Literal["up", "down", "refused"]:
        """Whether the verifier can be asked now. `refused`: it cannot, and no new attempt is made
        before the next turn."""
        if self.up:
            return "up"
        if self.dialling.refused is not None:
            return "refused"
        return "down"

    @property
    def unanswered(self) -> str:
        """That the engine behind the verifier has answered nothing yet, in words; empty where it has,
        where it is known why it does not, and where there is none."""
        if self.welcome is None or "behind" not in self.welcome.features:
            return ""
        if self.behind.model or self.behind.away:
            return ""
        return f"{self.endpoint.upstream or 'the upstream'} has not answered yet"

    @property
    def away(self) -> str:
        """Why nobody would verify a text now although the verifier is there: the engine behind it
        is away, or has answered nothing yet. Empty where somebody would."""
        return self.behind.away or self.unanswered

    def limited_by(self, words: str, until: float) -> None:
        """Note what a turn has learnt of this user's own rate: it is the same for all of them."""
        if until > self.limited_until:
            self.limited, self.limited_until = words, until

    def is_silent(self, now: float) -> bool:
        """Whether the connection is open and the verifier has sent nothing for so long that it or
        the network is probably gone."""
        if not self.up or self._connection is None:
            return False
        silence = now - self._connection.heard_at
        return silence > _SILENT_PINGS * self.endpoint.keepalive_seconds

    @contextlib.contextmanager
    def mailbox(self) -> Iterator[Mailbox]:
        """Yield a mailbox for the messages of one conversation's sessions, until the body ends.
        Messages that nobody has read by then are dropped."""
        box = Mailbox()
        self._listening.add(box)
        try:
            yield box
        finally:
            self._listening.discard(box)
            for session in box.sessions:
                self._mailboxes.pop(session, None)
            for _, message in box.messages:
                self._throw_away(message)

    def new_turn(self) -> None:
        """A new turn: connect again, even if the verifier has refused us."""
        self.dialling.new_turn()
        self._redial.set()

    async def send(self, message: ClientMessage, box: Mailbox | None = None) -> None:
        """Send a message now; from now on what comes for its session goes to the mailbox `box`.
        Without a connection nothing is sent. If sending fails or takes too long, the connection is
        dropped: whoever sends sends again, after a reconnect, what has no answer.

        A message that no verifier would read is not sent: its session is refused, and the link goes
        on for the others.
        """
        session = getattr(message, "session", b"")
        if box is not None and session:
            box.sessions.add(session)
            self._mailboxes[session] = box
        if self._connection is None or not self.up or self.welcome is None:
            return
        try:
            frame = client_frame(message, self.welcome.limits.max_frame_bytes)
        except Refusal as refused:
            if box is not None:
                box.put(perf_counter(), refused.error(session=session), 0)
            return
        if isinstance(message, Open | Append):
            self._opening[session] = None
        elif isinstance(message, Stream):
            self._asking[session] = None
            self._streaming.add(session)
        elif isinstance(message, Close):
            self._streaming.discard(session)
        await self._send_frame(self._connection, frame)

    async def _send_frame(self, connection: ClientConnection, frame: bytes) -> None:
        """Send these bytes. If that fails or takes too long, the connection is dropped."""
        try:
            async with asyncio.timeout(_SEND_SECONDS):
                await connection.send(frame)
            self.sent_bytes += len(frame)
        except Exception:  # whatever is wrong with a connection, another one may work
            self.drop()

    async def close_session(self, session: bytes) -> None:
        """Tell the verifier that a session is over: now, or on the next connection."""
        self._opening.pop(session, None)
        self._asking.pop(session, None)
        if self.up:
            await self.send(Close(session))
        elif len(self._to_close) < _MAX_TO_CLOSE:
            self._to_close.append(session)

    def drop(self) -> None:
        """Abort the connection, which seems dead; a new one is opened in the background."""
        if self._connection is not None:
            self._connection.transport.abort()
        self.up = False
        self._tell_all()

    def cut_off(self, *, cut: bool) -> None:
        """Disconnect and stay so (`cut`), or connect again: for trying what happens offline."""
        self.dialling.cut = cut
        if cut:
            self.drop()
        else:
            self.dialling.last_error = None  # that it was cut off is no news any more
        self.new_turn()

    async def wait_up(self, seconds: float) -> None:
        """Wait for the verifier's welcome, for so many seconds at most; raises the reason if there
        is none."""
        try:
            async with asyncio.timeout(seconds):
                await self._up_or_refused()
        except TimeoutError:
            why = self.dialling.last_error
            raise why or LinkError(
                f"no welcome from {self.endpoint.url} within {seconds:.0f} s"
            ) from None

    async def wait_answered(self, seconds: float) -> None:
        """Wait until the engine behind the verifier has answered something, or it is known why it
        does not, for so many seconds at most."""
        with contextlib.suppress(TimeoutError), self.mailbox() as box:
            async with asyncio.timeout(seconds):
                while self.up and self.unanswered:
                    await box.wait(None)  # until the state of the link changes

    async def _up_or_refused(self) -> None:
        """Try to connect at once, and wait until the link is up; raises the reason if the verifier
        refuses us."""
        failures_before = self.dialling.failures
        self.new_turn()
        with self.mailbox() as box:
            while not self.up:
                has_tried = self.dialling.failures > failures_before
                if self.dialling.refused is not None and has_tried:
                    raise self.dialling.refused
                await box.wait(None)  # until the state of the link changes

    # ---- in the background

    async def _keep_connected(self) -> None:
        """Connect, and connect again whenever a connection ends or an attempt fails, as soon as
        `dialling` allows, until the link is not wanted any more."""
        while True:
            await self._until_due()
            try:
                await self._one_connection()
            except Exception as error:  # after any error the device continues and connects again
                if not self._wanted:
                    return
                self.dialling.ended(
                    self._explain(error), perf_counter(), port_is_closed=is_closed_port(error)
                )
            self.up = False
            self._connection = None
            self._tell_all()

    async def _until_due(self) -> None:
        """Wait until the next attempt to connect may begin. A new turn can make that sooner."""
        while True:
            self._redial.clear()
            due = self.dialling.due()
            pause = None  # no attempt may begin before a new turn
            if due is not None:
                pause = due - perf_counter()
                if pause <= 0:
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._redial.wait()

    def _explain(self, error: Exception) -> MoaError:
        """Returns what ended a connection, or an attempt, as an error for the user."""
        if self.dialling.cut:
            return LinkError("disconnected on purpose")
        return explain(
            error,
            self.endpoint.url,
            tls=self.endpoint.tls is not None,
            token=bool(self.endpoint.token),
            worked=self.connections > 0,
        )

    async def _one_connection(self) -> None:
        """Connect, send hello, and read until the connection ends."""
        endpoint = self.endpoint
        headers = {SESSION_HEADER: self.key}
        if endpoint.token:
            headers["Authorization"] = f"Bearer {endpoint.token}"
        is_here = is_loopback(urlsplit(endpoint.url).hostname or "")
        async with _Connect(
            endpoint.url,
            ssl=endpoint.tls,
            additional_headers=headers,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            proxy=None if is_here else True,  # True: the one that the environment names
            open_timeout=endpoint.connect_seconds,
            close_timeout=0.5,
            ping_interval=endpoint.keepalive_seconds,
            ping_timeout=2 * endpoint.keepalive_seconds,
            max_size=_MAX_FRAME,
            create_connection=Connection,
        ) as connection:
            assert isinstance(connection, Connection)  # `create_connection` makes it
            await self._converse(connection)

    async def _converse(self, connection: Connection) -> None:
        """Greet the verifier over a new connection, then put each message that arrives into its
        conversation's mailbox, until the connection ends."""
        if connection.subprotocol != SUBPROTOCOL:
            url = self.endpoint.url
            raise ProtocolError(
                f"{url} does not speak {SUBPROTOCOL}: it is not a verifier of this version"
            )
        if self.dialling.cut:  # while connecting
            raise LinkError("disconnected on purpose")
        self._connection = connection
        sent_at = perf_counter()
        welcome = await self._exchange_hello(connection)
        greeted_after = perf_counter() - sent_at
        if not self.rtt.samples:
            self.rtt.add(greeted_after)
        pong = asyncio.ensure_future(await connection.ping())
        pong.add_done_callback(partial(self._answered_ping, greeted_after))
        latency = connection.latency
        if "behind" in welcome.features:  # it is told at once, so that it is known when we are up
            await self._receive_behind(connection)
        self._welcomed(welcome)
        while self._to_close:
            await self.send(Close(self._to_close.popleft()))
        self._tell_all()
        while not self._is_to_leave:
            size, message = await self._receive(connection)
            self.deliver(perf_counter(), message, size)
            if connection.latency != latency:  # a later ping was answered
                latency = connection.latency
                self.rtt.add(latency)
        self._leave()

    @property
    def _is_to_leave(self) -> bool:
        """Whether nothing more can come of this connection: the verifier is about to stop, and no
        stream of ours runs there, which it would bring to its end."""
        return self._stops and not self._streaming

    def _leave(self) -> None:
        """Raise what ends a connection to a verifier that is about to stop. A new one, to the same
        address, leads to another verifier where a load balancer stands in front of several; where
        there is no other one, attempts are refused, and made ever less often."""
        self.dialling.down_since = perf_counter()
        self.up = False
        self._tell_all()
        raise LinkError(f"{self.endpoint.name} is about to stop")

    async def _exchange_hello(self, connection: ClientConnection) -> Welcome:
        """Send hello and return the verifier's welcome; an error if it refuses us, or its welcome
        cannot be used."""
        frame = encode(self.endpoint.hello)
        await connection.send(frame)
        self.sent_bytes += len(frame)
        async with asyncio.timeout(self.endpoint.connect_seconds):
            _, message = await self._receive(connection)
        return _usable_welcome(message)

    def _answered_ping(self, greeted_after: float, pong: asyncio.Future[float]) -> None:
        """Take the round trip of a new connection from its first ping, or from its welcome if that
        came sooner. A verifier that has just started takes seconds for a welcome, which stood on
        the page for minutes."""
        if not pong.cancelled() and pong.exception() is None:
            self.rtt.restart(min(pong.result(), greeted_after))

    async def _receive_behind(self, connection: ClientConnection) -> None:
        """Wait for the message that says what the verifier stands in front of."""
        async with asyncio.timeout(self.endpoint.connect_seconds):
            size, message = await self._receive(connection)
        self.behind = Behind(self.behind.model)
        self.deliver(perf_counter(), message, size)

    def _welcomed(self, welcome: Welcome) -> None:
        """Use the connection on which the verifier has sent this welcome."""
        self.flow.connected()
        # What was asked for on an earlier connection is not answered on this one.
        self._opening.clear()
        self._asking.clear()
        self._streaming.clear()
        self._stops = False
        self.dialling.welcomed(perf_counter())
        self.welcome = welcome
        self.up = True
        self.connections += 1

    async def _receive(self, connection: ClientConnection) -> tuple[int, ServerMessage]:
        """Wait for the next message; returns its size in bytes, and the message."""
        frame = await connection.recv(decode=False)
        self.received_bytes += len(frame)
        try:
            return len(frame), decode_server(frame)
        except Refusal as error:
            raise ProtocolError(f"the verifier sent an invalid message: {error}") from None

    def deliver(self, arrived: float, message: ServerMessage, size: int) -> None:
        """Put a message of `size` bytes into the mailbox of its conversation, and note what it says
        of the link: requests were answered, activation records came, or the verifier is about to
        stop."""
        if isinstance(message, Error) and not message.session:
            message = self._addressed(message)
        session = getattr(message, "session", b"")
        if isinstance(message, Behind):
            self._learn_behind(message, arrived)
            return
        self._learn(message, session, arrived)
        box = self._mailboxes.get(session)
        if box is not None:
            box.put(arrived, message, size)
        else:
            self._throw_away(message)

    def _learn(self, message: ServerMessage, session: bytes, arrived: float) -> None:
        """Note what a message for this session says of the link itself."""
        if isinstance(message, Goaway):
            self.dialling.asked_wait = message.retry_after_ms / 1000
            self._stops = True
        elif isinstance(message, Activations):
            self.flow.arrived(len(message.payload), arrived)
        else:
            self._opening.pop(session, None)
            self._asking.pop(session, None)
        if isinstance(message, Error):
            self._streaming.discard(session)
            # It was told nothing of the drain if it was greeted while that began.
            self._stops = self._stops or message.code == Code.DRAINING
        elif isinstance(message, StreamTokens) and message.done:
            self._streaming.discard(session)
        # Tokens of a stream, or those that a resumed session has missed.
        if getattr(message, "tokens", None) or getattr(message, "tail", None):
            self.dialling.won()
            self.has_brought_tokens = True

    def _learn_behind(self, message: Behind, arrived: float) -> None:
        """Note what the verifier says of the engine behind it, and since when that is away."""
        self.behind = message
        if not message.away:
            self.away_since = None
        elif self.away_since is None:
            self.away_since = arrived
        self._tell_all()

    def _addressed(self, message: Error) -> Error:
        """Returns an error that names no session, because the verifier could not read some message,
        with the session whose message that must have been: the first that is being opened, or the
        only one that has asked for a round.

        If nobody can know which session it was, the error is raised: that ends the connection, and
        all sessions are resumed on another one.
        """
        if message.code != Code.BAD_MESSAGE:
            raise refusal(message)
        if self._opening:
            return replace(message, session=next(iter(self._opening)))
        if len(self._asking) == 1:
            return replace(message, session=next(iter(self._asking)))
        raise refusal(message)

    def _throw_away(self, message: ServerMessage) -> None:
        """Drop a message that no conversation waits for. Records are acknowledged all the same, or
        the verifier would stop sending."""
        if isinstance(message, Activations):
            self.flow.taken(len(message.payload))

    def _tell_all(self) -> None:
        """Wake all conversations: the state of the link has changed."""
        for box in self._listening:
            box.news.set()


async def _close(connection: ClientConnection) -> None:
    """Close a connection, after a second by force: where the other end reads nothing, our last word
    is never written."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await connection.close()
    connection.transport.abort()


def _usable_welcome(message: ServerMessage) -> Welcome:
    """Returns the verifier's first message if it is a welcome that this device can work with;
    raises what is wrong with it otherwise."""
    if isinstance(message, Error):
        raise refusal(message)
    if not isinstance(message, Welcome):
        raise ProtocolError(
            f"the verifier began with {type(message).__name__} instead of a welcome"
        )
    if message.version not in PROTOCOL_VERSIONS:
        raise ProtocolError(
            f"the verifier chose protocol version {message.version}",
            hint="update the older end",
        )
    limits = message.limits
    longest_text = min(limits.max_prompt_tokens, limits.max_context_tokens)
    if longest_text < 2 or limits.max_guess_tokens < 1:
        raise ProtocolError("the verifier's limits leave no room for a prompt and an answer")
    return message


class _Connect(connect):
    """Redirects are not followed: they would send the prompt to another server."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """A redirect is treated like any other failed handshake."""
        return exc


def tls_context(authority: str) -> ssl.SSLContext:
    """The settings of TLS: certificates are always checked, by the system's authorities, or by those
    in the file `authority` if one is named."""
    try:
        return ssl.create_default_context(cafile=authority or None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot use {authority} as a certificate authority: {error}") from None
