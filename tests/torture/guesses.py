"""Guesses that no device makes: to running, waiting and ended streams, to those of others, while
activation records are on their way.

A frame of guesses is never answered: what fits the log when it is wanted is verified, the rest is
dropped. Only what is no tree of tokens is refused. So of each frame it is known what must come of
it: nothing, or an error with that code; and the text stays the target's whatever was guessed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from msgspec.msgpack import encode as pack

from moa.wire import ClientSession, Code
from moa.wire import messages as m
from moa.wire.events import Advanced, Refused
from testing.client import Client, client
from testing.devices import scripts
from tests.torture.fuzz import UNBOUNDED
from tests.torture.neighbour import neighbour, problems
from tests.torture.raw import BINARY, PATIENCE, Raw, binary, frame
from tests.torture.server import server
from tests.torture.tally import Found, Tally

HUGE = 2**31 - 1
_MOST_IN_A_FRAME = 4096
_BURSTS = 40
"""Of frames to one session: then it is finished without guesses."""
_MOST_AT_ONCE = 12
_LANES = 4
_TEXTS = 8
_PROMPT = 24
_TOKENS = 60


class Text(NamedTuple):
    """A prompt, and what the target says to it."""

    ids: list[int]
    truth: list[int]

    @property
    def all(self) -> list[int]:
        """Both."""
        return [*self.ids, *self.truth]


class Drawn(NamedTuple):
    """A frame of guesses, and what it is refused with; nothing for one that is not answered."""

    kind: str
    frame: bytes
    code: str = ""


class Guesser:
    """Draws frames of guesses."""

    def __init__(self, rng: random.Random, welcome: m.Welcome, victim: ClientSession) -> None:
        self._rng = rng
        self._vocabulary = welcome.vocab_size
        self._most = welcome.limits.max_guess_tokens
        self._victim = victim
        self.ended: list[bytes] = []
        """Sessions that were closed."""
        self._last: Drawn | None = None

    def draw(self, session: ClientSession, text: Text) -> Drawn:
        """The next frame, mostly about this session."""
        makers: list[Callable[[ClientSession, Text], Drawn]] = [
            *[self._right, self._tree] * 3,
            self._past,
            self._future,
            self._another_root,
            self._another_round,
            self._another_session,
            self._of_the_victim,
            self._repeated,
            self._as_many_as_allowed,
            self._too_many,
            self._odd_parents,
            self._unequal,
            self._outside_of_the_vocabulary,
            self._numbers_out_of_range,
        ]
        made = self._rng.choice(makers)(session, text)
        if not made.code:
            self._last = made
        return made

    # ---- what is dropped, or verified

    def _right(self, session: ClientSession, text: Text) -> Drawn:
        """A chain of what the target says, with a wrong token behind it now and then."""
        base = session.base
        count = self._rng.randrange(1, 25)
        tokens = text.all[base : base + 1 + count]
        if self._rng.random() < 0.4:
            tokens.append(self._token())
        return self._made("right", session, base, tokens, list(range(-1, len(tokens) - 1)))

    def _tree(self, session: ClientSession, text: Text) -> Drawn:
        """A tree whose nodes are right about half of the time."""
        return self._made("tree", session, session.base, *self._grown(text, session.base))

    def _past(self, session: ClientSession, text: Text) -> Drawn:
        """Rooted where the log has been: in the answer, or in the prompt."""
        base = self._rng.randrange(session.base + 1)
        return self._made("past", session, base, *self._grown(text, base))

    def _future(self, session: ClientSession, text: Text) -> Drawn:
        """Rooted where the log may be one day, or never."""
        near = min(session.base + self._rng.randrange(1, 9), len(text.all) - 1)
        base = self._rng.choice([near, near, len(text.all), HUGE])
        return self._made("future", session, base, *self._grown(text, near))

    def _another_root(self, session: ClientSession, text: Text) -> Drawn:
        tokens, parents = self._grown(text, session.base)
        return self._made("root", session, session.base, [self._token(), *tokens[1:]], parents)

    def _another_round(self, session: ClientSession, text: Text) -> Drawn:
        tokens, parents = self._grown(text, session.base)
        round = self._rng.choice([0, session.round, session.round + 2, HUGE])
        return self._made("round", session, session.base, tokens, parents, round=round)

    def _another_session(self, session: ClientSession, text: Text) -> Drawn:
        """One that was closed, or that there never was."""
        tokens, parents = self._grown(text, session.base)
        unknown = self._rng.randbytes(16)
        id = self._rng.choice([*self.ended[-4:], unknown])
        return self._made("session", session, session.base, tokens, parents, id=id)

    def _of_the_victim(self, session: ClientSession, text: Text) -> Drawn:
        """Another principal's stream, which waits for guesses of its own."""
        theirs = self._victim
        tokens = [theirs.log[-1], *(self._token() for _ in range(self._rng.randrange(1, 9)))]
        chain = list(range(-1, len(tokens) - 1))
        return self._made("foreign", theirs, theirs.base, tokens, chain, round=1, waits=False)

    def _repeated(self, session: ClientSession, text: Text) -> Drawn:
        """The last one, many times."""
        last = self._last or self._right(session, text)
        return Drawn("repeated", last.frame * self._rng.randrange(2, 40))

    def _as_many_as_allowed(self, session: ClientSession, text: Text) -> Drawn:
        """A chain, or all below one node."""
        tokens = [session.log[-1], *(self._token() for _ in range(self._most - 1))]
        chain = list(range(-1, self._most - 1))
        star = [-1] + [0] * (self._most - 1)
        return self._made("many", session, session.base, tokens, self._rng.choice([chain, star]))

    # ---- what is refused

    def _too_many(self, session: ClientSession, text: Text) -> Drawn:
        count = self._rng.choice([self._most + 1, _MOST_IN_A_FRAME])
        tokens = [session.log[-1]] * count
        parents = list(range(-1, count - 1))
        return self._made("too many", session, session.base, tokens, parents, code=Code.LIMIT)

    def _odd_parents(self, session: ClientSession, text: Text) -> Drawn:
        """A node that is its own parent, or the root of another tree, or comes before its parent; a
        root that has a parent."""
        tokens, parents = self._grown(text, session.base)
        node = self._rng.randrange(len(parents))
        odd = self._rng.choice([node, node + 1, len(parents), _MOST_IN_A_FRAME - 1])
        parents[node] = self._rng.choice([odd, -1]) if node else odd
        code = Code.BAD_MESSAGE
        return self._made("parents", session, session.base, tokens, parents, code=code)

    def _unequal(self, session: ClientSession, text: Text) -> Drawn:
        """Lists of unequal lengths, or empty ones."""
        tokens, parents = self._grown(text, session.base)
        lists = [tokens, parents, [0] * len(tokens)]
        which = self._rng.randrange(3)
        lists[which] = self._rng.choice([lists[which][:-1], [*lists[which], 0], []])
        return self._packed("unequal", session, session.base, *lists)

    def _outside_of_the_vocabulary(self, session: ClientSession, text: Text) -> Drawn:
        tokens, parents = self._grown(text, session.base)
        node = self._rng.randrange(len(tokens))
        tokens[node] = self._rng.choice([self._vocabulary, self._vocabulary + 1, HUGE])
        code = Code.BAD_MESSAGE
        return self._made("vocabulary", session, session.base, tokens, parents, code=code)

    def _numbers_out_of_range(self, session: ClientSession, text: Text) -> Drawn:
        tokens, parents = self._grown(text, session.base)
        chances = [0] * len(tokens)
        base = session.base
        node = self._rng.randrange(len(tokens))
        match self._rng.randrange(4):
            case 0:
                tokens[node] = self._rng.choice([-1, 2**31, 2**63])
            case 1:
                parents[node] = self._rng.choice([-2, _MOST_IN_A_FRAME, 2**31])
            case 2:
                chances[node] = self._rng.choice([-1, 256, 2**40])
            case _:
                base = self._rng.choice([-1, 2**31])
        return self._packed("numbers", session, base, tokens, parents, chances)

    # ---- helpers

    def _token(self) -> int:
        return self._rng.randrange(self._vocabulary)

    def _grown(self, text: Text, base: int) -> tuple[list[int], list[int]]:
        """A tree below a position of the text, of two nodes at least."""
        whole = text.all
        tokens = [whole[base]]
        parents = [-1]
        depths = [0]
        for node in range(1, self._rng.randrange(2, 16)):
            parent = self._rng.randrange(node)
            place = base + depths[parent] + 1
            is_right = place < len(whole) and self._rng.random() < 0.6
            tokens.append(whole[place] if is_right else self._token())
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tokens, parents

    def _made(
        self,
        kind: str,
        session: ClientSession,
        base: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        *,
        id: bytes = b"",
        round: int = -1,
        waits: bool | None = None,
        code: str = "",
    ) -> Drawn:
        """The frame of a tree with chances that are drawn."""
        chances = [self._rng.randrange(256) for _ in tokens]
        if not code and waits is None:
            waits = self._rng.choice([None, None, None, True, False])
        message = m.Foresee(
            id or session.id,
            session.round + 1 if round < 0 else round,
            base,
            list(tokens),
            list(parents),
            chances,
            waits,
        )
        return Drawn(kind, binary(message), code)

    def _packed(self, kind: str, session: ClientSession, base: int, *lists: list[int]) -> Drawn:
        """What no message can hold."""
        fields = ["foresee", session.id, session.round + 1, base, *lists]
        return Drawn(kind, frame(BINARY, pack(fields)), Code.BAD_MESSAGE)


