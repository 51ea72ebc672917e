"""The decode loop of one turn: drafts, asks, waits usefully, goes on alone when the link is gone, and reconciles.

    while the turn is not over:
        take what has arrived                 `Answers`: verdicts and streams -> `Turn.absorb`; records -> `RecordSync`
        link is back?                         resume, then send again what was not answered (`Uplink`)
        nothing asked, link up?               ask: provisional text in bulk, or a draft (`Drafting`), or a stream
        waiting for the answer?               draft on after the most likely outcome
        answer overdue, or no link?           write provisional tokens (`Alone`)

One coroutine does it all. A step of the drafter blocks the event loop for its few milliseconds: handing it to a thread
would cost as much again, and nothing could be done with a message in between but look at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from edge_client.drafter.onnx import Drafter
from edge_client.events import Event, Link, LinkState, Notice, Reason
from edge_client.tools.trace import Trace
from edge_client.turn.alone import Alone
from edge_client.turn.answers import Answers
from edge_client.turn.budget import Spending
from edge_client.turn.controller import Controller, Plan
from edge_client.turn.drafting import Drafting
from edge_client.turn.guard import OfflineGuard
from edge_client.turn.reconcile import Turn
from edge_client.turn.stats import Stats
from edge_client.turn.sync import RecordSync
from edge_client.turn.uplink import Uplink
from moa.sampling import SamplingSettings
from moa.tree import DraftTree
from moa.wire.messages import Stream, Verify

_LATE_PACE = 0.05
"""Seconds between tokens written while an answer is merely late: most of them would have to be withdrawn."""
_AT_ONCE = 0.005
"""Seconds that a draft may take for the next request to go out before the tokens of the last verdict are told."""


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
    _plan: Plan | None = None
    """For the next round, when it has been made already."""
    _blind_until: float | None = None
    """Until then a draft waits for the prompt's records; None while there is no verdict for them to follow."""
    _state: LinkState | None = None
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        link = self.uplink.link if self.uplink else None
        self._bytes_before = (link.sent_bytes, link.received_bytes) if link else (0, 0)
        books = self.stats, self.trace
        self.drafting = Drafting(self.drafter, self.controller, self.sampling, *books, ahead=self.ahead)
        self.alone = Alone(self.turn, self.drafter, self.guard, self.sampling, *books, self.settle_seconds)
        parts = self.sync, self.controller, self.drafting, self.alone
        self.answers = Answers(self.turn, self.uplink, *parts, *books) if self.uplink else None

    async def events(self) -> AsyncIterator[Event]:
        """Everything that happens, to the end of the turn."""
        while True:
            if self.answers is not None:
                await self.answers.take()
            if not self._asks_at_once and (told := self._drain()):
                for event in told:
                    yield event
                continue  # a slow reader took his time: what has arrived meanwhile is not late
            if self.turn.over or not await self._go_on():
                break
        if self.answers is not None:
            await self.answers.take_records()
            self.answers.learn()
        self.reason = self._why()
        self.stats.finished = perf_counter()
        for event in self._drain():
            yield event

    @property
    def _asks_at_once(self) -> bool:
        """Whether a request can be on its way before anybody has read the news: they are told while it is answered."""
        if self.turn.over or self.uplink is None or not self.uplink.ready or self._plan is None or self._blind:
            return False
        return self._plan.draft == "device" and self._plan.drafting < _AT_ONCE

    async def _go_on(self) -> bool:
        """Do the most useful thing now; False when nothing more can be done."""
        if self.uplink is None or self.answers is None:
            return self._write("none")
        link = self.uplink.link
        if link.refused is not None:
            if not self.turn.statuses:
                raise link.refused
            return self._write("refused", link.refused.line())
        if not link.up:
            self.stats.overhead.void()
            return await self._without_link(self.uplink)
        await self.uplink.tend()
        if not self.uplink.ready:
            await self._use_the_wait(self.uplink)
            return True
        if (wait := self.spending.wait(link.sent_bytes + link.received_bytes, perf_counter())) > 0:
            self.stats.overhead.void()
            await link.wait(min(wait, 0.2))
            return True
        if not self.spending.calls_left:
            return self._write("online", "the budget of calls is used up")
        await self._ask(self.uplink, self.answers)
        return True

    # ---- online

    @property
    def _remaining(self) -> int:
        return self.turn.rules.max_new_tokens - self.turn.length

    async def _ask(self, uplink: Uplink, answers: Answers) -> None:
        """The next round: what was written offline first, then whatever the controller thinks best."""
        session, drafting = self.turn.session, self.drafting
        self._say("online")
        # A prompt has no records yet when its first draft is made.
        made = self._plan if self.turn.length else None
        plan = made or self._next_plan(uplink, blind=self._blind and not self.turn.length)
        self._plan = None
        if self.turn.provisional:
            drafting.forget()
            await self._send(uplink, session.verify(self.turn.bulk(self.controller.max_chain + 1)))
            return
        match plan.draft:
            case "device" if self._blind and self.turn.length:
                self._plan = plan
                await self._see(uplink, answers)
                return
            case "device":
                tree = await drafting.make(session.log, plan.shape, lambda: uplink.link.up)
                if tree is not None:
                    await self._verify(uplink, tree)
                    self.stats.overhead.end(perf_counter(), self.drafter.run_seconds)
            case "single":
                await self._verify(uplink, DraftTree([session.log[-1]], [-1], [0.0]))
            case _:
                answers.asked_stream(speculating=plan.draft == "server")
                await self._send(uplink, session.stream(speculate=plan.draft == "server"))
        answers.learn()
        # The round after this is planned now, while nobody waits for us; it misses only what this one will teach.
        self._plan = self._next_plan(uplink)

    @property
    def _blind(self) -> bool:
        """Whether the records of the prompt are still to come: a draft without them wins half as much."""
        welcome = self.uplink.link.welcome if self.uplink is not None else None
        if welcome is None or welcome.records is None or not self.sync.misses(self.turn.rules.start):
            return False
        return self._blind_until is None or perf_counter() < self._blind_until

    async def _see(self, uplink: Uplink, answers: Answers) -> None:
        """Wait for the prompt's records, which follow its first verdict, but never for longer than half a round."""
        await answers.take_records()
        answers.learn()
        now = perf_counter()
        if self._blind_until is None:
            self.stats.overhead.void()
            self._blind_until = now + (uplink.link.rtt.smoothed + self.controller.forward.value) / 2
        if self._blind:
            with self.trace.span("wait for records"):
                await uplink.link.wait(self._blind_until - now)

    def _next_plan(self, uplink: Uplink, *, blind: bool = False) -> Plan:
        if uplink.link.welcome is not None:
            self.controller.agreed(uplink.link.welcome)
        return self.controller.plan(self._remaining, calls_left=self.spending.left, blind=blind)

    async def _verify(self, uplink: Uplink, tree: DraftTree) -> None:
        self.drafting.asked = tree
        chain = tree.parents == list(range(-1, len(tree) - 1))
        await self._send(uplink, self.turn.session.verify(tree.tokens, [] if chain else tree.parents))

    async def _send(self, uplink: Uplink, request: Verify | Stream) -> None:
        self.spending.calls += 1
        self.stats.calls += 1
        self.trace.mark("ask", kind=type(request).__name__, round=request.round)
        await uplink.ask(request, server_seconds=self.controller.forward.value)

    async def _use_the_wait(self, uplink: Uplink) -> None:
        """Until the answer comes: draft on; when it is overdue, write provisionally."""
        if uplink.overdue:
            if self.alone.may_write:
                self._write("late")
            with self.trace.span("overdue"):
                await uplink.link.wait(_LATE_PACE)
        elif (
            self._plan is not None
            and not self._blind
            and self.drafting.step_ahead(self.turn.session.log, self._plan.shape)
        ):
            await asyncio.sleep(0)
        else:
            with self.trace.span("wait"):
                await uplink.link.wait(max(0.001, uplink.deadline - perf_counter()))

    # ---- alone

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
        await (asyncio.sleep(0) if self.alone.may_write else link.wait(0.2))
        return True

    def _write(self, state: LinkState, detail: str = "") -> bool:
        """Write one provisional token; False when the turn must end as it is."""
        self._say(state, detail)
        if not self.alone.may_write:
            return state == "offline" and self.alone.still_waits()
        self.drafting.forget()
        if warning := self.alone.write():
            self._events.append(Notice(message=warning))
        return True

    # ---- what is told

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
        if events:
            self._events = []
            self.stats.count(events, perf_counter())
        return events

    def _say(self, state: LinkState, detail: str = "") -> None:
        if state != self._state:
            self._state = state
            self._events.append(Link(state=state, detail=detail))

    def _why(self) -> Reason:
        if self.turn.finish:
            return self.turn.finish
        if self.guard.stops(len(self.turn.provisional)):
            return "guard"
        return "link" if self.spending.calls_left else "budget"
