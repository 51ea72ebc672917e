"""Scripted devices with little CPU use: drafts are made in advance, and each gets one answer over
any number of connections.

They share the machine with the verifier, which is what is measured. A draft's tokens are right with
a stated probability, or were drafted by a real drafter; every token that comes is compared with the
target's own text.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple

from websockets.exceptions import ConnectionClosed, InvalidHandshake

from moa.errors import MoaError
from moa.wire import FEATURES, ClientSession, Code
from moa.wire.events import Advanced, Recovered, Refused
from moa.wire.messages import RecordDtype, Stream
from testing.client import PATIENCE, Client, client

_BACKOFF = (0.05, 1.0)
_NEG_LOG_PROB = 1
"""Of a guess whose chance a script does not say: each is right nine times in ten."""
_AHEAD = 24
"""Guesses in a message."""
Way = Literal["device", "ahead", "server", "none"]
"""Who drafts. `device`: a draft after each answer, for which the verifier waits; `ahead`: as many
guesses as it has, so that the verifier need not wait."""


class Guessed(NamedTuple):
    """Guesses, one after another, and what the device says of the chance of each."""

    tokens: list[int]
    neg_log_probs: list[int]


@dataclass(frozen=True)
class Script:
    """A prompt, what the target says to it, and the draft at each place: `drafts[k]` follows
    `truth[:k]`."""

    ids: list[int]
    truth: list[int]
    drafts: list[list[int]]
    neg_log_probs: list[list[int]] = field(default_factory=list)
    """What the device says of the chance of each guess, in drafts like those. Who says too little
    of a good drafter gets fewer of its guesses verified, where a verifier is full."""

    @classmethod
    def along(cls, ids: list[int], truth: list[int], guesses: Sequence[int], nodes: int) -> Script:
        """With one guess for each place of the text; a draft is `nodes` tokens, the last known one
        among them."""
        return cls(ids, truth, [list(guesses[k : k + nodes - 1]) for k in range(len(truth))])

    def after(self, done: int) -> Guessed:
        """What a device guesses after `truth[:done]`: one draft."""
        tokens = self.drafts[done]
        if self.neg_log_probs:
            return Guessed(tokens, self.neg_log_probs[done])
        return Guessed(tokens, [_NEG_LOG_PROB] * len(tokens))

    def ahead(self, done: int) -> Guessed:
        """The same, draft after draft up to the first wrong one."""
        guesses: list[int] = []
        neg_log_probs: list[int] = []
        for _ in range(_AHEAD):  # drafts of one token are the shortest
            here = done + len(guesses)
            if here >= len(self.truth) or guesses != self.truth[done:here]:
                break
            draft = self.after(here)
            guesses += draft.tokens
            neg_log_probs += draft.neg_log_probs
        return Guessed(guesses[:_AHEAD], neg_log_probs[:_AHEAD])


async def scripts(
    url: str, count: int, *, length: int, tokens: int, rate: float, nodes: int, token: str = ""
) -> list[Script]:
    """Random prompts of about `length` tokens, no two of one length, with the target's answers of
    `tokens` tokens."""

    async def one(seed: int) -> Script:
        rng = random.Random(seed)
        async with client(url, token=token) as edge:
            vocabulary = edge.welcome.vocab_size
            ids = prompt(seed, max(1, length // 2) + seed, vocabulary)
            session = await edge.start(
                ids, patient=True, max_new_tokens=tokens, ignore_eos=True, records="off"
            )
            await edge.stream(session, speculate=False)
            await edge.send(session.close())
        truth = session.log[len(ids) :]
        guesses = [
            token if rng.random() < rate else rng.randrange(4, vocabulary) for token in truth
        ]
        return Script.along(ids, truth, guesses, nodes)

    return list(await asyncio.gather(*map(one, range(count))))


def prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    """Random ids that are no special tokens."""
    rng = random.Random(seed)
    return [rng.randrange(4, vocabulary) for _ in range(length)]


class Round(NamedTuple):
    """When it was sent, when its answer was read, and how many tokens it won."""

    sent: float
    read: float
    tokens: int


@dataclass
class ScriptedDevice:
    """One device with one answer to get."""

    url: str
    script: Script
    way: Way = "device"
    records: RecordDtype = "off"
    think: float = 0.0
    """Seconds between two rounds."""
    begin: Callable[[], Awaitable[None]] | None = None
    """Called once the prompt has run and the first token is known; the answer goes on when it
    returns."""
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    token: str = ""
    """Its bearer token."""
    reopened: int = 0
    """How often the verifier had lost the session."""
    rounds: list[Round] = field(default_factory=list)
    _telling: set[asyncio.Task[None]] = field(default_factory=set)
    _sent_at: float = 0.0
    """When it last asked for something."""
    _released: tuple[bytes, int] | None = None
    """The stream whose verifier was told to wait no longer, on this connection."""
    _lost_at: float = 0.0
    """When the last connection ended, until it is told tokens by a later one; 0: it has been."""

    def __post_init__(self) -> None:
        self.session = ClientSession(
            list(self.script.ids),
            max_new_tokens=len(self.script.truth),
            ignore_eos=True,
            records=self.records,
        )

    @property
    def tokens(self) -> list[int]:
        """What it has been told."""
        return self.session.log[len(self.script.ids) :]

    @property
    def lost_for(self) -> float:
        """Seconds since a connection ended and no later one has told it tokens."""
        return perf_counter() - self._lost_at if self._lost_at else 0.0

    @property
    def exact(self) -> bool:
        """Whether it has the whole answer, and just that."""
        return self.tokens == self.script.truth and self.session.finish == "length"

    async def run(self) -> None:
        """Run until the answer has ended, over any number of connections."""
        pause, longest = _BACKOFF
        features = FEATURES if self.records != "off" else FEATURES - {"records"}
        while not self.session.finish:
            with contextlib.suppress(
                ConnectionClosed, InvalidHandshake, OSError, EOFError
            ):  # a timeout is an OSError
                async with client(
                    self.url, token=self.token, key=self.key, features=sorted(features)
                ) as edge:
                    pause = _BACKOFF[0]
                    try:
                        await self._converse(edge)
                    finally:
                        for telling in [*self._telling]:
                            telling.cancel()
                        self._released = None
            if not self.session.finish:
                self._lost_at = self._lost_at or perf_counter()
                if self.lost_for > PATIENCE:
                    raise MoaError(f"a device found no verifier for {PATIENCE:.0f} s")
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, longest)

    async def _converse(self, edge: Client) -> None:
        session = self.session
        edge.sessions[session.id] = (
            session  # it is told of the records that come, and asks for none of them again
        )
        if not session.settled and not session.unsettled:
            session.open()
        resuming = session.settled > 0
        await edge.send(*session.recover())
        if not resuming:
            await self._tell(edge)
        while not session.finish:
            if not session.unsettled and not resuming:
                await edge.send(self._stream())
                self._sent_at = perf_counter()
                await self._tell(edge)
            event = await edge.event(session)
            if isinstance(event, Recovered):
                resuming = False
                self.reopened += event.outcome == "gone"
                await edge.send(*event.resend)
                await self._tell(edge)  # guesses are not kept for a new connection
            elif isinstance(event, Refused):
                if not event.retry:
                    raise MoaError(f"a device was refused: {event.error.message}")
                if event.error.code == Code.DRAINING:
                    return
                await asyncio.sleep(max(0.02, event.retry_after) * random.uniform(0.5, 1.5))
                await edge.send(*session.unsettled)
                await self._tell(edge)
            elif isinstance(event, Advanced):
                if self.tokens != self.script.truth[: len(self.tokens)]:
                    raise MoaError("a device was told another text than the target's own")
                if event.tokens:
                    self.rounds.append(Round(self._sent_at, perf_counter(), len(event.tokens)))
                if session.streaming is not None:
                    telling = asyncio.create_task(self._go_on(edge))
                    self._telling.add(telling)
                    telling.add_done_callback(self._telling.discard)
                self._lost_at = 0.0
        await edge.send(session.close())

    def _stream(self) -> Stream:
        """What it asks for. Before all begin, the verifier waits with the second token."""
        waits = self.way in ("device", "ahead") or self.begin is not None
        return self.session.stream(speculate=self.way == "server", waits=waits)

    async def _go_on(self, edge: Client) -> None:
        """Tell more, a while after what it follows has come."""
        if self.tokens and self.begin is not None:
            begin, self.begin = self.begin, None
            await begin()
        await asyncio.sleep(self.think)
        await self._tell(edge)

    async def _tell(self, edge: Client) -> None:
        """Send the guesses for what follows; a verifier that is to draft itself is told so, once."""
        session = self.session
        stream = session.streaming
        if stream is None or not stream.waits:
            return
        guesses = Guessed([], [])
        waits: bool | None = None
        if self.begin is not None:
            if self.tokens:
                return  # it is about to begin
            guesses = self._wrong()
        elif self.way in ("device", "ahead"):
            guesses = self._guesses()
        elif (stream.session, stream.round) == self._released:
            return
        else:
            self._released = stream.session, stream.round
            waits = False
        self._sent_at = perf_counter()
        tokens = [session.log[-1], *guesses.tokens]
        parents = range(-1, len(guesses.tokens))
        neg_log_probs = [0, *guesses.neg_log_probs]
        with contextlib.suppress(ConnectionClosed):  # guesses are never owed
            await edge.send(session.foresee(tokens, parents, neg_log_probs, waits))

    def _guesses(self) -> Guessed:
        done = len(self.tokens)
        found = self.script.ahead(done) if self.way == "ahead" else self.script.after(done)
        return found if found.tokens else self._wrong()

    def _wrong(self) -> Guessed:
        """A guess for which the verifier makes just one token."""
        return Guessed([int(self.script.truth[len(self.tokens)] == 0)], [_NEG_LOG_PROB])


@contextlib.asynccontextmanager
async def together(devices: Iterable[ScriptedDevice]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """All of them at once; the context ends when the last has its answer, and with the first that
    fails."""
    try:
        async with asyncio.TaskGroup() as group:
            yield [group.create_task(device.run()) for device in devices]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