class Lane:
    """One connection, one session after the other."""

    def __init__(self, raw: Raw, rng: random.Random, victim: ClientSession) -> None:
        assert isinstance(raw.welcome, m.Welcome)
        self._raw = raw
        self._rng = rng
        self._guesser = Guesser(rng, raw.welcome, victim)
        self._received = 0
        self.counts = Counter[str]()
        self.wrong: list[str] = []

    async def run(self, texts: Sequence[Text], guesses: int) -> None:
        """Send about so many frames of guesses, or repeated ones."""
        while self.counts["guesses"] < guesses and not self.wrong:
            await self._answer(self._rng.choice(texts))

    async def _answer(self, text: Text) -> None:
        """One session, to its end."""
        rng = self._rng
        session = ClientSession(
            list(text.ids),
            max_new_tokens=len(text.truth),
            ignore_eos=True,
            records=rng.choice(["off", "int8", "fp16"]),
        )
        self._raw.write(binary(session.open()))
        for _ in range(_BURSTS):
            if session.finish:
                break
            if not session.busy:
                waits = rng.random() < 0.7
                self._raw.write(binary(session.stream(speculate=rng.random() < 0.5, waits=waits)))
            await self._burst(session, text)
        await self._finish(session)
        self.counts["texts"] += 1
        if session.log != text.all:
            self.wrong.append(f"another text: {session.log} instead of {text.all}")
        await self._burst(session, text)  # to one that has ended, and is not closed
        self._raw.write(binary(session.close()))
        self._guesser.ended.append(session.id)

    async def _burst(self, session: ClientSession, text: Text) -> None:
        """Some frames at once, and what comes of them."""
        rng = self._rng
        expected = Counter[str]()
        pieces = []
        for _ in range(rng.randrange(1, _MOST_AT_ONCE)):
            drawn = self._guesser.draw(session, text)
            self.counts["guesses"] += 1
            self.counts[drawn.kind] += 1
            pieces.append(drawn.frame)
            if drawn.code:
                expected[drawn.code] += 1
            if rng.random() < 0.05:
                pieces.append(binary(m.Sync(session.id, rng.choice(["off", "int8", "fp16"]))))
        if rng.random() < 0.05 and (cancel := session.cancel()) is not None:
            pieces.append(binary(cancel))
        marker = rng.randbytes(16)
        # It is answered when all before it was looked at.
        pieces.append(binary(m.Resume(session=marker, length=1, chain=marker, round=0)))
        await self._raw.pour(b"".join(pieces))
        found = Counter[str]()
        while True:
            message = await self._raw.message()
            if getattr(message, "session", b"") == marker:
                break
            self._take(session, message, found)
        if found != expected:
            self.wrong.append(f"refused with {dict(found)} instead of {dict(expected)}")

    async def _finish(self, session: ClientSession) -> None:
        """Let the server write the rest."""
        while not session.finish:
            if not session.busy:
                self._raw.write(binary(session.stream()))
            else:
                self._raw.write(binary(session.foresee([session.log[-1]], [-1], [0], waits=False)))
            found = Counter[str]()
            self._take(session, await self._raw.message(), found)
            if found:
                self.wrong.append(f"refused with {dict(found)}")
                return

    def _take(self, session: ClientSession, message: m.ServerMessage, found: Counter[str]) -> None:
        """Take what the server says to the session, and count what it refuses."""
        if isinstance(message, m.Error):
            if message.code in (Code.BAD_MESSAGE, Code.LIMIT):
                found[message.code] += 1
                return
        elif getattr(message, "session", b"") != session.id:
            return
        if isinstance(message, m.Activations):
            self._received += len(message.payload)
            self.counts["record rows"] += message.rows
            if self._rng.random() < 0.7:  # else some wait to be acknowledged
                self._raw.write(binary(m.Ack(self._received)))
        event = session.receive(message)
        if isinstance(event, Advanced):
            self.counts["foreseen"] += event.foreseen
            self.counts["tokens"] += len(event.tokens)
        elif isinstance(event, Refused):
            if not event.retry:
                self.wrong.append(f"a stream was refused: {event.error}")
            for request in session.unsettled:
                self._raw.write(binary(request))


