"""Kills a verifier again and again and cuts its clients' connections; every text must be the target's own.

The clients record their events, and `history.py` checks that they are consistent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from moa.process.listening import Port
from moa.wire import ClientSession, Recovered, Refused
from moa.wire.events import Advanced
from moa.wire.messages import Ack, Activations, Stream, Verify
from tests.torture.history import Entry, Finished, Opened, Verified, violations
from tests.torture.raw import PATIENCE, Raw, binary

_START_SECONDS = 1800.0  # at low priority a run starts slowly
_TOKENS = 48
_HALF_OPEN = 3
_PAUSE = 0.05
"""Longest time between two kills, in seconds: a few rounds of every client."""


@dataclass
class Toll:
    """The counts of a run, and whether it was right."""

    kills: int = 0
    cuts: int = 0
    """Connections lost by force, of which each client made another."""
    answers: int = 0
    reopened: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Nursery:
    """Starts verifiers."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self._file, self._log = folder / "pid", folder / "log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Load the model, and start the first one."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.torture.nursery", str(self.port), str(self._file)),
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        await self.alive()

    async def alive(self) -> None:
        """Wait until one listens."""
        async with asyncio.timeout(_START_SECONDS):
            while True:
                with contextlib.suppress(OSError):
                    await (await Raw.connect(self.port)).gone()
                    return
                await asyncio.sleep(0.02)

    @property
    def said(self) -> str:
        """What they have logged."""
        return self._log.read_text()

    def kill(self) -> None:
        """SIGKILL the running one."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int(self._file.read_text()), signal.SIGKILL)

    async def stop(self) -> None:
        """End it all."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self.kill()


@contextlib.asynccontextmanager
async def nursery() -> AsyncIterator[Nursery]:
    """Starts verifiers while the context lasts."""
    with tempfile.TemporaryDirectory() as folder, Port("127.0.0.1", 0) as port:
        made = Nursery(Path(folder), port.number)
        try:
            await made.start()
            yield made
        finally:
            await made.stop()


