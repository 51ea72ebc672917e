"""The shell around the turn machine: the link, the drafter's worker, the clock, and the user."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from edge_client.events import OVERDUE, Event, Link, Notice, Progress, Reason
from edge_client.link.mailbox import Mailbox
from edge_client.link.websocket import VerifierLink
from edge_client.turn.actions import Drop, End, Grow, Send, Wait, Write
from edge_client.turn.machine import TurnMachine
from edge_client.turn.worker import DrafterWorker
from moa.errors import DeviceError
from moa.wire.messages import ClientMessage

_TELL_SECONDS = 0.5
"""Between two remarks on how far the device has read."""
_TROUBLE = (*OVERDUE, "offline")
"""States of the link in which an answer waits for the verifier."""


class Seen(NamedTuple):
    """The state of the link at one look at it."""

    state: str
    connections: int
    """How many connections there have been."""
    failures: int
    """How many attempts to connect have failed in a row."""


class TurnShell:
    """Runs one turn; `events()` yields its events. Without a link the device is offline."""

    def __init__(
        self,
        machine: TurnMachine,
        worker: DrafterWorker,
        link: VerifierLink | None,
        news: Callable[[bool], Sequence[str]] = lambda in_trouble: (),
    ) -> None:
        """Put a turn together: the machine that decides, the worker that runs the drafter, and the
        link, None to be offline. `news` returns what the verifier wants its users to know and they
        have not been told; it is told whether the answer waits for the verifier in vain."""
        self.machine = machine
        self.worker = worker
        self.link = link
        self._news = news
        self._bytes_before = (link.sent_bytes, link.received_bytes) if link else (0, 0)
        """What had passed over the link before this turn."""
        self._seen: Seen | None = None
        """The link as the machine was told last; None before it was told."""
        self._told_at = perf_counter()
        """When the turn began, or the user last heard how far the drafter has read."""
        self.reason: Reason = "link"
        """Why the turn has ended."""

    async def events(self, box: Mailbox) -> AsyncGenerator[Event, None]:
        """Yield all events of the turn until its end; the verifier's messages arrive in `box`.

        Each time round: messages are taken in, the machine names its most useful action, the events
        so far are shown, and the action is done.
        """
        machine = self.machine
        self._seen = None
        while True:
            self._update(box)
            action = machine.next_action(perf_counter())
            # A message goes first: the verifier need not wait for whoever reads the events.
            events = [] if isinstance(action, Send) else self._drain()
            if events:
                shown_at = perf_counter()
                for event in events:
                    yield event
                machine.events_read(shown_at, perf_counter())
            if isinstance(action, End):
                self.reason = action.reason
                break
            if events:
                continue  # the reader may have taken long: another action may be due by now
            progress = await self._do(action, box)
            if progress is not None:
                yield progress
        await self._send(machine.last_messages(), box)
        machine.stats.finished = perf_counter()
        for event in self._drain():
            yield event

    async def _do(self, action: Send | Grow | Write | Wait | Drop, box: Mailbox) -> Progress | None:
        """Do what the machine has asked for. Returns how far the drafter has read the prompt, if
        the user is to be told of it."""
        match action:
            case Send(messages):
                await self._send(messages, box)
            case Grow() | Write():
                return await self._draft(action, box)
            case Wait(until):
                await box.wait(None if until is None else max(0.0, until - perf_counter()))
            case Drop():  # the connection is dead: the link opens another one
                assert self.link is not None
                self.link.drop()
        return None

    async def _draft(self, action: Grow | Write, box: Mailbox) -> Progress | None:
        """Have the drafter work for a few milliseconds, or until a message arrives, and give the
        machine the result if it is ready. If it is not, and the user waits for text from it,
        returns how far the drafter has read the prompt."""
        try:
            result = await self.worker.run(action, box)
            self.machine.drafter_reads(self.worker.reading is not None)
            if result is not None:
                self.machine.ran(action, result, perf_counter())
                return None
        except DeviceError as error:
            self.machine.drafter_failed(error.line())
            return None
        if isinstance(action, Write):
            # The user sees no offline text until the drafter has read what is before it.
            return self._reading()
        return None

    def _reading(self) -> Progress | None:
        """Returns how many tokens of a long text the drafter has read, twice a second at most; None
        if it is not time, or it reads nothing long."""
        now = perf_counter()
        reading = self.worker.reading
        if reading is None or now - self._told_at < _TELL_SECONDS:
            return None
        self._told_at = now
        return Progress(done=reading[0], total=reading[1], by="device")

    def report(self) -> dict[str, Any]:
        """The turn's figures as a dict: counts and times, and with a link its bytes and round
        trip."""
        report = self.machine.stats.report(perf_counter())
        if (link := self.link) is not None:
            sent, received = self._bytes_before
            report |= {
                "sent_bytes": link.sent_bytes - sent,
                "received_bytes": link.received_bytes - received,
            }
            # To a verifier within this program it is none of a network; and where nothing was heard,
            # it is that of an earlier answer.
            is_measured = report["received_bytes"] > 0 and not link.endpoint.upstream
            report |= {
                "record_rows": self.machine.records.rows,
                "rtt_ms": round(1000 * link.rtt.smoothed, 2) if is_measured else None,
            }
            if link.welcome is not None and "behind" in link.welcome.features:
                report["tokens_per_forward"] = None  # such an engine tells of no forwards
        return report

    def _update(self, box: Mailbox) -> None:
        """Tell the machine what has happened at the link since the last call: first the messages,
        then whether it was lost or came up."""
        machine = self.machine
        link = self.link
        if link is None:
            return
        machine.engine_away(
            link.behind.away,
            since=link.away_since,
            unheard=not link.has_brought_tokens,
            unanswered=link.unanswered,
        )
        for arrived, message in box.take():
            machine.receive(message, arrived)
        seen = Seen(link.state, link.connections, link.dialling.failures)
        if seen != self._seen:
            # Another connection while it is up: it was lost and came back between two looks.
            before = self._seen
            was_up = before is not None and before.state == "up"
            is_another = before is not None and before.connections != seen.connections
            self._seen = seen
            if seen.state != "up" or (was_up and is_another):
                self._tell_lost(link)
            if seen.state == "up" and link.welcome is not None:
                machine.link_up(link.welcome, seen.connections, perf_counter())
        link.limited_by(machine.reach.limited, machine.reach.limited_until)
        machine.spending.passed = link.sent_bytes + link.received_bytes

    def _tell_lost(self, link: VerifierLink) -> None:
        """Tell the machine that the link is down, since when and why."""
        dialling = link.dialling
        refused = link.state == "refused"
        self.machine.link_down(
            dialling.down_since,
            dialling.last_error,
            refused=refused,
            unheard=dialling.port_is_closed and not link.connections,
        )

    async def _send(self, messages: Sequence[ClientMessage], box: Mailbox) -> None:
        """Send these messages, if there is a link; their answers come to `box`."""
        for message in messages:
            if self.link is not None:
                await self.link.send(message, box)

    def _drain(self) -> list[Event]:
        """The events that the user has not been told yet. The verifier's news come behind others,
        never alone."""
        events = self.machine.drain()
        if events:
            self.machine.stats.count(events, perf_counter())
            in_trouble = any(isinstance(e, Link) and e.state in _TROUBLE for e in events)
            events += [Notice(message=notice) for notice in self._news(in_trouble)]
        return events
