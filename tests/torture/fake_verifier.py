"""A verifier that breaks one rule at a time. It uses only the wire package and does not depend on
the client.

A behaviour looks at a message and says what to send: messages, raw frames, or an `End` of the
connection. What it does not care about is answered as an honest verifier would, one token a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

from moa.wire import PROTOCOL_VERSIONS, SUBPROTOCOL, Code, Refusal, decode_client, encode
from moa.wire import messages as m

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x1b[31m\u202e"
"""What no terminal may be given."""
HUGE = 2**31 - 1


@dataclass(frozen=True)
class End:
    """End the connection: with a close code, or without."""

    code: int = 0
    reason: str = ""


Reply = m.Message | bytes | str | End | float
"""A message, a frame as it is, an end, or seconds to wait."""
Behaviour = Callable[[m.ClientMessage, list[m.Message]], Sequence[Reply]]
"""Looks at a message and at what an honest verifier would answer."""

_FEATURES = ["append", "foresee", "records", "resume"]
_RECORDS = m.RecordContract(2, 32, ["int8", "int4", "fp16"])
LIMITS = m.WireLimits(262144, 8192, 8192, 4096, max_tree_nodes=64, max_guess_tokens=256)
WELCOME = m.Welcome(
    PROTOCOL_VERSIONS[0], _FEATURES, "fake", "fake", "", "", "", 4096, [2], LIMITS, _RECORDS
)


def honest(message: m.ClientMessage, token: int) -> list[m.Message]:
    """The right answer to a message, when the target says `token`."""
    match message:
        case m.Hello():
            return [WELCOME]
        case m.Open():
            return [m.Opened(message.session, len(message.ids))]
        case m.Append():
            return [m.Opened(message.session, message.base + len(message.ids))]
        case m.Resume():
            return [m.Resumed(message.session, "gone")]
        case m.Stream():
            return [
                m.StreamTokens(
                    message.session,
                    message.round,
                    message.base,
                    [token] * 4,
                    done=True,
                    forward_ms=1.0,
                )
            ]
        case _:
            return []


# ---- ways of being wrong


def _with(kinds: Any, **fields: Any) -> Behaviour:
    """Answers of these kinds with other fields."""
    return lambda message, right: [
        replace(one, **fields) if isinstance(one, kinds) else one for one in right
    ]


def _instead(kinds: tuple[type, ...], make: Callable[[Any], Sequence[Reply]]) -> Behaviour:
    """Something else as an answer to these kinds of messages."""
    return lambda message, right: make(message) if isinstance(message, kinds) else right


def _behind(kinds: tuple[type, ...], make: Callable[[Any], Sequence[Reply]]) -> Behaviour:
    """The right answer, and something behind it."""
    return lambda message, right: [*right, *(make(message) if isinstance(message, kinds) else [])]


def _error(code: str, *, retry: int = 0, limit: str = "") -> Callable[[Any], Sequence[Reply]]:
    def make(message: Any) -> Sequence[Reply]:
        number = getattr(message, "round", 0) if isinstance(message, m.Stream) else 0
        return [m.Error(code, f"{code} {ESCAPE}", message.session, number, retry, limit)]

    return make


def _streamed(ask: Any, tokens: list[int], *, done: bool = False) -> m.Message:
    return m.StreamTokens(ask.session, ask.round, ask.base, tokens, done)


def _unknown_finish(ask: Any) -> bytes:
    """Its tokens end the turn for a reason that there is none of."""
    frame = encode(
        m.StreamTokens(ask.session, ask.round, ask.base, [40], done=True, finish="length")
    )
    return frame.replace(b"\xa6length", b"\xa6foobar")


def _activations(**fields: Any) -> Callable[[Any], Sequence[Reply]]:
    def make(message: Any) -> Sequence[Reply]:
        right = {
            "epoch": 0,
            "start": 0,
            "rows": 1,
            "dtype": "int8",
            "heads": 2,
            "head_dim": 32,
            "payload": bytes(136),
        }
        return [m.Activations(message.session, **(right | fields))]

    return make


_ROUNDS = (m.Stream,)
_ADVANCES = m.StreamTokens
_OPENS = (m.Open, m.Append, m.Resume)
_ASKS = (*_OPENS, *_ROUNDS)

BEHAVIOURS: dict[str, Behaviour] = {
    "honest": lambda message, right: right,
    "forward of 0 ms": _with(_ADVANCES, forward_ms=0.0),
    "forward of 1e300 ms": _with(_ADVANCES, forward_ms=1e300),
    "forward of infinite ms": _with(_ADVANCES, forward_ms=math.inf, queue_ms=math.inf),
    "forward that is no number": _with(_ADVANCES, forward_ms=math.nan, queue_ms=math.nan),
    "forward before it was asked for": _with(_ADVANCES, forward_ms=-1.0),
    "token outside the vocabulary": _with(_ADVANCES, tokens=[HUGE]),
    "more guesses than were sent": _with(_ADVANCES, drafted=HUGE, foreseen=HUGE),
    "another base": _with(_ADVANCES, base=HUGE),
    "another round": _with(_ADVANCES, round=HUGE),
    "log-probabilities of nobody": _with(_ADVANCES, logprobs=b"\xff" * 999),
    "unknown finish": _instead(
        _ROUNDS,
        lambda ask: [_unknown_finish(ask)],
    ),
    "quarantined": _instead((m.Open, *_ROUNDS), _error("quarantined")),
    "unknown session": _instead(_ROUNDS, _error("unknown_session")),
    "busy without a wait": _instead(_ROUNDS, _error("busy")),
    "busy for ever": _instead(_ASKS, _error("busy", retry=HUGE)),
    "internal": _instead(_ASKS, _error("internal")),
    "an unknown code": _instead(_ROUNDS, _error(f"new{ESCAPE}")),
    "a limit": _instead(_ASKS, _error("limit", limit=ESCAPE)),
    "empty stream tokens": _instead(_ROUNDS, lambda ask: [_streamed(ask, []), 0.01] * 100),
    "tokens without end": _instead(
        _ROUNDS, lambda ask: [_streamed(ask, [40 + n % 9 for n in range(100_000)])] * 20
    ),
    "unrelated frames": _instead(
        _ROUNDS, lambda ask: [m.Opened(bytes(16), 3), 2.0, m.Opened(bytes(16), 3), 2.0]
    ),
    "silence": _instead(_ROUNDS, lambda ask: []),
    "silence to hello": _instead((m.Hello,), lambda ask: []),
    "activations at 2^31": _behind(_ROUNDS, _activations(start=HUGE)),
    "activations of 2^31 rows": _behind(_ROUNDS, _activations(rows=HUGE)),
    "activations of other heads": _behind(_ROUNDS, _activations(heads=HUGE, head_dim=HUGE)),
    "activations of no rows": _behind(_ROUNDS, _activations(rows=0, payload=b"")),
    "activations that are no numbers": _behind(
        _ROUNDS, _activations(dtype="fp16", payload=b"\xff" * 256)
    ),
    "activations of another epoch": _behind(_ROUNDS, _activations(epoch=HUGE)),
    "opened far too long": _instead((m.Open,), lambda ask: [m.Opened(ask.session, HUGE)]),
    "opened twice": _behind(
        (m.Open,), lambda ask: [m.Opened(ask.session, len(ask.ids)), m.Opened(ask.session, 1)]
    ),
    "resumed with a wrong tail": _instead(
        (m.Resume,), lambda ask: [m.Resumed(ask.session, "resumed", HUGE, HUGE, [1] * 9)]
    ),
    "limits of 0": _with(m.Welcome, limits=m.WireLimits(0, 0, 0, 0, 0, 0)),
    "limits of 1": _with(m.Welcome, limits=m.WireLimits(1, 1, 1, 1, 1, 1)),
    "huge limits": _with(m.Welcome, limits=m.WireLimits(HUGE, HUGE, HUGE, HUGE, HUGE, HUGE)),
    "a vocabulary of 1": _with(m.Welcome, vocab_size=1),
    "records of 2^31 heads": _with(m.Welcome, records=m.RecordContract(HUGE, HUGE, ["int8"])),
    "records of no kind": _with(m.Welcome, records=m.RecordContract(0, 0, [])),
    "another version": _with(m.Welcome, version=99),
    "notices with escapes": _with(
        m.Welcome, notices=[ESCAPE * 50] * 20, server=ESCAPE, instance=ESCAPE
    ),
    "goaway at once": _behind((m.Hello,), lambda ask: [m.Goaway(ESCAPE), End(1012, "bye")]),
    "goaway for 2^31 ms": _behind((m.Hello,), lambda ask: [m.Goaway(ESCAPE, HUGE, HUGE)]),
    "frames that are none": _behind(
        _ROUNDS, lambda ask: [b"\xc1", b"", b"\x90", b"\x92\xa5error\xc0"]
    ),
    "text frames": _behind(_ROUNDS, lambda ask: ["hello \x1b[2J"]),
    "a frame of 16 MB": _behind(_ROUNDS, lambda ask: [bytes(16 * 2**20)]),
    "nested frames": _behind(_ROUNDS, lambda ask: [b"\x91" * 100_000]),
    "closed with a reason": _instead(_ROUNDS, lambda ask: [End(1008, ESCAPE)]),
    "cut": _instead(_ROUNDS, lambda ask: [End()]),
    "cut at hello": _instead((m.Hello,), lambda ask: [End()]),
    "cut after each opening": _behind(_OPENS, lambda ask: [End()]),
    "silence to every open": _instead(_OPENS, lambda ask: []),
}


def _no_session(code: str) -> Behaviour:
    """No opening is taken, so there is no session for a round."""
    refused = _instead(_OPENS, _error(code))
    unknown = _instead(_ROUNDS, _error("unknown_session"))
    return lambda message, right: refused(message, unknown(message, right))  # type: ignore[arg-type]


_CODES = [*(code.value for code in Code), "a code of tomorrow"]
FOR_EVER = {f"{code} to every round": _instead(_ROUNDS, _error(code)) for code in _CODES}
FOR_EVER |= {f"{code} to every open": _no_session(code) for code in _CODES}
"""Each error in answer to each request of a kind, without end."""
BEHAVIOURS |= FOR_EVER


class Fake:
    """A running fake."""

    def __init__(
        self, behaviour: Behaviour, tokens: Sequence[int], welcome: dict[str, Any]
    ) -> None:
        self._behaviour = behaviour
        self._tokens = tokens
        self.url = ""
        self.asked = 0
        """Requests and connections."""
        self._welcome = replace(WELCOME, **welcome)
        self._next = 0

    async def serve(self, connection: ServerConnection) -> None:
        """One connection."""
        self.asked += 1
        with contextlib.suppress(ConnectionClosed, OSError):
            async for frame in connection:
                with contextlib.suppress(Refusal):
                    message = decode_client(frame if isinstance(frame, bytes) else frame.encode())
                    self.asked += not isinstance(message, m.Close | m.Foresee)
                    if isinstance(message, m.Stream):
                        self._next += 1
                    right = honest(message, self._tokens[self._next % len(self._tokens)])
                    if isinstance(message, m.Hello):
                        right = [self._welcome]
                    for reply in self._behaviour(message, right):
                        await self._reply(connection, reply)

    async def _reply(self, connection: ServerConnection, reply: Reply) -> None:
        match reply:
            case End(0):
                connection.transport.abort()
                raise ConnectionClosedError(None, None)
            case End(code, reason):
                await connection.close(code, reason)
            case float():
                await asyncio.sleep(reply)
            case str() | bytes():
                await connection.send(reply)
            case _:
                await connection.send(encode(reply))


@contextlib.asynccontextmanager
async def fake(
    behaviour: Behaviour, tokens: Sequence[int], welcome: dict[str, Any]
) -> AsyncIterator[Fake]:
    """A fake verifier on loopback, whose target says these tokens over and over."""
    made = Fake(behaviour, tokens, welcome)
    async with serve(
        made.serve,
        "127.0.0.1",
        0,
        subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
        compression=None,
        close_timeout=1,
        max_size=2**24,
    ) as running:
        made.url = f"ws://127.0.0.1:{next(iter(running.sockets)).getsockname()[1]}"
        yield made
