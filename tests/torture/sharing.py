"""Two principals, one of them above its share; and a load of ten times the capacity."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass

from moa.wire.messages import Ack, Activations, Error, Open, Opened, Verdict, Verify
from tests.torture import history
from tests.torture.history import Entry, Verified, violations
from tests.torture.neighbour import neighbour, problems
from tests.torture.raw import Raw, binary
from tests.torture.server import Server

_A_CONNECTION = 32
"""Sessions on each connection."""


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
    wrong: list[str]

    @property
    def share(self) -> float:
        """Of what it gets alone."""
        return self.beside / max(1, self.alone)


async def greedy_sessions(
    port: int, token: str, sessions: int, until: float, counts: Counter[str], entries: list[Entry]
) -> None:
    """One connection with so many sessions, each of which asks again as soon as it is answered."""
    raw = await Raw.greeted(port, token)
    logs: dict[bytes, tuple[list[int], int]] = {}
    received = 0

    def begin(name: bytes) -> None:
        ids = [40 + name[0] % 50, *range(50, 60)]
        logs[name] = ids, 0
        entries.append(history.Opened(name.hex(), ids))
        raw.write(binary(Open(session=name, ids=ids, max_new_tokens=1500, ignore_eos=True)))

    def ask(name: bytes) -> None:
        log, round = logs[name]
        raw.write(binary(Verify(name, round + 1, len(log) - 1, [log[-1]])))

    async def later(seconds: float, name: bytes, *, opened: bool) -> None:
        await asyncio.sleep(seconds)
        (ask if opened else begin)(name)

    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
            async with asyncio.TaskGroup() as waiting:
                for _ in range(sessions):
                    begin(os.urandom(16))
                while True:
                    message = await raw.message()
                    counts[type(message).__name__] += 1
                    match message:
                        case Activations():
                            received += len(message.payload)
                            raw.write(binary(Ack(received)))
                        case Opened():
                            ask(message.session)
                        case Verdict():
                            log, _ = logs[message.session]
                            logs[message.session] = [*log, message.next_token], message.round
                            entries.append(Verified(message.session.hex(), len(log), [message.next_token]))
                            if not message.finish:
                                ask(message.session)
                        case Error() if message.session in logs:
                            counts[f"{message.code} {message.limit}"] += 1
                            seconds = max(0.1, message.retry_after_ms / 1000)
                            opened = message.code == "busy" and message.round > 0
                            waiting.create_task(later(seconds, message.session, opened=opened))
                        case _:
                            pass
    except TimeoutError:
        pass
    finally:
        raw.abort()


async def two_principals(server: Server, seconds: float, sessions: int = 48) -> Shares:
    """One alone, then beside a greedy one that already has every slot."""
    alone = await neighbour(server.port, server.honest, seconds)
    counts, entries = Counter[str](), list[Entry]()
    until = time.monotonic() + seconds + 4
    greedy = asyncio.create_task(greedy_sessions(server.port, server.greedy, sessions, until, counts, entries))
    await asyncio.sleep(3.0)
    beside = await neighbour(server.port, server.honest, seconds)
    greedy.cancel()
    wrong = [*await _how_they_ended(greedy), *problems(alone, beside), *violations(entries)]
    return Shares(len(alone.seconds), len(beside.seconds), beside.admitted, counts["Verdict"], wrong)


@dataclass(frozen=True)
class Overload:
    """The result of the overload."""

    sessions: int
    capacity_per_second: float
    """Verdicts when as many ask as can be served."""
    verdicts_per_second: float
    busy_per_second: float
    p99_ms: float
    """Of a neighbour of another principal, meanwhile."""
    megabytes: float
    after_p50_ms: float
    before_p50_ms: float
    wrong: list[str]


async def overload(server: Server, seconds: float, slots: int, times: int = 10) -> Overload:
    """So many times the sessions that the slots hold, all asking; and how it is before and after."""
    before = await neighbour(server.port, server.honest, 3.0)
    memory, full, counts, entries = server.memory, Counter[str](), Counter[str](), list[Entry]()
    until = time.monotonic() + seconds
    crowd = [asyncio.create_task(greedy_sessions(server.port, server.greedy, slots, until, full, entries))]
    wrong = await _how_they_ended(*crowd)
    until = time.monotonic() + seconds
    crowd = [
        asyncio.create_task(greedy_sessions(server.port, server.greedy, _A_CONNECTION, until, counts, entries))
        for _ in range(times * slots // _A_CONNECTION)
    ]
    during = await neighbour(server.port, server.honest, seconds)
    grown = server.memory - memory
    wrong += await _how_they_ended(*crowd)
    await asyncio.sleep(1.0)
    after = await neighbour(server.port, server.honest, 3.0)
    return Overload(
        sessions=times * slots,
        capacity_per_second=full["Verdict"] / seconds,
        verdicts_per_second=(counts["Verdict"] + len(during.seconds)) / seconds,
        busy_per_second=sum(count for name, count in counts.items() if name.startswith("busy")) / seconds,
        p99_ms=during.percentile(0.99),
        megabytes=max(0.0, grown),
        after_p50_ms=after.p50,
        before_p50_ms=before.p50,
        wrong=[*wrong, *problems(before, during, after), *violations(entries)],
    )


async def _how_they_ended(*clients: asyncio.Task[None]) -> list[str]:
    ends = await asyncio.gather(*clients, return_exceptions=True)
    return [f"a client ended: {end!r}" for end in ends if not isinstance(end, asyncio.CancelledError | None)]