@contextlib.asynccontextmanager
async def waiting(edge: Client, text: Text) -> AsyncIterator[ClientSession]:
    """A stream of somebody else's that waits for guesses, and gets none of its own while the body
    runs: so nothing may come of it. Then it is the target's."""
    session = await edge.start(text.ids, max_new_tokens=len(text.truth), ignore_eos=True)
    await edge.send(session.stream(speculate=False, waits=True))
    yield session
    marker = bytes(15) + b"m"
    await edge.send(m.Resume(session=marker, length=1, chain=marker, round=0))
    while getattr(message := await edge.receive(), "session", b"") != marker:
        assert not isinstance(message, m.StreamTokens), "somebody else's guess was verified"
    await edge.send(session.foresee([session.log[-1]], [-1], [0], waits=False))
    while session.busy:
        event = await edge.event(session)
        assert not isinstance(event, Advanced) or not event.foreseen
    assert session.log == text.all
    await edge.send(session.close())


async def guess(
    port: int,
    tokens: tuple[str, str],
    texts: Sequence[Text],
    guesses: int,
    seed: int,
    *,
    lanes: int = _LANES,
) -> tuple[Counter[str], list[str]]:
    """So many frames of guesses on each lane, of one principal, beside a stream of another one's
    that waits for its own. The tokens are of the two."""
    mine, theirs = tokens
    seeds = random.Random(seed)
    counts = Counter[str]()
    wrong: list[str] = []

    async def lane(victim: ClientSession, seed: int) -> None:
        raw = await Raw.greeted(port, mine)
        try:
            made = Lane(raw, random.Random(seed), victim)
            await made.run(texts, guesses)
            counts.update(made.counts)
            wrong.extend(f"seed {seed}: {one}" for one in made.wrong)
        finally:
            await raw.gone()

    async with (
        client(f"ws://127.0.0.1:{port}", token=theirs, patience=PATIENCE) as edge,
        waiting(edge, texts[0]) as victim,
    ):
        await asyncio.gather(*(lane(victim, seeds.getrandbits(60)) for _ in range(lanes)))
    return counts, wrong


