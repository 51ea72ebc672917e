"""A minimal client of the protocol: sends given messages, sorts and counts answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from moa.errors import MoaError
from moa.wire import (
    FEATURES,
    PROTOCOL_VERSIONS,
    SUBPROTOCOL,
    ClientSession,
    decode_server,
    encode,
    remote_error,
)
from moa.wire.events import Advanced, Ready, Recovered, Refused, SessionEvent, Working
from moa.wire.messages import (
    Ack,
    Activations,
    Error,
    Hello,
    Message,
    ServerMessage,
    Stream,
    Welcome,
)
from moa.wire.versions import SESSION_HEADER

PATIENCE = 60.0
"""Seconds without a message that count as a hang."""


NEVER = 0
"""A guess that no target of the tests makes: of it comes just the target's own token."""


class Client:
    """One connection. Records are kept, counted and acknowledged."""

    welcome: Welcome
    longest_pause = 0.05
    """Seconds before a refused request is sent again, at most: tests are in a hurry."""

    def __init__(
        self, connection: ClientConnection, *, ack: bool = True, patience: float = PATIENCE
    ) -> None:
        self.connection = connection
        self._patience = patience
        self.sessions: dict[bytes, ClientSession] = {}
        self.rows: list[Activations] = []
        self.other: list[ServerMessage] = []
        """Messages of no session, such as a goaway."""
        self.record_bytes = self.token_bytes = 0
        """Of frames with records; of all others, up and down."""
        self._ack = ack
        self._received = 0
        self._lost: dict[bytes, Error] = {}
        """The error that a session was lost by, for the last time."""

    async def send(self, *messages: Message) -> None:
        """Send messages."""
        for message in messages:
            frame = encode(message)
            self.token_bytes += 0 if isinstance(message, Ack) else len(frame)
            await self.connection.send(frame)

    async def receive(self) -> ServerMessage:
        """The next message that is no activation record."""
        async with asyncio.timeout(self._patience):
            while True:
                frame = await self.connection.recv(decode=False)
                message = decode_server(frame)
                if not isinstance(message, Activations):
                    self.token_bytes += len(frame)
                    return message
                self.record_bytes += len(frame)
                await self.take_rows(message)

    async def take_rows(self, message: Activations) -> None:
        """Keep and acknowledge records."""
        self.rows.append(message)
        self._received += len(message.payload)
        if message.session in self.sessions:
            self.sessions[message.session].receive(message)
        if self._ack:
            await self.send(Ack(self._received))

    async def rows_come(self, count: int) -> None:
        """Wait until so many rows of records have arrived; nothing else may come meanwhile."""
        async with asyncio.timeout(self._patience):
            while sum(message.rows for message in self.rows) < count:
                frame = await self.connection.recv(decode=False)
                self.record_bytes += len(frame)
                message = decode_server(frame)
                assert isinstance(message, Activations), message
                await self.take_rows(message)

    async def event(self, session: ClientSession) -> SessionEvent:
        """The next event of `session`. That its round is being worked on is heard on a slow machine
        and never on a fast one, so it is none here. An error that concerns the whole connection is
        raised: nothing may come behind it."""
        while True:
            message = await self.receive()
            if isinstance(message, Error) and not message.session:
                raise remote_error(message)
            if getattr(message, "session", None) != session.id:
                self.other.append(message)
                continue
            event = session.receive(message)
            if isinstance(message, Error) and isinstance(event, Recovered):
                self._lost[session.id] = message
            if event is not None and not isinstance(event, Working):
                return event

    async def start(
        self, ids: Sequence[int], *, patient: bool = False, **settings: Any
    ) -> ClientSession:
        """Open a session and wait for the answer; a patient client asks again while all slots are
        busy."""
        session = ClientSession(list(ids), **settings)
        self.sessions[session.id] = session
        while True:
            await self.send(session.open())
            event = await self.event(session)
            if not (patient and isinstance(event, Refused) and event.retry):
                return session
            await asyncio.sleep(min(self.longest_pause, event.retry_after))

    async def advance(
        self, session: ClientSession, tokens: Sequence[int], parents: Sequence[int] = ()
    ) -> Advanced:
        """What the verifier makes of a draft, whose node 0 is the pending token: a stream that waits
        for it, and ends behind its answer. Patiently repeated while the server is busy. Of the
        pending token alone it makes one token."""
        won = await self.guess(session, tokens, parents)
        if not won.done:
            await self.send(*filter(None, [session.cancel()]))
        while session.busy:
            more = await self.event(session)
            if isinstance(more, Recovered):  # lost in between: it is opened again, to end there
                await self.send(*more.resend, *filter(None, [session.cancel()]))
            if not isinstance(more, Advanced):
                continue
            won = dataclasses.replace(
                won, tokens=won.tokens + more.tokens, finish=more.finish, done=more.done
            )
        return won

    async def guess(
        self, session: ClientSession, tokens: Sequence[int], parents: Sequence[int] = ()
    ) -> Advanced:
        """The same, but the stream goes on to wait."""
        tree = list(tokens) if len(tokens) > 1 else [*tokens, NEVER]
        linked = list(parents) if len(parents) > 1 else list(range(-1, len(tree) - 1))
        asked: list[Message] = [] if session.streaming else [session.stream(waits=True)]
        while True:
            guesses = session.foresee(tree, linked, [0] * len(tree))
            await self.send(*asked, guesses)
            event = await self.event(session)
            while isinstance(event, Ready):
                # An opening's, which a late refusal of the round before has overtaken.
                event = await self.event(session)
            if isinstance(event, Advanced):
                return event
            if isinstance(event, Recovered):
                asked = list(event.resend)
                for request in event.resend[:-1]:
                    await self.send(request)
                    await self.event(session)
                    asked = asked[1:]
                continue
            if not isinstance(event, Refused) or not event.retry:
                raise MoaError(f"a round was answered with {event}")
            await asyncio.sleep(min(self.longest_pause, event.retry_after))
            asked = [message for message in session.unsettled if isinstance(message, Stream)]

    async def stream(self, session: ClientSession, *, speculate: bool = True) -> None:
        """One round that the server decodes, to the end of the turn; patiently repeated while the
        server is busy. Another error is raised: the server sends nothing behind it."""
        message = session.stream(speculate=speculate)
        await self.send(message)
        while session.busy:
            event = await self.event(session)
            if isinstance(event, Recovered):
                raise remote_error(self._lost[session.id])
            if not isinstance(event, Refused):
                continue
            if not event.retry:
                raise remote_error(event.error)
            await asyncio.sleep(min(self.longest_pause, event.retry_after))
            await self.send(message)


def connection(url: str, *, token: str = "", key: str = "", **options: Any) -> connect:
    """A plain websocket to a verifier. The `key` is for routing to one of several verifiers behind
    one address."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return connect(
        url,
        additional_headers=headers | ({SESSION_HEADER: key} if key else {}),
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        compression=None,
        proxy=None,
        max_size=2**24,
        close_timeout=1,
        **options,
    )


@contextlib.asynccontextmanager
async def client(
    url: str,
    *,
    ack: bool = True,
    token: str = "",
    key: str = "",
    patience: float = PATIENCE,
    **hello: Any,
) -> AsyncIterator[Client]:
    """A client after hello and welcome; `patience` are seconds without a message that count as a
    hang."""
    async with connection(url, token=token, key=key, ping_interval=None) as raw:
        made = Client(raw, ack=ack, patience=patience)
        said: dict[str, Any] = {
            "versions": list(PROTOCOL_VERSIONS),
            "features": sorted(FEATURES),
            **hello,
        }
        await made.send(Hello(**said))
        welcome = await made.receive()
        if not isinstance(welcome, Welcome):
            raise MoaError(f"not welcome: {welcome}")
        made.welcome = welcome
        yield made
