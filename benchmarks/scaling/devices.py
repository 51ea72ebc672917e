"""Devices that draft, lose their connection, come back and resume, until they have the whole answer.

They do little work a round, for it is the servers that are measured: drafts are chains made beforehand whose tokens are
right with a stated probability, and what each device ends up with is compared with the target's own text.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake

from benchmarks.server.crowd import Speech
from benchmarks.server_kit import Client, client, percentiles
from moa.errors import MoaError
from moa.wire import FEATURES, ClientSession
from moa.wire.events import Recovered, Refused

_WITHOUT_RECORDS = FEATURES - {"records", "stream"}
_ANSWER_SECONDS = 10.0
"""Without an answer for so long the connection counts as dead."""
_BACKOFF = (0.05, 1.0)


@dataclass
class Device:
    """One device with one answer to get."""

    url: str
    speech: Speech
    nodes: int = 8
    think: float = 0.0
    """Seconds between two rounds."""
    drop_every: int = 0
    """Rounds after which it drops the connection without a word."""
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    instances: list[str] = field(default_factory=list)
    """The process on the other end, for every connection that was welcomed."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How the verifier answered its resumes."""
    round_ms: list[float] = field(default_factory=list)
    handshake_ms: list[float] = field(default_factory=list)
    recovery_ms: list[float] = field(default_factory=list)
    """From a lost connection to the next token."""
    _lost_at: float = 0.0

    def __post_init__(self) -> None:
        self.session = ClientSession(
            list(self.speech.ids), max_new_tokens=len(self.speech.truth), ignore_eos=True, records="off"
        )

    @property
    def tokens(self) -> list[int]:
        """What it has been told."""
        return self.session.log[len(self.speech.ids) :]

    @property
    def exact(self) -> bool:
        """Whether it has the whole answer, and just that."""
        return self.tokens == self.speech.truth and self.session.finish == "length"

    async def run(self) -> None:
        """Until the answer has ended, through however many connections it takes."""
        pause, longest = _BACKOFF
        while not self.session.finish:
            began = time.perf_counter()
            try:
                async with client(self.url, _WITHOUT_RECORDS, key=self.key) as edge:
                    self.handshake_ms.append(1000 * (time.perf_counter() - began))
                    self.instances.append(edge.welcome.instance)
                    pause = _BACKOFF[0]
                    await self._converse(edge)
            except (ConnectionClosed, InvalidHandshake, OSError, EOFError):  # a timeout is an OSError too
                pass
            if not self.session.finish:
                self._lost_at = self._lost_at or time.perf_counter()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, longest)

    async def _converse(self, edge: Client) -> None:
        session, rounds = self.session, 0
        if not session.settled and not session.unsettled:
            session.open()
        resuming = session.settled > 0
        await edge.send(*session.recover())
        asked, fresh = time.perf_counter(), False
        while not session.finish:
            if not session.unsettled and not resuming:
                if self.drop_every and rounds == self.drop_every:
                    edge.connection.transport.abort()
                    return
                await asyncio.sleep(self.think)
                asked, fresh = time.perf_counter(), True
                await edge.send(session.verify(self._draft()))
            async with asyncio.timeout(_ANSWER_SECONDS):
                event = await edge.event(session)
            if isinstance(event, Recovered):
                resuming = False
                self.outcomes[event.outcome] += 1
                await edge.send(*event.resend)
            elif isinstance(event, Refused):
                if not event.retry:
                    raise MoaError(f"a device was refused: {event.error.message}")
                await asyncio.sleep(max(0.02, event.retry_after))
                await edge.send(*session.unsettled)
            elif not session.busy and fresh:
                self.round_ms.append(1000 * (time.perf_counter() - asked))
                rounds += 1
                if self._lost_at:
                    self.recovery_ms.append(1000 * (time.perf_counter() - self._lost_at))
                    self._lost_at = 0.0
        await edge.send(session.close())

    def _draft(self) -> list[int]:
        done = len(self.tokens)
        pending = self.session.log[-1]
        return [pending, *self.speech.guesses[done : done + self.nodes - 1]]


def summary(devices: Sequence[Device], seconds: float) -> dict[str, Any]:
    """What a crowd of devices went through."""
    returns = [pair for device in devices for pair in zip(device.instances, device.instances[1:], strict=False)]
    rounds = [ms for device in devices for ms in device.round_ms]
    recoveries = [ms for device in devices for ms in device.recovery_ms]
    outcomes: Counter[str] = sum((device.outcomes for device in devices), Counter())
    return {
        "devices": len(devices),
        "exact": sum(device.exact for device in devices),
        "tokens": sum(len(device.tokens) for device in devices),
        "tokens_per_second": round(sum(len(device.tokens) for device in devices) / seconds, 1),
        "seconds": round(seconds, 2),
        "round_ms": percentiles(rounds),
        "handshake_ms": percentiles([ms for device in devices for ms in device.handshake_ms]),
        "returns": len(returns),
        "same_verifier": round(sum(a == b for a, b in returns) / len(returns), 4) if returns else None,
        "resumes": dict(outcomes),
        "recovery_ms": percentiles(recoveries) if recoveries else None,
        "verifiers": len({device.instances[0] for device in devices}),
    }


async def run_all(devices: Sequence[Device]) -> dict[str, Any]:
    """Run devices together, and say what they went through."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for device in devices:
            group.create_task(device.run())
    return summary(devices, time.perf_counter() - began)