async def guessing(options: argparse.Namespace) -> Found:
    """The part: a real verifier of the embedded pair, and a normal client beside it."""
    tally = Tally(options, "guesses", guesses=4_000)
    async with server(*UNBOUNDED) as running:
        told = await scripts(
            running.url,
            _TEXTS,
            length=_PROMPT,
            tokens=_TOKENS,
            rate=1.0,
            nodes=2,
            token=running.honest,
        )
        texts = [Text(one.ids, one.truth) for one in told]
        before = await neighbour(running.url, running.honest, 2.0)
        memory = running.memory
        descriptors = running.descriptors
        tokens = running.greedy, running.honest
        for seed, batch in tally.batches():
            beside = asyncio.create_task(neighbour(running.url, running.honest, 1.0))
            each = batch["guesses"] // _LANES + 1
            counts, wrong = await guess(running.port, tokens, texts, each, seed)
            wrong += [*problems(before, await beside), *running.complaints()]
            tally.add(seed, counts, wrong, megabytes=running.memory - memory)
            if wrong:
                break
        await asyncio.sleep(1.0)  # what was closed has been put away
        more = running.descriptors - descriptors
        leaked = [f"{more} descriptors leaked"] if more > 8 else []
        tally.add(options.seed, {}, leaked, descriptors=more)
    return tally.found
