"""All deadlines of a turn, in seconds, and when the machine must act next. Pure. How long each wait
is decides `pacing.py`."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.turn import pacing
from edge_client.turn.controller import Controller
from edge_client.turn.pacing import Waits

_HEARD_SECONDS = 2.0
"""For so long a word of the verifier's counts as one of just now; it comes each half second."""


@dataclass(slots=True)
class Moment:
    """One look at the clock, and the next instant at which something is due.

    Each deadline is asked for with `reached`: it has passed and is acted on, or the wait ends there
    at the latest. So every wait lies in the future by construction.
    """

    now: float
    next: float | None = None
    """The earliest deadline that was asked for and has not passed."""

    def reached(self, at: float) -> bool:
        """Whether this instant has passed; if not, the wait ends there at the latest."""
        if not at > self.now:  # so that NaN counts as passed
            return True
        if self.next is None or at < self.next:
            self.next = at
        return False


@dataclass(frozen=True, slots=True)
class Patience:
    """The configured waiting times. Those before `answer` are least times: a slow link or target has
    longer ones."""

    offline_after: float = pacing.OFFLINE_AFTER
    """Wait beyond the usual, after which the device writes offline."""
    settle: float = 5.0
    """Wait for the check of offline text, once it is complete."""
    settle_unheard: float = 0.5
    """The same where nothing listens at the verifier's address, and nothing ever has: a verifier
    that was never there does not come back."""
    answer: float = 120.0
    """Wait for an answer on a live connection; then the round is sent on a new connection."""
    late_pace: float = pacing.LATE_PACE
    """Time between offline tokens while an answer is only late: most of them would be withdrawn."""


