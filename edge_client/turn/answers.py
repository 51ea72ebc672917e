"""What arrives from the verifier, taken in: tokens into the turn, records into their buffer, times into estimates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from edge_client.tools.trace import Trace
from edge_client.turn.alone import Alone
from edge_client.turn.controller import Controller
from edge_client.turn.drafting import Drafting
from edge_client.turn.reconcile import Turn
from edge_client.turn.stats import Stats
from edge_client.turn.sync import RecordSync
from edge_client.turn.uplink import Uplink
from moa.tree import DraftTree
from moa.wire import Advanced, Code, Recovered, Refused, remote_error
from moa.wire.messages import Activations, Error, ServerMessage


@dataclass
class Answers:
    """Every message of the verifier to this turn passes here."""

    turn: Turn
    uplink: Uplink
    sync: RecordSync
    controller: Controller
    drafting: Drafting
    alone: Alone
    stats: Stats
    trace: Trace
    speculating: bool = True
    """Whether the running stream is drafted by the server."""
    _records: deque[tuple[float, Activations]] = field(default_factory=deque)
    _lesson: tuple[DraftTree, int, float, float] | None = None
    """A verified draft, how much of it was accepted, and the seconds of the round trip and of a verification."""
    _streamed_at: float | None = None
    _restarts_left: int = 3

    def asked_stream(self, *, speculating: bool) -> None:
        """A stream is about to begin."""
        self._streamed_at, self.speculating = None, speculating

    async def take(self) -> None:
        """Take in what has arrived. Records wait for as long as a request may be made: that goes first."""
        link = self.uplink.link
        while link.inbox:
            arrived, message = link.inbox.popleft()
            if isinstance(message, Activations):
                self._records.append((arrived, message))
            else:
                await self._receive(arrived, message)
        if self._records and not self.uplink.ready:
            await self.take_records()

    async def take_records(self) -> None:
        """Put the records that have arrived where they belong, and acknowledge them."""
        session, link = self.turn.session, self.uplink.link
        while self._records:
            arrived, message = self._records.popleft()
            self.sync.arrived(message, arrived)  # those of a session that was left behind count too
            if message.session == session.id:
                self.sync.keep(message)
                session.receive(message)
        if ack := self.sync.acknowledge():
            await link.send(ack)
            if change := self.sync.adjust(session, self.stats.speed(perf_counter())):
                await link.send(change)

    async def _receive(self, arrived: float, message: ServerMessage) -> None:
        session, uplink = self.turn.session, self.uplink
        if isinstance(message, Error) and not message.session:
            raise remote_error(message)
        if getattr(message, "session", b"") != session.id:
            return  # of a session that was left behind
        match session.receive(message):
            case Advanced() as advanced:
                self._answered(arrived, advanced)
                await self._absorb()
            case Recovered() as recovered:
                uplink.stands()
                self.stats.resumes += 1
                self.stats.overhead.void()
                if recovered.tokens:
                    self.drafting.asked = None  # it followed a log that has grown meanwhile
                self.trace.mark("recovered", outcome=recovered.outcome)
                if await self._absorb():
                    await uplink.resend(recovered.resend)
            case Refused(error, retry) as refused:
                if retry:
                    uplink.refused(refused.retry_after)
                elif error.code == Code.CONFLICT and self._restarts_left:
                    # The ends disagree about the past, which only a fault can bring about: ours is complete.
                    self._restarts_left -= 1
                    self.turn.begin_anew()
                    await self._absorb()
                elif error.code == Code.UNKNOWN_SESSION and session.unsettled:
                    pass  # a round that followed an opening for which there was no room: both will be sent again
                elif error.code != Code.CANCELLED:
                    raise remote_error(error)
            case _:
                pass

    def _answered(self, arrived: float, event: Advanced) -> None:
        """A round has advanced the log."""
        server = (event.queue_ms + event.forward_ms) / 1000
        self.trace.mark("answer", tokens=len(event.tokens))
        if event.path:
            drafting = self.drafting
            self.stats.rounds += 1
            self.stats.accepted += len(event.path) - 1
            self.stats.overhead.begin(arrived, drafting.drafter.run_seconds)
            if drafting.asked is not None:
                # The first verdict of a turn waited for the prompt as well, which says nothing of the next.
                verifying = server if self.turn.statuses else event.forward_ms / 1000
                self._lesson = drafting.asked, len(event.path) - 1, arrived - self.uplink.asked_at - server, verifying
            drafting.asked = None
        else:
            if self._streamed_at is not None:
                self.controller.streamed(
                    len(event.tokens),
                    arrived - self._streamed_at,
                    speculating=self.speculating,
                    server_seconds=event.forward_ms / 1000,
                )
            self._streamed_at = arrived
        self.uplink.answered(server_seconds=server)

    def learn(self) -> None:
        """What the latest verdict says about link, server and drafter; the next request need not wait for it."""
        if self._lesson is not None:
            asked, accepted, round_trip, verifying = self._lesson
            self._lesson = None
            self.controller.verified(asked, accepted, verifying)
            self.uplink.link.rtt.add(round_trip)

    async def _absorb(self) -> bool:
        """Bring verified and provisional text together; False when the turn went over to another session."""
        self.turn.absorb()
        if not self.turn.provisional:
            self.alone.checked()
        if (old := self.turn.superseded) is None:
            return True
        self.turn.superseded = None
        self.drafting.forget()
        if self.sync.buffer is not None:
            self.sync.buffer.truncate(max((stop for _, stop in self.turn.session.held), default=0))
        await self.uplink.link.send(old.close())
        if not self.turn.over:
            await self.uplink.restart()
        return False
