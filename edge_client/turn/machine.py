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

from edge_client.events import OVERDUE, Event, Link, LinkState, Notice, Progress, Reason
from edge_client.turn.actions import Action, Drop, End, Grow, Send, Wait, Write
from edge_client.turn.ahead import Ahead, server_seconds
from edge_client.turn.budget import Spending
from edge_client.turn.controller import Controller, WhoDrafts
from edge_client.turn.deadlines import Deadlines, Moment
from edge_client.turn.guard import OfflineGuard
from edge_client.turn.reachability import RATE, Failure, Reachability, classify, not_passed_on
from edge_client.turn.records import Records
from edge_client.turn.session_state import SessionState
from edge_client.turn.stats import Stats
from edge_client.turn.transcript import Transcript
from moa.errors import DeviceError, MoaError, ProtocolError
from moa.safe_text import safe_line
from moa.sampling import ADJUSTMENTS
from moa.speculation.prediction import Prediction
from moa.wire import Advanced, ClientSession, Code, Ready, Recovered, Working
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
    """Messages that are to be sent."""
    _no_drafter: bool = False
    """Whether the drafter has failed."""
    _state: LinkState | None = None
    """The state of the link, as the user was told last."""
    _detail: str = ""
    """Why it is so, as the user was told last."""
    _rechecks: bool = False
    """Whether the answer had ended, and its text is checked now."""
    _persists: bool = False
    """Whether nobody waits for that check: it goes on while the verifier refuses for now."""
    _uncounted: bool = False
    """Whether tokens have come of a stream whose end has not: an engine behind tells its count there."""
    _reopens: bool = False
    """Whether the session is opened once more: the verifier, or the connection, that had it is gone."""
    _reading: bool = False
    """Whether the user was told that the verifier is reading."""
    _events: list[Event] = field(default_factory=list)
    """Events for the user, beside those of the text."""

    def __post_init__(self, guesses: bool, prediction: Prediction | None) -> None:
        """Make the part that decides about the turn's streams and guesses, and begin the turn's
        measurements."""
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
        """Use a new connection: learn what this verifier can do, then open or resume the session
        there. The verifier is not asked in this turn if it cannot do what the answer needs, or
        computes another text than the verifier that began it. `connection` is the connection's
        number."""
        if not self._goes_on_with(welcome.computes):
            self.reach.lost(_COMPUTES_OTHERWISE, refused=True)
            return
        self.reach.link = "up"
        self._vocab_size = welcome.vocab_size
        self.session.tells_messages = "messages" in welcome.features
        self.controller.agreed(welcome)
        self.ahead.agreed(welcome)
        self.deadlines.connected()
        self.deadlines.engine_behind = "behind" in welcome.features
        self.transcript.limit(welcome.limits.max_new_tokens)
        self._check_features(welcome.features)
        if self._usable:
            self._bring_up(connection, now)

    def _check_features(self, features: Sequence[str]) -> None:
        """Give the verifier up for this turn if it lacks a feature that the answer needs: it would
        write another text than was asked for."""
        if self.session.penalties is not None and "penalties" not in features:
            if "behind" in features:
                *first, last = ADJUSTMENTS
                self._give_up(not_passed_on(f"{', '.join(first)} and {last}"))
            else:
                self._give_up("penalties and biases are not known there")
        if self.session.grammar is not None and "grammar" not in features:
            self._give_up("answers that match a grammar are not known there")

    def _goes_on_with(self, computes: str) -> bool:
        """Whether this verifier computes the same text as the one that began the turn. Otherwise
        what is shown as one verified text would be made of two."""
        if not self._computes:
            self._computes = computes
        return not computes or computes == self._computes

    def link_down(
        self,
        since: float,
        why: MoaError | None,
        *,
        refused: bool = False,
        unheard: bool = False,
    ) -> None:
        """Go on without a connection, which has been down since `since` for the reason `why`.
        `refused` says that no new attempt is made before the next turn, `unheard` that nothing
        listens at the verifier's address, and nothing ever has."""
        if self.reach.lost(why.line() if why else "", refused=refused):
            self._give_up("the connection is lost again and again", for_now=True)
        self.left += self.unsent_closes()
        # Another connection would refuse the unsent messages until the session is resumed there.
        self._outbox.clear()
        self.deadlines.lost(since, unheard=self._counts_as_unheard(unheard))
        self.session_state.lost()
        self.ahead.lost()

    def engine_away(
        self,
        why: str,
        *,
        since: float | None = None,
        unheard: bool = False,
        unanswered: str = "",
    ) -> None:
        """Learn why the engine behind the verifier does not answer, empty where it may, and since
        when that is known. `unheard`: it has never brought a token. `unanswered` says that nothing
        at all is known of it yet."""
        answers_now = self.reach.unanswered and not unanswered and not why
        if self.reach.away and not why:  # no pause outlives the proof that it is back
            self.session_state.repeat_now()
        self.reach.unanswered = safe_line(unanswered)
        if answers_now and self._state is None and self.session.busy:
            self._tell(Link(state="online"))
        self.reach.away = safe_line(why)
        self.deadlines.away_since = since
        self.deadlines.away_unheard = self._counts_as_unheard(unheard)

    def _counts_as_unheard(self, unheard: bool) -> bool:
        """Whether there is little to wait for, because nothing has ever answered. Whoever asks for a
        check waits as long for a verifier, or an engine, that is yet to be started."""
        return unheard and not self._rechecks

    def receive(self, message: ServerMessage, now: float) -> None:
        """Take in a message of the verifier that arrived at `now`, and do what it means for the
        turn."""
        if isinstance(message, Activations):
            # Storing them takes time: it waits until there is nothing to ask for.
            self.records.arrived.append(message)
            return
        if getattr(message, "session", b"") != self.session.id:
            return  # of an abandoned session
        if isinstance(message, Error):
            self._refused(message, now)
            return
        try:
            event = self.session.receive(message)
        except ProtocolError as error:
            self._broken(error, now)
            return
        match event:
            case Ready():
                self.session_state.established = True
                self.reach.taken_up()
                self.stats.resumes += self._reopens
                self._reopens = False
            case Advanced():
                self._advanced(event, now)
            case Recovered():
                self._recovered(event, now)
            case Working():
                self._working(event, now)

    # ---- what the drafter has done

    def ran(self, action: Grow | Write, result: Any, now: float) -> None:
        """Take the result of a drafter's step that `next_action` asked for: a tree of guesses, or
        the next token of offline text. It is dropped if the text has changed meanwhile."""
        match action:
            case Grow(ids):
                if ids is self.session.log:  # the same list: the session has not been replaced
                    self.ahead.grew(action, result)
            case Write(ids):
                if self._may_write and ids == self.transcript.ids:
                    self._write(result, now)

    def drafter_reads(self, reads: bool) -> None:
        """The drafter still reads the text: until it has, nobody can tell whether its guesses would
        be in time."""
        self.ahead.reads = reads

    def _write(self, token: int, now: float) -> None:
        """Add a token that the device wrote offline, and warn the user once that text gets long."""
        self.transcript.extend(token)
        self.stats.offline_tokens += 1
        self.deadlines.written(now)
        warning = self.guard.warning(len(self.transcript.provisional))
        if warning:
            self._events.append(Notice(message=warning))

    def drafter_failed(self, why: str) -> None:
        """Go on without a drafter: the verifier drafts, and nothing is written offline."""
        self._events.append(Notice(message=f"{why}: this device drafts no more of this answer"))
        self._no_drafter = True
        self.ahead.no_drafter()

    # ---- what to do

    def next_action(self, now: float) -> Action:
        """Returns the most useful thing to do now: give up a dead connection, send messages, end
        the turn, have the drafter work, or wait. Requests that are due are among the messages."""
        moment = Moment(now)
        # Text comes no faster than the rate allows, however much of it is guessed.
        self.ahead.rests = now < self.reach.limited_until
        if self._usable:
            repeated = self.session_state.due(moment)
            if repeated:
                self._repeat(repeated, now)
            elif self.session.unsettled and moment.reached(self.deadlines.give_up_at()):
                # No sign of an answer for long: the connection counts as dead.
                return Drop()
        self._begin_stream(moment)
        action: Action | None = None
        if not self._outbox:
            action = End(self._reason()) if self.transcript.over else self._while_waiting(moment)
            if isinstance(action, End):
                self._count_is_lost()
                self._learn_wait_in_vain(now)
        if self._outbox:  # also what came to it while waiting
            return Send(self._take_outbox())
        return action or Wait(moment.next)

    def _begin_stream(self, moment: Moment) -> None:
        """Ask for a stream of tokens, if none runs and one may be asked for now."""
        if self._outbox or not self._may_ask:
            return
        if moment.reached(self._may_send_at(moment.now)):
            self._request(self.ahead.begin(), moment.now)
            # Where the engine behind is said to be away, the answer itself shows whether it still is.
            # One that has answered nothing yet may be anything.
            if not self.reach.away and not self.reach.unanswered:
                self._say(Link(state="online"), moment.now)

    def _take_outbox(self) -> tuple[ClientMessage, ...]:
        """Returns the messages that are to be sent, which then are no longer in the outbox."""
        messages = tuple(self._outbox)
        self._outbox = []
        return messages

    def _may_send_at(self, now: float) -> float:
        """When the budget of bytes allows the next request or guesses."""
        return now + self.spending.wait(now)

    def drain(self) -> list[Event]:
        """The events for the user since the last call."""
        events = self._events + self.transcript.drain()
        self._events = []
        return events

    def events_read(self, since: float, now: float) -> None:
        """Learn that the user has read events from `since` until now: answers that arrived
        meanwhile are not late."""
        self.deadlines.read(since, now)

    def last_messages(self) -> Sequence[ClientMessage]:
        """Returns what is to be sent at the end of the turn: messages that are still unsent, and
        the acknowledgement of the last activation records, which are stored first."""
        self._store_records()
        messages = list(self._outbox)
        if self.reach.link == "up":
            ack = self.records.flow.acknowledge()
            if ack is not None:
                messages.append(ack)
        return messages

    def unsent_closes(self) -> list[bytes]:
        """Sessions to close after the turn was cancelled."""
        return [message.session for message in self._outbox if isinstance(message, Close)]

    def continue_settling(self, now: float, *, persists: bool = False) -> None:
        """Wait once more for the verifier to check text of the finished answer that the device
        wrote alone. `persists`: also for one that refuses for now, for as long as it does."""
        if not self._rechecks:
            self._state = None  # whoever follows the checks need not have followed the answer
        self._rechecks = True
        self._persists = persists
        self.reach.try_again()
        self.deadlines.restart(now)

    @property
    def _usable(self) -> bool:
        """Whether the verifier can do something for this turn."""
        return self.reach.usable and not self.transcript.over

    @property
    def _may_ask(self) -> bool:
        """Whether a stream may be asked for now."""
        return self._usable and self.session_state.usable and not self.session.busy

    @property
    def _was_refused(self) -> bool:
        """Whether the latest request was refused, and is to be repeated after a pause."""
        return self.session_state.again_at is not None

    def _request(self, request: Stream, now: float) -> None:
        """Send a request, and set the time after which its answer is late."""
        self.stats.calls += 1
        self.deadlines.asked(now)
        self._outbox.append(request)

    def _repeat(self, messages: Sequence[ClientMessage], now: float) -> None:
        """Send requests again. That does not restart `offline_after`, the user's wait before the
        device writes offline."""
        self._outbox += messages
        self.deadlines.asked_at = now
        if any(isinstance(message, Stream) for message in messages):
            self.ahead.lost()  # it runs anew, without what it was told
            self._count_is_lost()

    def _count_is_lost(self) -> None:
        """Note that a stream which has brought tokens runs no more, and nobody tells what an engine
        behind has counted for them."""
        if self._uncounted:
            self.stats.usages.append(None)
        self._uncounted = False

    def _bring_up(self, connection: int, now: float) -> None:
        """Send what the session needs first on this connection, then close sessions of earlier
        turns."""
        self._agree()
        was_on_another = self.session_state.connection not in (0, connection)
        self._reopens = self._reopens or (was_on_another and not self.session.settled)
        self._repeat(self.session_state.bring_up(connection), now)
        while self.left:
            self._outbox.append(Close(self.left.pop()))

    def _agree(self) -> None:
        """Let the session keep to what device and verifier have agreed on."""
        self.session.records = self.records.dtype
        if self._vocab_size is not None:
            self.session.vocab_size = self._vocab_size

    # ---- what an answer means

    def _advanced(self, event: Advanced, now: float) -> None:
        """Take in an answer of the stream: learn from its times, and show its tokens. A stream that
        ended without tokens is asked for again, after a pause."""
        event = _credible(event, waited_seconds=now - self.deadlines.asked_at)
        had_to_read = self.deadlines.unread > 0
        self.ahead.answered(event, now, prompt=had_to_read)
        if event.done:
            self.stats.usages.append(event.usage)
        self._uncounted = not event.done and (self._uncounted or bool(event.tokens))
        if event.tokens:
            if had_to_read:
                self._learn_reading_speed(event)
                if self.deadlines.engine_behind:
                    self.controller.began(now - self.deadlines.asked_at)
            self.stats.forwards += 1
            self._progressed(now, server_seconds(event))
        elif event.done and now >= self.reach.limited_until:  # else the verifier has said why
            # A stream without tokens is not asked for again at once.
            who = "the upstream" if self.deadlines.engine_behind else "the verifier"
            self._try_again(now, f"{who} has ended its answers again and again without a new word")
        self._absorb(now)

    def _learn_reading_speed(self, event: Advanced) -> None:
        """Learn from the first answer how long the verifier reads a token of a prompt. It counts
        that as time in the queue."""
        self.controller.prefill.add(event.queue_ms / 1000 / self.deadlines.unread)
        self.deadlines.unread = 0

    def _learn_wait_in_vain(self, now: float) -> None:
        """Learn at the end of an answer that an engine behind the verifier, which is at work on it,
        has not begun: it is waited for longer the next time."""
        deadlines = self.deadlines
        if deadlines.engine_behind and deadlines.unread and deadlines.is_heard(now):
            self.controller.waited_in_vain(now - deadlines.asked_at)

    def _recovered(self, event: Recovered, now: float) -> None:
        """Go on with a session that was resumed on a new connection: show the tokens that were
        missed, and send again what has no answer. If the verifier has the session no more, open it
        again."""
        if event.outcome == "gone":
            self._reopen(now)
            return
        self.stats.resumes += 1
        self.session_state.established = True
        if event.tokens:
            self._uncounted = True
            self._progressed(now)
        if not self.session.busy:  # the stream has ended meanwhile
            self._count_is_lost()
        if self._absorb(now):
            self._repeat(event.resend, now)

    def _working(self, event: Working, now: float) -> None:
        """Note that the verifier works on the answer, so that it does not count as late. The user
        is told how far it has read the prompt, the last time when it has read all; of a check each
        time."""
        # No more is waited for than there is to read, whatever a verifier says.
        to_read = min(event.total, len(self.session.log)) - event.done
        self.deadlines.heard(event.done, to_read, now)
        self.reach.taken_up()
        was_away = self._state in ("connecting", "offline")
        if was_away and not self.reach.away and not self.reach.unanswered:
            self._say(Link(state="online"), now)  # its tokens may be long in coming
        is_reading = event.done < event.total
        # Of a check the user hears as well where all is read: nothing else shows that it runs.
        if is_reading or self._reading or self._rechecks:
            self._events.append(Progress(done=event.done, total=event.total))
        self._reading = is_reading

    def _progressed(self, now: float, server_seconds: float = 0.0) -> None:
        """Note that verified tokens have come, for which the server worked so long."""
        self._reading = False
        self._say(Link(state="online"), now)
        self.reach.progressed()
        self.deadlines.progressed(now, server_seconds)

    def _refused(self, error: Error, now: float) -> None:
        """React to a refusal by its class: ask again after a pause, open the session again,
        continue in a new one, or ask no more in this turn."""
        if error.round and not self.session.waits_for(error.round):
            return  # it has been answered meanwhile
        if error.round and self.session.opening:
            # A stream was asked for right behind an open or append: if that was refused, its own
            # answer says so, and both are sent again.
            return
        match classify(error):
            case Failure.NOT_NOW:
                self.session.receive(error)
                self.reach.refused_for_now(error)
                self._pause(now, error.retry_after_ms / 1000)
                if error.limit == RATE:
                    self.reach.rate_is_used_up(now)
                    self._say(Link(state="online"), now)
                if self._persists and error.code != Code.INTERNAL:
                    # Nobody waits, and the verifier has asked for this pause: its time to answer
                    # counts from the end of it. A verifier that fails each time is given up.
                    self.deadlines.restart(self.reach.retry.not_before)
            case Failure.UNKNOWN:
                self.session.receive(error)
                self._reopen(now)
            case Failure.BROKEN:
                self._broken(ProtocolError(error.message), now)
            case Failure.FOR_GOOD:
                self.session.receive(error)
                # An upstream that breaks off again and again may answer later.
                self._give_up(error.message, for_now=error.retry_after_ms > 0)

    def _pause(self, now: float, asked_wait: float = 0.0) -> None:
        """Ask for nothing until a pause is over; then unanswered requests are sent again, or a new
        round."""
        self.reach.retry.failed(now, asked_wait=asked_wait)
        self.session_state.repeat(self.reach.retry.not_before)

    def _try_again(self, now: float, why: str) -> None:
        """Ask again after a pause because of an error that should not happen; after too many in a
        row, no more in this turn. `why` says then what happened the last time."""
        if self.reach.setback():
            self._give_up(why, for_now=True)
        else:
            self._pause(now)

    def _reopen(self, now: float) -> None:
        """Open a session again that the verifier has lost: its opening is among the unsettled
        requests. The first time at once, then after a pause."""
        self._reopens = True
        self._try_again(now, "the verifier has lost the session again and again")
        if self.reach.setbacks == 1:
            self.session_state.repeat(now)

    def _broken(self, error: MoaError, now: float) -> None:
        """Continue from the device's log in a new session, because the two logs differ or the
        verifier broke a rule. The user is told of the first time in a row."""
        if not self.reach.setbacks:
            self._events.append(
                Notice(message=f"a new session is opened: {safe_line(error.line())}")
            )
        self.transcript.begin_anew()
        self._try_again(now, f"sessions break again and again: {error.line()}")
        self._absorb(now)

    def _give_up(self, why: str, *, for_now: bool = False) -> None:
        """Ask the verifier for nothing more in this turn; `for_now` says that it may answer the
        next one."""
        self.reach.give_up(why, for_now=for_now)
        self.session.unsettled.clear()

    def _absorb(self, now: float) -> bool:
        """Compare new verified tokens with the text that the device wrote offline. Returns False if
        the turn continues in another session because of a difference that is kept."""
        self.transcript.absorb()
        if not self.transcript.provisional:
            self.guard.reset()
        superseded = self.transcript.superseded
        if superseded is None:
            return True
        self.transcript.superseded = None
        self._begin_new_session(superseded, now)
        return False

    def _begin_new_session(self, superseded: ClientSession, now: float) -> None:
        """Open the session in which the turn continues, and close the one that it supersedes.
        Activation records of the tokens that both have in common are kept."""
        self._agree()
        self.ahead.lost()
        self._count_is_lost()
        common_length = max((stop for _, stop in self.session.held), default=0)
        self.records.truncate(common_length)
        before = self.session_state
        self.session_state = SessionState(self.session)
        if self.reach.link != "up":
            return
        if self._usable:
            opening = self.session_state.bring_up(before.connection)
            if before.again_at is None:
                self._repeat(opening, now)
            else:
                self.session_state.repeat(before.again_at)  # a pause goes on
        # Only behind the opening: the new session shares the cached prefix of this one.
        self._outbox.append(Close(superseded.id))

    # ---- while nothing can be asked

    @property
    def _may_write(self) -> bool:
        """Whether the device may write offline."""
        if self._no_drafter:
            return False
        return not self.transcript.finish and not self.guard.stops(self.transcript.provisional)

    def _while_waiting(self, moment: Moment) -> Action | None:
        """Returns what the drafter or the verifier is to do while nothing can be asked for: write
        offline once the user has waited for `offline_after`, end the turn where nothing may be
        written, or guess for the running stream. None if there is nothing to do."""
        if self._may_write:
            write_at = self.deadlines.write_at(refused=self._was_refused)
            if self.reach.hopeless or moment.reached(write_at):
                self._say(self.reach.news(), moment.now)
                return Write(self.transcript.ids)
        elif self._waited_long_enough(moment):
            return End(self._reason())
        self._take_in_records(moment.now)
        return self._guess(moment)

    def _guess(self, moment: Moment) -> Grow | None:
        """Help the stream that runs, if one does: put guesses that are ready into the outbox, or
        return the step in which the drafter makes more of them."""
        stream_runs = self._usable and self.session_state.usable and self.session.busy
        if not stream_runs:
            return None
        if not moment.reached(self._may_send_at(moment.now)):
            return None  # the link's budget of bytes is used up for now
        match self.ahead.next(moment):
            case Foresee() as message:
                self._outbox.append(message)
            case Grow() as grow:
                return grow
        return None

    def _waited_long_enough(self, moment: Moment) -> bool:
        """Whether a turn must end that may write no further text: the verifier cannot check what
        there is, or has not checked it in time. Tells the user when the verifier cannot be
        asked."""
        is_down = self.reach.link == "down"
        unreachable = is_down or self._was_refused
        # Whoever has an answer to look at already need not wait long for its check.
        nothing_to_show = not self.transcript.length and not unreachable
        is_at_work = not (is_down if self._persists else unreachable)
        patient = nothing_to_show or (self._rechecks and is_at_work)
        over = self.reach.hopeless or moment.reached(
            self.deadlines.end_at(moment.now, patient=patient, refused=self._was_refused)
        )
        if over or unreachable:
            self._say(self.reach.news(), moment.now)
        return over

    def _take_in_records(self, now: float) -> None:
        """Store the activation records that have arrived: the target's hidden states, which the
        drafter reads. Then acknowledge them, so that the verifier sends more."""
        self._store_records()
        if self.reach.link != "up":
            return
        ack = self.records.flow.acknowledge()
        if ack is None:
            return  # no record has come since the last time
        self._outbox.append(ack)
        self._choose_record_size(now)

    def _choose_record_size(self, now: float) -> None:
        """Ask for activation records in fewer bits where the link has turned out too slow for them,
        and in more where it is fast enough again."""
        change = self.records.adjust(self.session, self.stats.speed(now))
        if change is not None:
            self._outbox.append(change)

    def _store_records(self) -> None:
        """Store the activation records that have arrived. If that fails, the drafter does without:
        tokens are exact whatever happens to records."""
        try:
            rules = self.transcript.rules
            longest_log = rules.start + rules.max_new_tokens
            self.records.store(self.session, longest_log)
        except ProtocolError as error:
            # The verifier broke a rule: it is not trusted for the rest of the turn.
            self._give_up(str(error))
        except Exception as error:
            # The store itself is broken: records that come later are dropped.
            self.records.buffer = None
            self._events.append(
                Notice(message=DeviceError.of("the store of activation records", error).line())
            )

    def _say(self, link: Link, now: float) -> None:
        """Tell the user the state of the link, or that his rate is used up in its place."""
        self._tell(self.reach.as_limited(link, now))

    def _tell(self, link: Link) -> None:
        """Tell the user the state of the link, if it has changed, or it is known now why the
        verifier is late, or until when the rate is used up."""
        says_why = link.state in OVERDUE and link.detail not in ("", self._detail)
        if link.state != self._state or says_why:
            self._state = link.state
            self._detail = link.detail
            self._events.append(link)

    def _reason(self) -> Reason:
        """Why the turn ends."""
        if self.transcript.finish:
            return self.transcript.finish
        if self.guard.stops(self.transcript.provisional):
            return "guard"
        return "link"


def _credible(event: Advanced, waited_seconds: float) -> Advanced:
    """Cap the times that the server reports at the time that the device has waited: no server can
    have worked longer on the answer, and the next deadline depends on them."""
    waited_ms = 1000 * max(0.0, waited_seconds)
    forward_ms = min(event.forward_ms, waited_ms)
    queue_ms = min(event.queue_ms, waited_ms - forward_ms)
    return replace(event, forward_ms=forward_ms, queue_ms=queue_ms)