@dataclass(slots=True)
class Deadlines:
    """The times from which the deadlines of one turn are computed.

    They count from what a person sees: the last verified token, the last sign that the verifier
    works on the next one, and the moment from which nothing more could be written. Refusals, new
    sessions, new connections and silence do not restart them.
    """

    patience: Patience
    controller: Controller
    waiting_since: float
    """Since when the user has waited for a token: the start or the last verified token, or the
    first request after it, because drafting takes time too."""
    unread: int = 0
    """Tokens of the prompt that the verifier has not run yet."""
    text_stays: bool = False
    """Whether text that the device has written stays, whatever the target says."""
    engine_behind: bool = False
    """Whether the verifier stands in front of an engine that may say nothing while it reads."""
    away_since: float | None = None
    """Since when that engine is known to answer nothing; None while it may answer."""
    away_unheard: bool = False
    """Whether it has never answered anything."""
    asked_at: float = 0.0
    """When the latest request was sent."""
    _down_since: float | None = None
    """Since when there has been no connection; None while there is one."""
    _unheard: bool = False
    """Whether nothing listens at the verifier's address, and nothing ever has."""
    _usual: float = 0.0
    """Seconds that the pending answer may take without being late."""
    _blocked_since: float | None = None
    """Since when nothing more could be written: the text is complete, or long enough for the guard."""
    _written_at: float = float("-inf")
    """When the device wrote its last provisional token."""
    _read_at: float = float("-inf")
    """When the user had read the latest events: answers that arrived before are not late."""
    _heard_at: float = float("-inf")
    """When the verifier last said that it works on the answer."""
    _advanced_at: float = float("-inf")
    """When the verifier last said that it had come further."""
    _done: int = -1
    """How many tokens it had read then; -1 before its first word."""
    _to_read: int = 0
    """How many tokens it had still to read then."""
    _asked: bool = False
    """Whether there was a request, or a provisional token, since the last verified one."""

    @property
    def waits(self) -> Waits:
        """How long to wait for what, by what was measured so far."""
        return pacing.waits(
            self.controller.rtt.smoothed,
            self.controller.answer_seconds(),
            offline_after=self.patience.offline_after,
            pace=self.patience.late_pace,
            settle=self.patience.settle,
        )

    @property
    def usual(self) -> float:
        """Seconds within which the answer to a request made now is expected, the rest of the prompt
        included."""
        return self.controller.answer_seconds(self.unread)

    def asked(self, now: float) -> None:
        """Note that a request was sent."""
        self.asked_at = now
        self._done = -1
        self._usual = self.usual
        if not self._asked:
            self.waiting_since = now
            self._asked = True

    def heard(self, done: int, to_read: int, now: float) -> None:
        """Note that the verifier says it works on the answer, and has read `done` tokens for it, with
        `to_read` more to come."""
        if done != self._done:
            # When it had come as far as it is at its first word, nobody knows; but not before its
            # latest token, where an engine behind it stands still in the middle of an answer.
            begun_at = self.asked_at
            if self.engine_behind:
                begun_at = max(begun_at, self.waiting_since)
            self._advanced_at = begun_at if self._done < 0 else now
            self._done = done
            self._to_read = max(0, to_read)
        self._heard_at = now

    def is_heard(self, now: float) -> bool:
        """Whether the verifier has said just now that it works on the answer."""
        return now - self._heard_at < _HEARD_SECONDS

    def written(self, now: float) -> None:
        """Note that the device wrote a provisional token."""
        self._written_at = now
        self._asked = True

    def progressed(self, now: float, server_seconds: float = 0.0) -> None:
        """Note that verified tokens arrived, for which the server worked so long."""
        self.waiting_since = max(now, self._read_at)
        self._usual = self.usual + server_seconds
        self._blocked_since = None
        self._asked = False

    def read(self, since: float, now: float) -> None:
        """Note that the user has read events from `since` until now: that is no waiting."""
        reading = now - since
        self.waiting_since += reading
        if self._blocked_since is not None:
            self._blocked_since += reading
        self._read_at = now

    def restart(self, now: float) -> None:
        """Let the user wait once more, from now on."""
        self.waiting_since = now
        self._blocked_since = None

    def connected(self) -> None:
        """Note that the connection is up."""
        self._down_since = None

    def lost(self, since: float, *, unheard: bool = False) -> None:
        """Note that the connection has been down since then, or for longer. `unheard`: nothing
        listens at the verifier's address, and nothing ever has."""
        if self._down_since is None:
            self._down_since = since
        self._unheard = unheard

    def write_at(self, *, refused: bool = False) -> float:
        """When the device may write its next offline token. `refused`: the latest request was, and
        is to be repeated after a pause."""
        waits = self.waits  # computed anew each time that it is asked for
        lost_since = self._lost_since(refused=refused)
        if lost_since is not None:
            return min(self.waiting_since, lost_since) + waits.offline
        late = self._expected_at + waits.late
        return max(late, self._written_at + waits.pace)

    def give_up_at(self) -> float:
        """When a connection with a pending answer is given up."""
        since = max(self.asked_at, self.waiting_since, self._life)
        return since + max(self.patience.answer, 4 * self._usual)

    def end_at(self, now: float, *, patient: bool, refused: bool = False) -> float:
        """When a turn that may write no further text must end, in seconds on the clock. `patient`:
        the answer is only slow, and the user has no text to look at yet, or does not wait for the
        check. `refused` as for `write_at`."""
        if self._blocked_since is None:
            self._blocked_since = now
        if self._lost_since(refused=refused) is not None:  # nothing is on its way
            return self._blocked_since + self._away(patient=patient)
        if patient:
            last_sign = max(self._blocked_since, self._expected_at, self._life)
            return last_sign + self.patience.answer
        return max(self._blocked_since, self._expected_at) + self.waits.settle

    def _lost_since(self, *, refused: bool) -> float | None:
        """Since when nothing can be on its way: there is no connection, or the engine behind the
        verifier is away and the latest request was refused. None if something may be."""
        if self._down_since is not None:
            return self._down_since
        return self.away_since if refused else None

    def _away(self, *, patient: bool) -> float:
        """Seconds for which a verifier is waited for that has no connection, or no engine."""
        if patient:
            return self.patience.answer
        unheard = self._unheard if self._down_since is not None else self.away_unheard
        return self.patience.settle_unheard if unheard else self.waits.settle_away

    @property
    def _life(self) -> float:
        """The last time at which there was a sign that an answer may still come. A verifier speaks
        for an engine behind it only while that engine answers other requests: however long it reads,
        another connection would only have it read anew."""
        return self._heard_at if self.engine_behind else self._sign

    @property
    def _sign(self) -> float:
        """The last time at which the verifier said that it works on the answer, as far as that
        counts: it must come further now and then."""
        if self._heard_at == float("-inf"):
            return self._heard_at  # it has said nothing: most answers come without
        longest = max(self.waits.stalled, 4 * self._usual)
        if self.engine_behind:
            longest = pacing.silent_reading(
                self._to_read,
                stalled=longest,
                first=self.controller.first_text,
                text_stays=self.text_stays,
            )
        return min(self._heard_at, self._advanced_at + longest)

    @property
    def _expected_at(self) -> float:
        """When the pending answer should be here at the latest."""
        return max(self.waiting_since + self._usual, self._sign)
