"""The decode loop of one turn: drafts, asks, waits usefully, goes on alone when the link is gone, and reconciles.

    while the turn is not over:
        take what has arrived                 verdicts and streams -> `Turn.absorb`; records -> `RecordSync`
        link is back?                         resume, then send again what was not answered (`Uplink`)
        nothing asked, link up?               ask: provisional text in bulk, or a draft, or a stream
        waiting for the answer?               draft on after the most likely outcome
        answer overdue, or no link?           write provisional tokens

One coroutine does it all. A step of the drafter blocks the event loop for its few milliseconds: handing it to a thread
would cost as much again, and nothing could be done with a message in between but look at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from edge_client.ahead import DraftAhead
from edge_client.budget import Spending
from edge_client.controller import Controller, Plan
from edge_client.drafter import Drafter
from edge_client.events import Event, Link, LinkState, Notice, Reason
from edge_client.guard import OfflineGuard
from edge_client.stats import Stats
from edge_client.sync import RecordSync
from edge_client.trace import Trace
from edge_client.turn import Turn
from edge_client.uplink import Uplink
from moa.sampling import SamplingSettings
from moa.tree import DraftTree
from moa.wire import Advanced, Code, Recovered, Refused, remote_error
from moa.wire.messages import Activations, Error, ServerMessage, Stream, Verify

_LATE_PACE = 0.05
"""Seconds between tokens written while an answer is merely late: most of them would have to be withdrawn."""


@dataclass
class DecodeLoop:
    """Runs one turn; `events()` yields what happens until it is over. Without an `uplink` the device is alone."""

    turn: Turn
    drafter: Drafter
    uplink: Uplink | None
    controller: Controller
    sync: RecordSync
    guard: OfflineGuard
    spending: Spending
    sampling: SamplingSettings
    trace: Trace = field(default_factory=Trace)
    settle_seconds: float = 5.0
    ahead: bool = True
    """Draft on while an answer is awaited."""
    stats: Stats = field(default_factory=lambda: Stats(started=perf_counter()))
    reason: Reason = "link"
    _tree: DraftTree | None = None
    """The draft that is being verified."""
    _ahead: DraftAhead | None = None
    """The draft that is being made."""
    _verdict_at: tuple[float, float] | None = None
    """When the latest verdict was taken in, and the drafter's running time by then: what is left is overhead."""
    _streamed_at: float | None = None
    _speculating: bool = True
    """Whether the running stream is drafted by the server."""
    _restarts_left: int = 3
    _stuck_since: float | None = None
    _state: LinkState | None = None
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        link = self.uplink.link if self.uplink else None
        self._bytes_before = (link.sent_bytes, link.received_bytes) if link else (0, 0)

    async def events(self) -> AsyncIterator[Event]:
        """Everything that happens, to the end of the turn."""
        while True:
            await self._take_messages()
            for event in self._drain():
                yield event
            if self.turn.over or not await self._go_on():
                break
        self.reason = self._why()
        self.stats.finished = perf_counter()
        for event in self._drain():
            yield event

    async def _go_on(self) -> bool:
        """Do the most useful thing now; False when nothing more can be done."""
        if self.uplink is None:
            return self._write("none")
        link = self.uplink.link
        if link.refused is not None:
            if not self.turn.statuses:
                raise link.refused
            return self._write("refused", link.refused.line())
        if not link.up:
            return await self._without_link(self.uplink)
        await self.uplink.tend()
        if not self.uplink.ready:
            return await self._wait_for_answer(self.uplink)
        if (wait := self.spending.wait(link.sent_bytes + link.received_bytes, perf_counter())) > 0:
            await link.wait(min(wait, 0.2))
            return True
        if not self.spending.calls_left:
            return self._write("online", "the budget of calls is used up")
        await self._ask(self.uplink)
        return True

    # ---- asking

    async def _ask(self, uplink: Uplink) -> None:
        """The next round: what was written offline first, then whatever the controller thinks best."""
        session = self.turn.session
        self._say("online")
        if uplink.link.welcome is not None:
            self.controller.agreed(uplink.link.welcome)
        if self.turn.provisional:
            self._tree = None
            await self._send(uplink, session.verify(self.turn.bulk(self.controller.max_chain + 1)))
            return
        remaining = self.turn.rules.max_new_tokens - len(self.turn.output)
        plan = self.controller.plan(remaining, calls_left=self.spending.left)
        match plan.draft:
            case "device":
                if (tree := await self._draft(uplink, plan)) is not None:
                    self.stats.drafted += len(tree) - 1
                    await self._verify(uplink, tree)
                    self._count_overhead()
            case "single":
                await self._verify(uplink, DraftTree([session.log[-1]], [-1], [0.0]))
            case _:
                self._streamed_at, self._speculating = None, plan.draft == "server"
                await self._send(uplink, session.stream(speculate=self._speculating))

    async def _verify(self, uplink: Uplink, tree: DraftTree) -> None:
        self._tree = tree
        chain = all(parent == node - 1 for node, parent in enumerate(tree.parents))
        await self._send(uplink, self.turn.session.verify(tree.tokens, [] if chain else tree.parents))

    async def _send(self, uplink: Uplink, request: Verify | Stream) -> None:
        self.spending.calls += 1
        self.stats.calls += 1
        self.trace.mark("ask", kind=type(request).__name__, round=request.round)
        await uplink.ask(request, server_seconds=self.controller.forward.value)

    async def _draft(self, uplink: Uplink, plan: Plan) -> DraftTree | None:
        """A draft after the log, perhaps one made while waiting; None when the link went meanwhile."""
        ids = self.turn.session.log
        draft, self._ahead = self._ahead, None
        if draft is not None:
            hit = draft.matches(ids)
            self.controller.ahead_hits.add(float(hit))
            self.stats.ahead_hits += hit
            draft = draft if hit else None
        with self.trace.span("draft", ahead=draft is not None):
            draft = draft or DraftAhead.after(self.drafter, ids, plan.shape, self.sampling)
            while not draft.step(self.controller):
                await asyncio.sleep(0)
                if not uplink.link.up:
                    return None
            return draft.tree

    # ---- waiting

    async def _wait_for_answer(self, uplink: Uplink) -> bool:
        """Use the time until the answer: draft on; when it is overdue, write provisionally."""
        if uplink.overdue:
            if self._can_write():
                self._write("late")
            with self.trace.span("overdue"):
                await uplink.link.wait(_LATE_PACE)
        elif self._draft_ahead():
            await asyncio.sleep(0)
        else:
            with self.trace.span("wait"):
                await uplink.link.wait(max(0.001, uplink.deadline - perf_counter()))
        return True

    def _draft_ahead(self) -> bool:
        """One step of the draft for the most likely outcome; False when there is nothing left to draft."""
        tree = self._tree
        if not self.ahead or tree is None or len(tree) < 2 or self.turn.provisional:
            return False
        if self._ahead is None:
            shape = self.controller.plan(self.turn.rules.max_new_tokens - len(self.turn.output)).shape
            self._ahead = DraftAhead.beyond(self.drafter, self.turn.session.log, tree, shape, self.sampling)
        if self._ahead.tree is not None:
            return False
        with self.trace.span("draft ahead"):
            self._ahead.step(self.controller)
        return True

    async def _without_link(self, uplink: Uplink) -> bool:
        """No connection: go on alone; a first connection is worth waiting for."""
        link = uplink.link
        if link.generation == 0 and link.last_error is None:
            self._say("connecting")
            await link.wait(uplink.patience.first_answer)
            return True
        if not self._write("offline", link.last_error.line() if link.last_error else ""):
            return False
        # With nothing left to write, there is only the link to wait for.
        await (asyncio.sleep(0) if self._can_write() else link.wait(0.2))
        return True

    # ---- alone

    def _can_write(self) -> bool:
        return not self.turn.finish and not self.guard.stops(len(self.turn.provisional))

    def _write(self, state: LinkState, detail: str = "") -> bool:
        """Write one provisional token; False when the turn must end as it is."""
        self._say(state, detail)
        if not self._can_write():
            if state != "offline":
                return False
            self._stuck_since = self._stuck_since or perf_counter()
            return perf_counter() - self._stuck_since < self.settle_seconds
        self._tree = self._ahead = None
        with self.trace.span("offline token"):
            self.turn.extend(self.drafter.guess(self.turn.ids, self.sampling))
        self.stats.offline_tokens += 1
        if warning := self.guard.warning(len(self.turn.provisional)):
            self._events.append(Notice(message=warning))
        return True

    # ---- what arrives

    async def _take_messages(self) -> None:
        if self.uplink is None:
            return
        link = self.uplink.link
        while link.inbox:
            await self._receive(self.uplink, link.inbox.popleft())
        if ack := self.sync.acknowledge():
            await link.send(ack)
            if change := self.sync.adjust(self.turn.session, self.stats.speed(perf_counter())):
                await link.send(change)

    async def _receive(self, uplink: Uplink, message: ServerMessage) -> None:
        session = self.turn.session
        if isinstance(message, Error) and not message.session:
            raise remote_error(message)
        if getattr(message, "session", b"") != session.id:
            return  # of a session that was left behind
        if isinstance(message, Activations):
            self.sync.take(message, perf_counter())
        match session.receive(message):
            case Advanced() as advanced:
                self._advanced(uplink, advanced)
                await self._absorb(uplink)
            case Recovered() as recovered:
                uplink.stands()
                self.stats.resumes += 1
                if recovered.tokens:
                    self._tree = None  # it followed a log that has grown meanwhile
                self.trace.mark("recovered", outcome=recovered.outcome)
                if await self._absorb(uplink):
                    await uplink.resend(recovered.resend)
            case Refused(error, retry) as refused:
                if retry:
                    uplink.refused(refused.retry_after)
                elif error.code == Code.CONFLICT and self._restarts_left:
                    # The ends disagree about the past, which only a fault can bring about: ours is complete.
                    self._restarts_left -= 1
                    self.turn.begin_anew()
                    await self._absorb(uplink)
                elif error.code != Code.CANCELLED:
                    raise remote_error(error)
            case _:
                pass

    def _advanced(self, uplink: Uplink, event: Advanced) -> None:
        """Learn from an answer."""
        now = perf_counter()
        server = (event.queue_ms + event.forward_ms) / 1000
        self.trace.mark("answer", tokens=len(event.tokens))
        if event.path:
            self.stats.rounds += 1
            self.stats.accepted += len(event.path) - 1
            self._verdict_at = (now, self.drafter.run_seconds)
            if self._tree is not None:
                self.controller.verified(self._tree, len(event.path) - 1, server)
                uplink.link.rtt.add(now - uplink.asked_at - server)
            self._tree = None
        else:
            if self._streamed_at is not None:
                self.controller.streamed(
                    len(event.tokens),
                    now - self._streamed_at,
                    speculating=self._speculating,
                    server_seconds=event.forward_ms / 1000,
                )
            self._streamed_at = now
        uplink.answered(server_seconds=server)

    async def _absorb(self, uplink: Uplink) -> bool:
        """Bring verified and provisional text together; False when the turn went over to another session."""
        self.turn.absorb()
        if not self.turn.provisional:
            self.guard.reset()
            self._stuck_since = None
        if (old := self.turn.superseded) is None:
            return True
        self.turn.superseded, self._tree, self._ahead = None, None, None
        if self.sync.buffer is not None:
            self.sync.buffer.truncate(max((stop for _, stop in self.turn.session.held), default=0))
        await uplink.link.send(old.close())
        if not self.turn.over:
            await uplink.restart()
        return False

    # ---- small things

    def report(self) -> dict[str, Any]:
        """Figures of the turn, with what passed the link."""
        report = self.stats.report()
        if self.uplink is not None:
            link, (sent, received) = self.uplink.link, self._bytes_before
            report |= {"sent_bytes": link.sent_bytes - sent, "received_bytes": link.received_bytes - received}
            report |= {"record_rows": self.sync.rows, "rtt_ms": round(1000 * link.rtt.smoothed, 2)}
        return report

    def _drain(self) -> list[Event]:
        events = self._events + self.turn.drain()
        self._events = []
        self.stats.count(events, perf_counter())
        return events

    def _say(self, state: LinkState, detail: str = "") -> None:
        if state != self._state:
            self._state = state
            self._events.append(Link(state=state, detail=detail))

    def _count_overhead(self) -> None:
        if self._verdict_at is not None:
            at, run = self._verdict_at
            self.stats.overheads.append(perf_counter() - at - (self.drafter.run_seconds - run))

    def _why(self) -> Reason:
        if self.turn.finish:
            return self.turn.finish
        if self.guard.stops(len(self.turn.provisional)):
            return "guard"
        return "link" if self.spending.calls_left else "budget"
