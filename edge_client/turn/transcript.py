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
    statuses: list[Status] = field(default_factory=list)
    """One for each output token."""
    local_finish: Finish = ""
    """Why the provisional text ended, if it has."""
    superseded: ClientSession | None = None
    """The session that was abandoned because `keep` adopted other text."""
    _events: list[Event] = field(default_factory=list)
    _untold: list[tuple[int, int, Status]] = field(default_factory=list)
    """Position, id and status of tokens without an event yet: they are decoded when events are
    read, or text is cut."""
    _known: int = field(init=False)
    """How much of the session's log has been absorbed."""

    def __post_init__(self) -> None:
        self._known = len(self.session.log)

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
        return self.local_finish if self.provisional else self.session.finish or self.local_finish

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
        self._write()
        events = self._events
        self._events = []
        return events

    # ---- what happens

    def absorb(self) -> None:
        """Absorb the new tokens of the session's log."""
        while self._known < len(self.session.log):
            token = self.session.log[self._known]
            if self.provisional and self.provisional[0] != token:
                if self.on_reconnect == "keep":
                    self._adopt()
                    return
                self._retract()
            position = self._known
            self._known += 1
            if self.provisional:
                self.provisional.pop(0)
                self.statuses[position - self.rules.start] = "verified"
                self._confirmed(position)
            else:
                self._emit(position, token, "verified")
        if (
            self.session.finish and self.provisional
        ):  # the target ended the turn here, and the device continued
            if self.on_reconnect == "keep":
                self._adopt()
            else:
                self._retract()

    def extend(self, token: int) -> None:
        """A token written offline."""
        _, self.local_finish = first_finish(self.rules, self.ids, [token], self.decode)
        self.provisional.append(token)
        self._emit(len(self.session.log) + len(self.provisional) - 1, token, "provisional")

    def limit(self, most: int) -> None:
        """This verifier writes so many tokens in a turn: it would refuse one that asks for more."""
        if self.length < most < self.rules.max_new_tokens and not self.session.settled:
            self.rules = replace(self.rules, max_new_tokens=most)
            self.session.max_new_tokens = most

    def begin_anew(self) -> None:
        """Continue from the verified log in a new session."""
        provisional = self.provisional
        self._replace(self.session.log)
        self.provisional = provisional

    def _write(self) -> None:
        """Make events for the tokens without one."""
        for position, token, status in self._untold:
            logprobs = self.session.token_logprobs.get(position) if status == "verified" else None
            text = self.stream.add(token)
            self._events.append(
                Token(position=position, id=token, text=text, status=status, logprobs=logprobs)
            )
        self._untold.clear()

    def _emit(self, position: int, token: int, status: Status) -> None:
        self.statuses.append(status)
        self._untold.append((position, token, status))

    def _confirmed(self, position: int) -> None:
        self._write()
        last = self._events[-1] if self._events else None
        told = self.session.token_logprobs.get(position)
        logprobs = (told,) if told is not None else ()
        if (
            isinstance(last, Confirm)
            and last.stop == position
            and bool(last.logprobs) == bool(logprobs)
        ):
            start = last.start
            self._events[-1] = Confirm(
                start=start, stop=position + 1, logprobs=last.logprobs + logprobs
            )
        else:
            self._events.append(Confirm(start=position, stop=position + 1, logprobs=logprobs))

    def _retract(self) -> None:
        self._write()
        start = self._known
        stop = start + len(self.provisional)
        self.provisional.clear()
        self.local_finish = ""
        del self.statuses[start - self.rules.start :]
        characters = self.stream.cut(start - self.rules.start)
        self._events.append(Retract(start=start, stop=stop, characters=characters))

    def _adopt(self) -> None:
        self._write()
        start = self._known
        self._events.append(Adopt(start=start, stop=start + len(self.provisional)))
        self._replace(self.session.log[:start] + self.provisional)

    def _replace(self, ids: Sequence[int]) -> None:
        """Continue from `ids` in a new session: the old one's log differs."""
        old = self.superseded = self.session
        self.session = old.another(ids)
        self.session.turn_start = self.rules.start
        self.session.held = Ranges(old.held)
        self.session.held.truncate(self._known)
        self._known = len(ids)
        self.provisional = []
