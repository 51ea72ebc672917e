"""Two principals, one of them above its share; and a load of ten times the capacity."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass

from moa.wire.messages import Ack, Activations, Error, Open, Verdict, Verify
from tests.torture.neighbour import neighbour
from tests.torture.raw import Raw, binary
from tests.torture.server import Server


@dataclass(frozen=True)
class Shares:
    """The rounds of the other principal."""

    alone: int
    """Rounds in the time, alone."""
    beside: int
    """Rounds beside the greedy one, from asking on."""
    admitted: float
    """Seconds until its first verdict."""
    greedy: int

    @property
    def share(self) -> float:
        """Of what it gets alone."""
        return self.beside / max(1, self.alone)


async def greedy_sessions(port: int, token: str, sessions: int, until: float, counts: Counter[str]) -> None:
    """One connection with so many sessions, each of which asks again as soon as it is answered."""
    raw = await Raw.greeted(port, token)
    logs: dict[bytes, tuple[list[int], int]] = {}
    names = [os.urandom(16) for _ in range(sessions)]
    received = 0

    def begin(name: bytes) -> None:
        ids = [40 + name[0] % 50, *range(50, 60)]
        logs[name] = ids, 0
        raw.write(binary(Open(session=name, ids=ids, max_new_tokens=1500, ignore_eos=True)))
        ask(name)

    def ask(name: bytes) -> None:
        log, round = logs[name]
        raw.write(binary(Verify(name, round + 1, len(log) - 1, [log[-1]])))

    for name in names:
        begin(name)
    loop = asyncio.get_running_loop()
    while time.monotonic() < until:
        message = await raw.message()
        counts[type(message).__name__] += 1
        match message:
            case Activations():
                received += len(message.payload)
                raw.write(binary(Ack(received)))
            case Verdict():
                log, _ = logs[message.session]
                logs[message.session] = [*log, message.next_token], message.round
                if not message.finish:
                    ask(message.session)
            case Error() if message.session in logs:
                counts[f"{message.code} {message.limit}"] += 1
                again = ask if message.code == "busy" and message.round else begin
                loop.call_later(max(0.1, message.retry_after_ms / 1000), again, message.session)
            case _:
                pass
    raw.abort()


async def two_principals(server: Server, seconds: float, sessions: int = 48) -> Shares:
    """One alone, then beside a greedy one that already has every slot."""
    alone = await neighbour(server.port, server.honest, seconds)
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds + 4
    greedy = asyncio.create_task(greedy_sessions(server.port, server.greedy, sessions, until, counts))
    await asyncio.sleep(3.0)
    beside = await neighbour(server.port, server.honest, seconds)
    greedy.cancel()
    with contextlib.suppress(asyncio.CancelledError, ConnectionError):
        await greedy
    return Shares(len(alone.seconds), len(beside.seconds), beside.admitted, counts["Verdict"])


@dataclass(frozen=True)
class Overload:
    """The result of the overload."""

    sessions: int
    alone_per_second: float
    verdicts_per_second: float
    busy_per_second: float
    p99_ms: float
    """Of a neighbour of another principal, meanwhile."""
    megabytes: float
    after_p50_ms: float
    before_p50_ms: float


async def overload(server: Server, seconds: float, sessions: int) -> Overload:
    """So many sessions, all asking, where far fewer can be served; and how it is before and after."""
    before = await neighbour(server.port, server.honest, 3.0)
    memory, counts = server.memory, Counter[str]()
    until = time.monotonic() + seconds
    crowds = [
        asyncio.create_task(greedy_sessions(server.port, server.greedy, 32, until, counts))
        for _ in range(max(1, sessions // 32))
    ]
    during = await neighbour(server.port, server.honest, seconds)
    grown = server.memory - memory
    for crowd in crowds:
        crowd.cancel()
    await asyncio.gather(*crowds, return_exceptions=True)
    await asyncio.sleep(1.0)
    after = await neighbour(server.port, server.honest, 3.0)
    return Overload(
        sessions=sessions,
        alone_per_second=len(before.seconds) / 3.0,
        verdicts_per_second=(counts["Verdict"] + len(during.seconds)) / seconds,
        busy_per_second=sum(count for name, count in counts.items() if name.startswith("busy")) / seconds,
        p99_ms=during.percentile(0.99),
        megabytes=max(0.0, grown),
        after_p50_ms=after.p50,
        before_p50_ms=before.p50,
    )
