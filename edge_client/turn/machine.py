"""One turn as a pure machine: messages and time go in, actions come out. No I/O, no clock of its
own, no await.

    machine.link_up(welcome, connection, now)        machine.link_down(since, why, now)
    machine.receive(message, now)
    match machine.next_action(now):
        Send(messages)    the shell sends them
        Grow(ids)         the shell runs the drafter for a tree of guesses, then
                          `machine.ran(action, result, now)`
        Write(ids)        the same for a token written offline
        Wait(until)       the shell waits for news
        Drop()            the shell gives the connection up
        End(reason)       the turn is over
    machine.drain()       what the user is told, at any time

The answer comes as a stream, beside which guesses go up (`ahead.py`). Deadlines are in
`deadlines.py`, the link and classes of refusal in `reachability.py`, the session on it in
`session_state.py`, pauses between attempts in `link/retry.py`. The user sees the same whatever the
cause of a failure: after a wait of more than `offline_after` the device writes offline, and that
text is checked as soon as the verifier can be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from edge_client.events import Event, Link, LinkState, Notice, Progress, Reason
from edge_client.turn.actions import Action, Drop, End, Grow, Send, Wait, Write
from edge_client.turn.ahead import Ahead
from edge_client.turn.budget import Spending
from edge_client.turn.controller import Controller, WhoDrafts
from edge_client.turn.deadlines import Deadlines, Moment
from edge_client.turn.guard import OfflineGuard
from edge_client.turn.reachability import Failure, Reachability, classify
from edge_client.turn.records import Records
from edge_client.turn.session_state import SessionState
from edge_client.turn.stats import Stats
from edge_client.turn.transcript import Transcript
from moa.errors import DeviceError, MoaError, ProtocolError
from moa.safe_text import safe_line
from moa.speculation.prediction import Prediction
from moa.wire import Advanced, ClientSession, Ready, Recovered, Working
from moa.wire.messages import (
    Activations,
    ClientMessage,
    Close,
    Error,
    Foresee,
    ServerMessage,
    Stream,
    Welcome,
)

_COMPUTES_OTHERWISE = (
    "the verifier that answers now computes another text than the one that began this answer"
)


@dataclass
class TurnMachine:
    """Decides what a turn does next."""

    transcript: Transcript
    session_state: SessionState
    controller: Controller
    spending: Spending
    records: Records
    guard: OfflineGuard
    deadlines: Deadlines
    stats: Stats
    reach: Reachability
    left: list[bytes]
    """Sessions of earlier turns to close, once this turn's own is open: it shares what the verifier
    has cached."""
    who_drafts: WhoDrafts = "auto"
    guesses: InitVar[bool] = False
    """Whether guesses may go ahead of the answers, or are waited for."""
    prediction: InitVar[Prediction | None] = None
    _vocab_size: int | None = None
    _computes: str = ""
    """The identity of what the verifier computes that began the turn."""
    _outbox: list[ClientMessage] = field(default_factory=list)
    _no_drafter: bool = False
    _state: LinkState | None = None
    _rechecks: bool = False
    """Whether the answer had ended, and its text is checked while nobody waits."""
    _reading: bool = False
    """Whether the user was told that the verifier is reading."""
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self, guesses: bool, prediction: Prediction | None) -> None:
        self.ahead = Ahead(
            self.transcript,
            self.controller,
            self.deadlines,
            self.stats,
            who_drafts=self.who_drafts,
            ahead=guesses,
            prediction=prediction,
        )
        self.controller.begin()

    @property
    def session(self) -> ClientSession:
        """The session of this turn; it is replaced if the logs differ."""
        return self.transcript.session

    # ---- the link

    def link_up(self, welcome: Welcome, connection: int, now: float) -> None:
        """A connection is up: open or resume the session on it."""
        if not self._goes_on_with(welcome.computes):
            self.reach.lost(_COMPUTES_OTHERWISE, refused=True)
            return
        self.reach.link = "up"
        self._vocab_size = welcome.vocab_size
        self.session.tells_messages = "messages" in welcome.features
        self.controller.agreed(welcome)
        self.ahead.agreed(welcome)
        self.deadlines.connected()
        self.transcript.limit(welcome.limits.max_new_tokens)
        if self.session.penalties is not None and "penalties" not in welcome.features:
            self._give_up("this verifier knows no penalties and no bias")
        if self.session.grammar is not None and "grammar" not in welcome.features:
            self._give_up("this verifier cannot follow a grammar")
        if self._usable:
            self._bring_up(connection, now)

    def _goes_on_with(self, computes: str) -> bool:
        """Whether this verifier computes what the one computed that began the turn: else the two
        would make one verified text of two."""
        if not self._computes:
            self._computes = computes
        return not computes or computes == self._computes

    def link_down(self, since: float, why: MoaError | None, *, refused: bool = False) -> None:
        """The connection is down; `refused`: no attempt before the next turn."""
        if self.reach.lost(why.line() if why else "", refused=refused):
            self._give_up("the connection is lost again and again")
        self.left += self.unsent_closes()
        # Before its resume, another connection would refuse the session's messages
        self._outbox.clear()
        self.deadlines.lost(since)
        self.session_state.lost()
        self.ahead.lost()

    def receive(self, message: ServerMessage, now: float) -> None:
        """Take in a message that arrived at `now`."""
        if isinstance(message, Activations):
            self.records.arrived.append(message)
        elif getattr(message, "session", b"") != self.session.id:
            pass  # of an abandoned session
        elif isinstance(message, Error):
            self._refused(message, now)
        else:
            try:
                event = self.session.receive(message)
            except ProtocolError as error:
                self._broken(error, now)
            else:
                match event:
                    case Ready():
                        self.session_state.established = True
                    case Advanced():
                        self._advanced(event, now)
                    case Recovered():
                        self._recovered(event, now)
                    case Working():
                        self._working(event, now)
                    case _:
                        pass

    # ---- what the drafter has done

    def ran(self, action: Grow | Write, result: Any, now: float) -> None:
        """The drafter's result; void if the turn has changed meanwhile."""
        match action:
            case Grow(ids):
                if ids is self.session.log:
                    self.ahead.grew(action, result)
            case Write(ids):
                if self._may_write and ids == self.transcript.ids:
                    self._write(result, now)

    def drafter_reads(self, reads: bool) -> None:
        """The drafter still reads the text: until it has, nobody can tell whether its guesses would
        be in time."""
        self.ahead.reads = reads

    def _write(self, token: int, now: float) -> None:
        self.transcript.extend(token)
        self.stats.offline_tokens += 1
        self.deadlines.written(now)
        if warning := self.guard.warning(len(self.transcript.provisional)):
            self._events.append(Notice(message=warning))

    def drafter_failed(self, why: str) -> None:
        """The turn goes on without a drafter: the verifier drafts, and nothing is written offline."""
        self._events.append(Notice(message=f"{why}: the verifier drafts the rest of this answer"))
        self._no_drafter = True
        self.ahead.no_drafter()

    # ---- what to do

    def next_action(self, now: float) -> Action:
        """The most useful thing to do now."""
        moment = Moment(now)
        if self._usable:
            if again := self.session_state.due(moment):
                self._repeat(again, now)
            elif self.session.unsettled and moment.reached(self.deadlines.give_up_at()):
                return Drop()
        if not self._outbox and self._may_ask and moment.reached(self._may_send_at(now)):
            self._request(self.ahead.begin(), now)
            self._say("online")
        action: Action | None = None
        if not self._outbox:
            action = End(self._reason()) if self.transcript.over else self._while_waiting(moment)
        if self._outbox:
            messages = tuple(self._outbox)
            self._outbox = []
            return Send(messages)
        return action or Wait(moment.next)

    def _may_send_at(self, now: float) -> float:
        """When the budget of bytes allows the next request or guesses."""
        return now + self.spending.wait(now)

    def drain(self) -> list[Event]:
        """The events for the user since the last call."""
        events = self._events + self.transcript.drain()
        self._events = []
        return events

    def events_read(self, since: float, now: float) -> None:
        """The user has read the events: answers that arrived meanwhile are not late."""
        self.deadlines.read(since, now)

    def last_messages(self) -> Sequence[ClientMessage]:
        """The turn is over: store remaining records; returns the last messages to send."""
        self._store_records()
        ack = self.records.flow.acknowledge() if self.reach.link == "up" else None
        return [*self._outbox, ack] if ack is not None else self._outbox

    def unsent_closes(self) -> list[bytes]:
        """Sessions to close after the turn was cancelled."""
        return [message.session for message in self._outbox if isinstance(message, Close)]

    def continue_settling(self, now: float) -> None:
        """Wait once more for the check of unverified text at the end."""
        self._rechecks = True
        self.reach.try_again()
        self.deadlines.restart(now)

    @property
    def _usable(self) -> bool:
        """Whether the verifier can do something for this turn."""
        return self.reach.usable and not self.transcript.over

    @property
    def _may_ask(self) -> bool:
        return self._usable and self.session_state.usable and not self.session.busy

    def _request(self, request: Stream, now: float) -> None:
        """Send a request, and set the time after which its answer is late."""
        self.stats.calls += 1
        self.deadlines.asked(now)
        self._outbox.append(request)

    def _repeat(self, messages: Sequence[ClientMessage], now: float) -> None:
        """Send messages again; this does not restart `offline_after`."""
        self._outbox += messages
        self.deadlines.asked_at = now
        if any(isinstance(message, Stream) for message in messages):
            self.ahead.lost()  # it runs anew, without what it was told

    def _bring_up(self, connection: int, now: float) -> None:
        self._agree()
        self._repeat(self.session_state.bring_up(connection), now)
        while self.left:
            self._outbox.append(Close(self.left.pop()))

    def _agree(self) -> None:
        """What device and verifier have agreed on holds for this session."""
        self.session.records = self.records.dtype
        if self._vocab_size is not None:
            self.session.vocab_size = self._vocab_size

    # ---- what an answer means

    def _advanced(self, event: Advanced, now: float) -> None:
        waited = now - self.deadlines.asked_at
        event = _credible(event, 1000 * max(0.0, waited))
        unread = self.deadlines.unread
        self.ahead.answered(event, now, prompt=unread > 0)
        if event.tokens and unread:
            # The first answer of a turn waited this long for so many tokens of the prompt.
            self.controller.prefill.add(event.queue_ms / 1000 / unread)
            self.deadlines.unread = 0
        if event.tokens:
            self.stats.forwards += 1
            self._progressed(now, (event.queue_ms + event.forward_ms) / 1000)
        elif event.done:  # after a stream without tokens do not ask again at once
            self._try_again(now)
        self._absorb(now)

    def _recovered(self, event: Recovered, now: float) -> None:
        if event.outcome == "gone":
            self._reopen(now)
            return
        self.stats.resumes += 1
        self.session_state.established = True
        if event.tokens:
            self._progressed(now)
        if self._absorb(now):
            self._repeat(event.resend, now)

    def _working(self, event: Working, now: float) -> None:
        """The verifier is at it; the user is told how far it is with reading."""
        self.deadlines.heard(event.done, now)
        reads = event.done < event.total
        if reads or self._reading:
            self._events.append(Progress(done=event.done, total=event.total))
        self._reading = reads

    def _progressed(self, now: float, server: float = 0.0) -> None:
        self._reading = False
        self._say("online")
        self.reach.progressed()
        self.deadlines.progressed(now, server)

    def _refused(self, error: Error, now: float) -> None:
        if error.round and not self.session.waits_for(error.round):
            return  # it has been answered meanwhile
        match classify(error):
            case Failure.NOT_NOW:
                self.session.receive(error)
                self._pause(now, error.retry_after_ms / 1000)
            case Failure.UNKNOWN if error.round and self.session.opening:
                # It answers a round that was sent after an opening: the opening's own answer counts
                pass
            case Failure.UNKNOWN:
                self.session.receive(error)
                self._reopen(now)
            case Failure.BROKEN:
                self._broken(ProtocolError(error.message), now)
            case Failure.FOR_GOOD:
                self.session.receive(error)
                self._give_up(error.message)

    def _pause(self, now: float, asked_wait: float = 0.0) -> None:
        """After a pause, unanswered requests are sent again, or a new round."""
        self.reach.retry.failed(now, asked_wait=asked_wait)
        self.session_state.repeat(self.reach.retry.not_before)

    def _try_again(self, now: float) -> None:
        """The same, for errors that should not happen: with a limit."""
        if self.reach.setback():
            self._give_up("the verifier answers without progress")
        else:
            self._pause(now)

    def _reopen(self, now: float) -> None:
        """The verifier has lost the session; its opening is among the unsettled requests."""
        self._try_again(now)
        if self.reach.setbacks == 1:
            self.session_state.repeat(now)

    def _broken(self, error: MoaError, now: float) -> None:
        """The logs differ, or the verifier broke a rule: continue from our log, which is complete."""
        if not self.reach.setbacks:
            self._events.append(
                Notice(message=f"a new session is opened: {safe_line(error.line())}")
            )
        self.transcript.begin_anew()
        self._try_again(now)
        self._absorb(now)

    def _give_up(self, why: str) -> None:
        self.reach.given_up = safe_line(why)
        self.session.unsettled.clear()

    def _absorb(self, now: float) -> bool:
        """Reconcile verified and provisional text; False if the turn continues in another session."""
        self.transcript.absorb()
        if not self.transcript.provisional:
            self.guard.reset()
        if (old := self.transcript.superseded) is None:
            return True
        self.transcript.superseded = None
        self._agree()
        self.ahead.lost()
        self.records.truncate(max((stop for _, stop in self.session.held), default=0))
        before = self.session_state
        self.session_state = SessionState(self.session)
        if self.reach.link != "up":
            return False
        if self._usable:
            opening = self.session_state.bring_up(before.connection)
            if before.again_at is None:
                self._repeat(opening, now)  # first the new session: it shares the cached prefix
            else:
                self.session_state.repeat(before.again_at)
        self._outbox.append(Close(old.id))
        return False

    # ---- while nothing can be asked

    @property
    def _may_write(self) -> bool:
        if self._no_drafter:
            return False
        return not self.transcript.finish and not self.guard.stops(self.transcript.provisional)

    def _while_waiting(self, moment: Moment) -> Action | None:
        """Write offline after `offline_after`; until then use the time."""
        if self._may_write:
            if self.reach.hopeless or moment.reached(self.deadlines.write_at()):
                self._say(*self.reach.news())
                return Write(self.transcript.ids)
        else:
            unreachable = self.reach.link == "down" or self.session_state.again_at is not None
            slow = not unreachable and (not self.transcript.length or self._rechecks)
            over = self.reach.hopeless or moment.reached(
                self.deadlines.end_at(moment.now, patient=slow)
            )
            if over or unreachable:
                self._say(*self.reach.news())
            if over:
                return End(self._reason())
        self._use_the_wait(moment.now)
        if not (self._usable and self.session_state.usable and self.session.busy):
            return None
        if not moment.reached(self._may_send_at(moment.now)):
            return None
        match self.ahead.next(moment):
            case Foresee() as message:
                self._outbox.append(message)
            case Grow() as grow:
                return grow
        return None

    def _use_the_wait(self, now: float) -> None:
        """Idle: store records."""
        self._store_records()
        if self.reach.link != "up":
            return
        if ack := self.records.flow.acknowledge():
            self._outbox.append(ack)
            if change := self.records.adjust(self.session, self.stats.speed(now)):
                self._outbox.append(change)

    def _store_records(self) -> None:
        try:
            rules = self.transcript.rules
            self.records.store(self.session, rules.start + rules.max_new_tokens)
        except ProtocolError as error:
            self._give_up(str(error))
        except Exception as error:  # tokens are exact whatever happens to records
            self.records.buffer = None
            self._events.append(
                Notice(message=DeviceError.of("the store of activation records", error).line())
            )

    def _say(self, state: LinkState, detail: str = "") -> None:
        if state != self._state:
            self._state = state
            self._events.append(Link(state=state, detail=detail))

    def _reason(self) -> Reason:
        if self.transcript.finish:
            return self.transcript.finish
        if self.guard.stops(self.transcript.provisional):
            return "guard"
        return "link"


def _credible(event: Advanced, waited_ms: float) -> Advanced:
    """Cap the server's reported times at the observed latency: the next deadline depends on them."""
    forward = min(event.forward_ms, waited_ms)
    return replace(event, forward_ms=forward, queue_ms=min(event.queue_ms, waited_ms - forward))
