"""What to ask the verifier next, once it can be asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.turn.actions import Draft, Grow
from edge_client.turn.budget import Spending
from edge_client.turn.controller import Controller, Plan, WhoDrafts
from edge_client.turn.foreseeing import Foreseeing
from edge_client.turn.measuring import Measuring
from edge_client.turn.records import Records
from edge_client.turn.transcript import Transcript
from moa.speculation.prediction import Prediction
from moa.tree import DraftTree
from moa.wire.messages import Foresee, Stream, Verify, Welcome

_QUICK = 0.005
"""If a draft takes at most this many seconds, the next request is sent before the last verdict's tokens are shown."""


@dataclass
class Asking:
    """The next round of a turn."""

    transcript: Transcript
    controller: Controller
    spending: Spending
    records: Records
    measuring: Measuring
    draft: WhoDrafts = "auto"
    prediction: Prediction | None = None
    foresee: bool = False
    """Whether guesses may go ahead of the answers."""
    welcome: Welcome | None = None
    not_before: float = 0.0
    """No request before this time: the byte budget, or the prompt's records."""
    _plan: Plan | None = None
    """The plan for the next round, if it is already made."""
    _records_until: float | None = None
    """Deadline for waiting on the prompt's records; None before the first verdict."""

    def __post_init__(self) -> None:
        wanted = self.foresee and self.draft in ("auto", "device")
        wanted = wanted and self.prediction is None and self.spending.left is None
        self.foreseeing = Foreseeing(self.measuring, wanted, chooses=self.draft == "auto")
        self.controller.begin()

    @property
    def spent(self) -> bool:
        """Whether the budget of calls is used up."""
        return self.spending.left == 0

    def next(self, now: float) -> Verify | Stream | Draft | None:
        """First the check of offline text, then the best plan; None: not before `not_before`."""
        session = self.transcript.session
        if self.spent:
            return None
        if (wait := self.spending.wait(now)) > 0:
            self.not_before = now + wait
            return None
        if self.transcript.provisional:
            return session.verify(self.transcript.bulk(self.controller.max_chain + 1))
        if expected := self._predicted():
            return session.verify([session.log[-1], *expected])
        plan = self._plan = self._plan or self._next_plan()
        self.foreseeing.shape = plan.shape
        match plan.draft:
            case "device" if self.foreseeing.on:
                self.measuring.streams("device")
                return session.stream(speculate=False, waits=True)
            case "device":
                if self._waits_for_records(now):
                    return None
                return Draft(session.log, plan.shape, quick=plan.drafting < _QUICK)
            case "single":
                return self.verify(DraftTree([session.log[-1]], [-1], [0.0]))
            case who:
                self.measuring.streams(who)
                return session.stream(speculate=who == "server")

    def ahead(self, now: float) -> Foresee | Grow | None:
        """What to do for the running stream: send guesses, or make more."""
        if not self.foreseeing.on or (wait := self.spending.wait(now)) > 0:
            self.not_before = now + wait if self.foreseeing.on else self.not_before
            return None
        return self.foreseeing.next(self.transcript.session, self.transcript.provisional, self._remaining, now)

    @property
    def waits_for_records(self) -> bool:
        """Whether the next draft waits for the prompt's records."""
        return self._records_until is not None and self.not_before == self._records_until

    def verify(self, tree: DraftTree) -> Verify:
        """The round of a draft."""
        self.measuring.asked = tree
        chain = tree.parents == list(range(-1, len(tree) - 1))
        return self.transcript.session.verify(tree.tokens, [] if chain else tree.parents)

    def plan_ahead(self) -> None:
        """Plan the round after the one under way, while its answer is awaited."""
        if self._plan is None and self.transcript.length:
            self._plan = self._next_plan()

    def without_drafter(self) -> None:
        """The drafter has failed: no plan may need it."""
        self.draft = "server" if self.controller.can_stream else "single"
        self.foreseeing.wanted = False
        self.forget()

    def forget(self) -> None:
        """The plan is no longer valid."""
        self._plan = None

    def _predicted(self) -> list[int]:
        if self.prediction is None:
            return []
        return self.prediction.after(self.transcript.output, min(self.controller.max_chain, self._remaining))

    @property
    def _remaining(self) -> int:
        return self.transcript.rules.max_new_tokens - self.transcript.length

    def _next_plan(self) -> Plan:
        blind = not self.transcript.length and self.records.misses(self.transcript.rules.start)
        return self.controller.plan(
            self._remaining, self.draft, calls_left=self.spending.left, blind=blind, foresees=self.foreseeing.on
        )

    def _waits_for_records(self, now: float) -> bool:
        """The prompt's records follow its first verdict, and without them only half as many tokens are accepted: wait
        for them, at most half a round."""
        if not self.transcript.length or self.welcome is None or self.welcome.records is None:
            return False
        if not self.records.misses(self.transcript.rules.start):
            return False
        if self._records_until is None:
            self._records_until = now + (self.measuring.rtt.smoothed + self.controller.forward.seconds(1)) / 2
        self.not_before = self._records_until
        return now < self._records_until
