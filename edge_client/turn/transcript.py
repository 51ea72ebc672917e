"""The text of one turn: the verified log, the provisional text after it, and their reconciliation.

The log of `ClientSession` holds verified tokens only. Offline text follows it as `provisional`.
Every verified token passes `absorb`: it confirms the first provisional token, or contradicts it.
This is the only place of reconciliation, so no token is lost or shown twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from edge_client.events import Adopt, Confirm, Event, Retract, Status, Token
from moa.logprobs import TokenLogprobs
from moa.text_stream import TextStream
from moa.wire import ClientSession, Ranges
from moa.wire.finish import Decode, TurnRules, first_finish
from moa.wire.messages import Finish

OnReconnect = Literal["rewind", "keep"]


@dataclass
class Transcript:
    """One answer as its reader sees it. Pure."""

    session: ClientSession
    rules: TurnRules
    decode: Decode
    stream: TextStream
    on_reconnect: OnReconnect = "rewind"

    provisional: list[int] = field(default_factory=list)
    """Tokens behind the log that the device wrote offline."""
    statuses: list[Status] = field(default_factory=list)
    """One for each output token."""
    local_finish: Finish = ""
    """Why the provisional text ended, if it has."""
    superseded: ClientSession | None = None
    """The session that was abandoned because `keep` adopted other text."""
    _events: list[Event] = field(default_factory=list)
    """Events that were not read yet."""
    _without_event: list[tuple[int, int, Status]] = field(default_factory=list)
    """Position, id and status of tokens without an event yet: they are decoded when events are
    read, or text is cut."""
    _absorbed: int = field(init=False)
    """How many tokens of the session's log have been absorbed."""

    def __post_init__(self) -> None:
        self._absorbed = len(self.session.log)

    # ---- what there is

    @property
    def ids(self) -> list[int]:
        """Everything so far: verified, then provisional."""
        return self.session.log + self.provisional

    @property
    def output(self) -> list[int]:
        """This turn's tokens."""
        return self.ids[self.rules.start :]

    @property
    def length(self) -> int:
        """How many tokens this turn has."""
        return len(self.session.log) + len(self.provisional) - self.rules.start

    @property
    def remaining(self) -> int:
        """How many more it may have."""
        return self.rules.max_new_tokens - self.length

    @property
    def finish(self) -> Finish:
        """Why the turn is over, "" while it is not. The end of provisional text is provisional too."""
        if self.provisional:
            return self.local_finish
        if self.session.finish == "length" and len(self.session.log) >= self.rules.max_context:
            return "context"  # this device's is full; the verifier's may be longer
        return self.session.finish or self.local_finish

    @property
    def verified(self) -> bool:
        """Whether every token is the target's own."""
        return all(status == "verified" for status in self.statuses)

    @property
    def over(self) -> bool:
        """Whether the turn is over and nothing is left to check."""
        return bool(self.finish) and not self.provisional

    def drain(self) -> list[Event]:
        """Events since the last call."""
        self._make_token_events()
        events = self._events
        self._events = []
        return events

    # ---- what happens

    def absorb(self) -> None:
        """Compare the new verified tokens with the provisional text, which the device wrote
        offline. A token that is equal is confirmed. At the first that differs, or if the target
        ends the turn before that text does, the rest of it is withdrawn, or kept if the user has
        chosen so."""
        while self._absorbed < len(self.session.log):
            token = self.session.log[self._absorbed]
            if self.provisional and self.provisional[0] != token:
                if self.on_reconnect == "keep":
                    self._adopt()
                    return
                self._retract()
            if self.provisional:
                self._confirm_first()
            else:
                self._emit(self._absorbed, token, "verified")
            self._absorbed += 1
        if self.session.finish and self.provisional:
            # The target ended the turn here, and the device went on.
            if self.on_reconnect == "keep":
                self._adopt()
            else:
                self._retract()

    def extend(self, token: int) -> None:
        """Add a token that was written offline."""
        _, self.local_finish = first_finish(self.rules, self.ids, [token], self.decode)
        self.provisional.append(token)
        self._emit(len(self.session.log) + len(self.provisional) - 1, token, "provisional")

    def limit(self, most: int) -> None:
        """Ask for no more tokens than this verifier writes in a turn: it would refuse more. Only
        before the session is open there, and while the text is shorter."""
        if self.length < most < self.rules.max_new_tokens and not self.session.settled:
            self.rules = replace(self.rules, max_new_tokens=most)
            self.session.max_new_tokens = most

    def begin_anew(self) -> None:
        """Continue from the verified log in a new session."""
        provisional = self.provisional
        self._replace(self.session.log)
        self.provisional = provisional

    def _make_token_events(self) -> None:
        """Make events for the tokens without one."""
        for position, token, status in self._without_event:
            logprobs = self.session.token_logprobs.get(position) if status == "verified" else None
            text = self.stream.add(token)
            self._events.append(
                Token(position=position, id=token, text=text, status=status, logprobs=logprobs)
            )
        self._without_event.clear()

    def _emit(self, position: int, token: int, status: Status) -> None:
        """Have the user told of a token."""
        self.statuses.append(status)
        self._without_event.append((position, token, status))

    def _confirm_first(self) -> None:
        """Count the first provisional token as verified: the log has the same one there."""
        position = self._absorbed
        self.provisional.pop(0)
        self.statuses[position - self.rules.start] = "verified"
        self._tell_confirmed(position)

    def _tell_confirmed(self, position: int) -> None:
        """Have the user told that the provisional token at `position` is verified. Tokens that
        follow one another become one event, if all or none of them have log-probabilities."""
        self._make_token_events()
        last = self._events[-1] if self._events else None
        of_token = self.session.token_logprobs.get(position)
        logprobs: tuple[TokenLogprobs, ...] = (of_token,) if of_token is not None else ()
        start = position
        if (
            isinstance(last, Confirm)
            and last.stop == position
            and bool(last.logprobs) == bool(logprobs)
        ):
            start = last.start
            logprobs = last.logprobs + logprobs
            self._events.pop()
        self._events.append(Confirm(start=start, stop=position + 1, logprobs=logprobs))

    def _retract(self) -> None:
        """Withdraw all provisional text: the target has written something else, or has ended before
        it."""
        self._make_token_events()
        start = self._absorbed
        stop = start + len(self.provisional)
        self.provisional.clear()
        self.local_finish = ""
        del self.statuses[start - self.rules.start :]
        characters = self.stream.cut(start - self.rules.start)  # of the text that remains
        self._events.append(Retract(start=start, stop=stop, characters=characters))

    def _adopt(self) -> None:
        """Let provisional text stand, in a new session whose log begins with it."""
        self._make_token_events()
        start = self._absorbed
        self._events.append(Adopt(start=start, stop=start + len(self.provisional)))
        self._replace(self.session.log[:start] + self.provisional)

    def _replace(self, ids: Sequence[int]) -> None:
        """Continue from `ids` in a new session, because the old one's log differs. Records of
        tokens that both have in common stay valid."""
        old = self.superseded = self.session
        self.session = old.another(ids)
        self.session.turn_start = self.rules.start
        self.session.held = Ranges(old.held)
        self.session.held.truncate(self._absorbed)
        self._absorbed = len(ids)
        self.provisional = []