class Asker:
    """A client that completes its answers over any number of connections."""

    def __init__(self, port: int, seed: int, toll: Toll, entries: list[Entry], token: str = "") -> None:
        self._port, self._rng, self._toll, self._entries = port, random.Random(seed), toll, entries
        self._token = token
        self._raw: Raw | None = None
        self._gone: list[Raw] = []
        """Connections that the other end still takes for alive."""
        self._received = 0

    async def answer(self, name: str, prompt: list[int]) -> list[int]:
        """One answer, through as many connections as it takes."""
        session = ClientSession(list(prompt), max_new_tokens=_TOKENS, ignore_eos=True)
        self._entries.append(Opened(name, list(prompt)))
        opening = True
        while not session.finish:
            try:
                raw = await self._connection()
                if opening:
                    for request in session.recover() if session.unsettled or session.settled else [session.open()]:
                        raw.write(binary(request))
                    opening = False
                elif not session.unsettled:
                    raw.write(binary(self._round(session)))
                if session.streaming is not None and session.settled:
                    tokens = [*self._draft(session), 40]
                    raw.write(binary(session.foresee(tokens, range(-1, len(tokens) - 1), [0] * len(tokens))))
                await self._take(raw, session, name)
            except (ConnectionError, OSError, TimeoutError, asyncio.IncompleteReadError):
                await self.leave()
                opening = True
                await asyncio.sleep(0.02)
        self._entries.append(Finished(name, list(session.log)))
        if self._raw is not None:
            self._raw.write(binary(session.close()))
        self._toll.answers += 1
        return session.log[len(prompt) :]

    def cut(self) -> bool:
        """Lose the connection: reset, reset in the middle of a frame, or in silence. Whether there was one."""
        raw = self._raw
        if raw is None or raw in self._gone or raw.writer.is_closing():
            return False
        how = self._rng.randrange(3)
        if how == 0:
            self._gone.append(raw)
            raw.deaf()
            raw.reader.feed_eof()  # to this end it is over, and the other is told nothing
            return True
        if how == 1:
            frame = binary(Ack(self._received))
            raw.write(frame[: self._rng.randrange(1, len(frame))])
        raw.abort()
        return True

    async def leave(self) -> None:
        """Close the connection."""
        raw, self._raw = self._raw, None
        if raw is not None and raw not in self._gone:
            await raw.gone()
        if len(self._gone) > _HALF_OPEN:
            await self._gone.pop(0).gone()

    async def end(self) -> None:
        """Be done with all of them."""
        await self.leave()
        while self._gone:
            await self._gone.pop().gone()

    async def _connection(self) -> Raw:
        if self._raw is None:
            async with asyncio.timeout(PATIENCE):
                self._raw = await Raw.greeted(self._port, self._token)
            self._received = 0
        return self._raw

    def _round(self, session: ClientSession) -> Verify | Stream:
        """A draft, a stream of the server's own, or one that waits for guesses."""
        match self._rng.randrange(4):
            case 0:
                return session.stream()
            case 1:
                return session.stream(speculate=False, waits=True)
            case _:
                return session.verify(self._draft(session))

    def _draft(self, session: ClientSession) -> list[int]:
        return [session.log[-1], *(self._rng.randrange(40, 200) for _ in range(self._rng.randrange(4)))]

    async def _take(self, raw: Raw, session: ClientSession, name: str) -> None:
        message = await raw.message()
        if isinstance(message, Activations):
            self._received += len(message.payload)
            raw.write(binary(Ack(self._received)))
        if getattr(message, "session", b"") != session.id:
            return
        event = session.receive(message)  # type: ignore[arg-type]
        match event:
            case Advanced() if event.tokens:
                self._entries.append(Verified(name, event.base + 1, list(event.tokens)))
            case Recovered():
                self._toll.reopened += event.outcome == "gone"
                if event.tokens:
                    self._entries.append(Verified(name, event.base + 1, list(event.tokens)))
                for request in event.resend:
                    raw.write(binary(request))
            case Refused() if event.retry:
                await asyncio.sleep(event.retry_after)
                for request in session.unsettled:
                    raw.write(binary(request))
            case Refused():
                raise AssertionError(f"refused: {event.error}")


async def run(place: Nursery, *, kills: int, cuts: int, clients: int = 4, seed: int = 0) -> Toll:
    """Answers by several clients, until there were so many kills and cuts."""
    toll, entries, rng, began = Toll(), list[Entry](), random.Random(seed), time.monotonic()
    askers = [Asker(place.port, seed + number, toll, entries) for number in range(clients)]
    truth: dict[int, list[int]] = {}
    for number in range(clients):  # what each prompt is answered when nobody is killed
        truth[number] = await askers[number].answer(f"calm-{number}", _prompt(number))
    ended = asyncio.Event()
    logs: dict[str, list[int]] = {f"calm-{number}": [*_prompt(number), *truth[number]] for number in truth}

    async def ask(number: int) -> None:
        turn = 0
        while not ended.is_set():
            name, turn = f"{number}-{turn}", turn + 1
            logs[name] = [*_prompt(number), *truth[number]]
            await askers[number].answer(name, _prompt(number))

    async def harm() -> None:
        while toll.kills < kills or toll.cuts < cuts:
            await asyncio.sleep(rng.uniform(0.0, _PAUSE))
            if toll.cuts < cuts:
                toll.cuts += rng.choice(askers).cut()
            if toll.kills < kills and (toll.cuts >= cuts or rng.random() < kills / max(1, cuts)):
                place.kill()
                toll.kills += 1
                await place.alive()
        ended.set()

    await asyncio.gather(harm(), *(ask(number) for number in range(clients)))
    for asker in askers:
        await asker.end()
    toll.seconds = time.monotonic() - began
    toll.wrong = violations(entries, logs)
    return toll


def _prompt(number: int) -> list[int]:
    return [40 + number, *range(60, 75)]
