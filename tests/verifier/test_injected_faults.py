"""Each collaborator of a connection raises, answers nonsense or hangs: the session or connection
that it concerns is told and ended, the neighbour goes on, and nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec import structs
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cloud_verifier.engine.contract import Answered, Dropped, Failed, Recorded, Report
from cloud_verifier.engine.job import Job, Lease, RecordRows
from cloud_verifier.engine.loop import Workload
from cloud_verifier.engine.schedule import EngineStep
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from cloud_verifier.serving.admission import Admission
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.serving.connection import Connection
from cloud_verifier.sessions.budgets import Meter
from cloud_verifier.sessions.channel import Channel
from cloud_verifier.sessions.outbox import Outbox
from cloud_verifier.sessions.record_sender import OutgoingRecords, RecordSender, RecordWindow
from cloud_verifier.sessions.service import Service
from cloud_verifier.sessions.session import ServerSession
from cloud_verifier.sessions.slots import PageReservations, SlotShares
from cloud_verifier.sessions.table import SessionTable
from moa.process.half_open import HalfOpen
from moa.wire import ClientSession, Code, Recovered, Refusal, Refused, decode_server
from moa.wire.messages import Activations, Cancel, StreamTokens, Sync
from tests.verifier import kit

IDS = kit.prompt(1, 10)
LIMITS = dataclasses.replace(
    kit.LIMITS,
    detached_seconds=0.01,
    cold_seconds=0.01,
    hello_timeout=60.0,
    send_timeout=1.0,
    max_tokens_per_second=1e6,
)
SETTINGS = dataclasses.replace(kit.SETTINGS, limits=LIMITS, kv_tokens=1024)
DONE = "done"
TOLD = "closed with 1011 internal error"
HTTP = "HTTP 500"
ENDS = (TOLD, HTTP, DONE)
"""How a conversation may end: it is told, or goes on without what raised. Never is it silent."""


class Defect(Exception):
    """What a collaborator raises."""


class Two:
    """A verifier, a good client in the middle of a turn, and the keys of both principals."""

    def __init__(self, running: kit.Verifier, good: kit.Client, victim: str) -> None:
        self.running = running
        self.good = good
        self.victim = victim

    async def converse(self) -> str:
        """The victim does everything that a device does; how it ended."""
        try:
            async with asyncio.timeout(kit.PATIENCE):
                await self._everything()
        except ConnectionClosed as closed:
            return (
                f"closed with {closed.rcvd.code} {closed.rcvd.reason}"
                if closed.rcvd is not None
                else "silent: cut off"
            )
        except InvalidStatus as refused:
            return f"HTTP {refused.response.status_code}"
        except TimeoutError:
            return "silent: no answer"
        return DONE

    async def _everything(self) -> None:
        async with kit.client(self.running, token=self.victim) as edge:
            mine = await edge.start(IDS, max_new_tokens=16, ignore_eos=True)
            await edge.advance(mine, [mine.log[-1]])
            while not edge.rows:
                await self._answered(edge, mine, rows=True)
            await edge.send(Sync(mine.id, "int8", 0, [(0, 3)]))
            await edge.send(mine.stream(speculate=False, waits=True))
            first, second, third = kit.generated(mine.log, 3)
            await edge.send(
                mine.foresee([mine.log[-1], first, second, third], [-1, 0, 1, 2], [0, 1, 1, 1])
            )
            await self._answered(edge, mine)
            while mine.busy:
                await edge.send(Cancel(mine.id, mine.round + 1))
                await self._answered(edge, mine)
            await edge.send(mine.stream())
            while mine.unsettled:
                await self._answered(edge, mine)
            await edge.send(mine.append([5, 6, 7], max_new_tokens=5))
            while mine.unsettled:
                await self._answered(edge, mine)
            await edge.advance(mine, [mine.log[-1]])
        async with kit.client(self.running, token=self.victim) as edge:
            edge.sessions[mine.id] = mine
            await edge.send(*mine.recover())
            while mine.unsettled or mine._resuming:
                await self._answered(edge, mine)
            await edge.send(mine.stream())
            while mine.unsettled:
                await self._answered(edge, mine)
            await edge.send(mine.close())
            await edge.start(kit.prompt(7, 5))

    @staticmethod
    async def _answered(edge: kit.Client, mine: ClientSession, *, rows: bool = False) -> None:
        """The next event, or row of records; what an event says to send again is sent."""
        message = decode_server(await edge.connection.recv(decode=False))
        if isinstance(message, Activations):
            await edge.take_rows(message)
            if not rows:
                await Two._answered(edge, mine)
            return
        event = mine.receive(message)  # type: ignore[arg-type]
        for request in (
            event.resend
            if isinstance(event, Recovered)
            else mine.unsettled
            if isinstance(event, Refused)
            else ()
        ):
            await edge.send(request)

    async def neighbour_goes_on(self) -> None:
        """The good client's text is the target's, over the connection that it has had from the
        start."""
        (theirs,) = self.good.sessions.values()
        while not theirs.finish:
            await self.good.advance(theirs, [theirs.log[-1]])
        assert theirs.log[len(IDS) :] == kit.generated(IDS, 12)
        await self.good.send(theirs.close())

    async def everything_is_given_back(self) -> None:
        """Connections, sessions, leases, slots, pages and half-open places, once everybody has
        left."""
        service = self.running.service
        running = self.running

        def left() -> dict[str, int]:
            service.sweep()
            return {
                "connections": len(service.connections),
                "connections of principals": sum(
                    one.connections for one in service._principals.values()
                ),
                "half-open": len(running.transport._half_open),
                "sessions": len(service.table),
                "bytes of logs": service.table.log_bytes,
                "slots": kit.SETTINGS.slots - service.table.slots_free,
                "reserved pages": len(service.table._pages._leases) if service.table._pages else 0,
                "queued": running.work.queued,
                "leases": len(running.engine._slots.leases),
                "tasks": sum(
                    "converse" in repr(task) or "_write" in repr(task)
                    for task in asyncio.all_tasks()
                ),
            }

        try:
            async with asyncio.timeout(300):
                while any(left().values()):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"kept: { ({name: count for name, count in left().items() if count}) }")


@pytest.fixture
async def two(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    monkeypatch.setattr(
        "cloud_verifier.server._SWEEP_SECONDS", 0.3
    )  # a lost round is found by the second of two sweeps
    auth, good, victim = kit.principals(tmp_path, "good", "victim")
    async with kit.verifier(SETTINGS, auth=auth) as running:
        async with kit.client(
            running, token=good, features=["append", "foresee", "resume"]
        ) as neighbour:
            theirs = await neighbour.start(IDS, max_new_tokens=12, ignore_eos=True)
            await neighbour.advance(theirs, [theirs.log[-1]])
            made = Two(running, neighbour, victim)
            yield made
        await made.everything_is_given_back()


CONTRACTS = (
    Service,
    Channel,
    ServerSession,
    SessionTable,
    SlotShares,
    PageReservations,
    Workload,
    Outbox,
    RecordSender,
    RecordWindow,
    RecordRows,
    OutgoingRecords,
    Meter,
    Admission,
    Authenticator,
    HalfOpen,
    Metrics,
)
"""What the parts of the event loop's side are to each other: every public method of these raises
once."""


OF_NO_CONVERSATION = {
    # The server's own rounds of cleaning, telling and stopping: no conversation is ended by them.
    Service.take,
    Service.tell_progress,
    Service.sweep,
    ServerSession.progress,
    SessionTable.sweep,
    Workload.finished,
    Workload.holds,
    Workload.stop,
    # A record that is lost is a hint that is lost; this conversation waits for one.
    RecordRows.write,
    # What counts and gives back: if this raises, what it would have given back stays taken.
    Channel.close,
    HalfOpen.enter,
    HalfOpen.close,
    Meter.__init__,
    Meter.spend,
    Meter.wait,
    OutgoingRecords.lose,
    Outbox.end,
    Service.leave,
    SlotShares.give_back,
}
"""Not injected here; `test_a_report_that_is_nonsense...` and `test_a_round_that_is_swallowed...` say
what becomes of work that is lost."""


def methods_of(contract: type) -> list[str]:
    """The public ones, and how it is made."""
    return [
        name
        for name, member in vars(contract).items()
        if inspect.isfunction(member)
        and member not in OF_NO_CONVERSATION
        and (name == "__init__" or not name.startswith("_"))
    ]


RAISING = [
    pytest.param(contract, name, id=f"{contract.__name__}.{name}")
    for contract in CONTRACTS
    for name in methods_of(contract)
]


@pytest.mark.parametrize(("owner", "name"), RAISING)
async def test_a_collaborator_that_raises_costs_its_own_connection_or_session_only(
    two: Two,
    owner: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    real = getattr(owner, name)
    fired = list[str]()

    def once(*arguments: Any, **named: Any) -> Any:
        if fired:
            return real(*arguments, **named)
        fired.append(name)
        raise Defect(name)

    monkeypatch.setattr(owner, name, once)
    with caplog.at_level(logging.INFO):
        end = await two.converse()
    if not fired:
        pytest.skip("nothing of a conversation calls it")
    assert end in ENDS
    defects = [
        record for record in caplog.records if record.exc_info and record.exc_info[0] is Defect
    ]
    assert defects, "a defect of ours is in the log, with its place"
    assert all(record.name == "cloud_verifier" for record in defects)
    assert await two.converse() == DONE, "the next connection finds all as it was"
    await two.neighbour_goes_on()


def _with(report: Answered, **changes: Any) -> Answered:
    return Answered(report.job, structs.replace(report.message, **changes))


UNKNOWN = Lease(bytes(16), "nobody")
NONSENSE = [
    ("tokens that are none", StreamTokens, lambda r: [_with(r, tokens=None)]),
    ("an answer twice", StreamTokens, lambda r: [r, r]),
    ("tokens behind a hole", StreamTokens, lambda r: [_with(r, base=r.message.base + 1)]),
    ("tokens of another round", StreamTokens, lambda r: [_with(r, round=r.message.round + 1)]),
    ("a stream that ends twice", StreamTokens, lambda r: [_with(r, done=True)] * 2),
    ("a failure of no job", StreamTokens, lambda r: [Failed(r.job.lease, None, "no reason")]),
    (
        "a failure twice",
        StreamTokens,
        lambda r: [Failed(r.job.lease, r.job, "x"), Failed(r.job.lease, r.job, "x")],
    ),
    (
        "a refusal twice",
        StreamTokens,
        lambda r: [Dropped(r.job, Refusal(Code.BUSY, "no room", retry_after_ms=1))] * 2,
    ),
    ("rows that end before they begin", Recorded, lambda r: [Recorded(r.lease, 7, 2), r]),
    (
        "reports of nobody's lease",
        StreamTokens,
        lambda r: [Recorded(UNKNOWN, 0, 5), Failed(UNKNOWN, None, "x"), r],
    ),
    ("a report that is none", StreamTokens, lambda r: [None, r]),
]


@pytest.mark.parametrize(
    ("kind", "other"), [pytest.param(*fault[1:], id=fault[0]) for fault in NONSENSE]
)
async def test_a_report_that_is_nonsense_costs_its_own_session_only(
    two: Two, kind: type[Any], other: Callable[[Any], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fired: list[Any] = []

    def once(report: Any) -> list[Any]:
        if fired or not isinstance(getattr(report, "message", report), kind):
            return [report]
        fired.append(report)
        return other(report)

    take = Service.take
    monkeypatch.setattr(
        Service, "take", lambda of, reports: take(of, [new for one in reports for new in once(one)])
    )
    assert await two.converse() == DONE, "what fails is opened again"
    assert fired
    await two.neighbour_goes_on()


@pytest.mark.parametrize("where", ["queue", "engine", "report"])
async def test_a_round_that_is_swallowed_costs_its_own_session_only(
    two: Two, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine never says anything of it: the session is told all the same, and opened again."""
    lost: list[Job] = []
    submit = Workload.submit
    next_step = Workload.next
    take = Service.take

    def swallows(job: Job) -> bool:
        if not lost and job.lease.principal == "victim":
            lost.append(job)
        return job in lost

    def taken(work: Workload, timeout: float) -> EngineStep | None:
        step = next_step(work, timeout)
        if step is not None:
            step.jobs[:] = [job for job in step.jobs if not swallows(job)]
        return step

    def reported(service: Service, reports: list[Report]) -> None:
        take(
            service,
            [one for one in reports if not (isinstance(one, Answered) and swallows(one.job))],
        )

    match where:
        case "queue":
            monkeypatch.setattr(
                Workload, "submit", lambda work, job: swallows(job) or submit(work, job)
            )
        case "engine":
            monkeypatch.setattr(Workload, "next", taken)
        case _:
            monkeypatch.setattr(Service, "take", reported)
    assert await two.converse() == DONE
    assert lost
    await two.neighbour_goes_on()


@pytest.mark.parametrize("name", ["send", "__aiter__"])
async def test_a_connection_whose_socket_hangs_ends_with_it(
    two: Two, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends = itertools.count(1)
    real = Connection.send

    async def send(self: Connection, frame: bytes) -> None:
        await (asyncio.Event().wait() if next(sends) == 2 else real(self, frame))

    async def frames(self: Connection) -> AsyncIterator[bytes]:
        await self.wait_closed()
        return
        yield b""

    with monkeypatch.context() as patch:
        patch.setattr(Connection, name, send if name == "send" else frames)
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(0.3):
                await two.converse()
        await kit.until(lambda: len(two.running.service.connections) == 1)
    assert await two.converse() == DONE
    await two.neighbour_goes_on()
