"""A turn by rounds: a draft goes up, and its verdict is awaited. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.turn.actions import Draft
from edge_client.turn.controller import Controller, Plan
from edge_client.turn.deadlines import Moment
from edge_client.turn.records import Records
from edge_client.turn.stats import Stats
from edge_client.turn.transcript import Transcript
from moa.speculation.prediction import Prediction
from moa.tree import DraftTree
from moa.wire import Advanced
from moa.wire.messages import Verify

_QUICK = 0.005
"""If a draft takes at most this many seconds, the next request is sent before the last verdict's
tokens are shown."""


@dataclass
class Rounds:
    """The next round, and what its verdict teaches."""

    transcript: Transcript
    controller: Controller
    records: Records
    stats: Stats
    prediction: Prediction | None = None
    record_service: bool = False
    """Whether the verifier makes activation records."""
    _draft: DraftTree | None = None
    """The draft that is being verified."""
    _records_until: float | None = None
    """Deadline for waiting on the prompt's records; None before the first verdict."""

    def check(self) -> Verify | None:
        """The round that needs no drafter: offline text, or the predicted text."""
        session = self.transcript.session
        most = self.controller.max_chain
        if self.transcript.provisional:
            return session.verify(self.transcript.bulk(most + 1))
        if self.prediction is None:
            return None
        predicted = self.prediction.after(
            self.transcript.output, min(most, self.transcript.remaining)
        )
        return session.verify([session.log[-1], *predicted]) if predicted else None

    def next(self, plan: Plan, moment: Moment) -> Verify | Draft | None:
        """The round to ask for, or the draft to make for it; None while the prompt's records are
        awaited."""
        log = self.transcript.session.log
        if plan.who_drafts == "single":
            return self.drafted(DraftTree([log[-1]], [-1], [0.0]))
        if self._waits_for_records(moment):
            return None
        return Draft(log, plan.shape, quick=plan.drafting < _QUICK)

    def drafted(self, tree: DraftTree) -> Verify:
        """The round of a draft."""
        self._draft = tree
        chain = tree.parents == list(range(-1, len(tree) - 1))
        return self.transcript.session.verify(tree.tokens, [] if chain else tree.parents)

    def answered(self, event: Advanced, waited: float, *, prompt: bool) -> None:
        """A verdict came after so many seconds; `prompt`: the prompt had to be read first."""
        accepted = len(event.path) - 1
        server = (event.queue_ms + event.forward_ms) / 1000
        self.stats.rounds += 1
        self.stats.accepted += accepted
        if self._draft is not None:
            # The first verdict of a turn also waited for the prompt, so its wait does not predict
            # the next.
            self.controller.verified(
                self._draft, accepted, event.forward_ms / 1000 if prompt else server
            )
            self.controller.rtt.add(waited - server)
        else:
            if not self.controller.forward:
                self.controller.forward.observe(1, event.forward_ms / 1000)
            if self.prediction is not None:
                self.prediction.judged(accepted)
        self._draft = None

    def forget(self) -> None:
        """The answer will not be that of the draft."""
        self._draft = None

    @property
    def lacks_records(self) -> bool:
        """Whether records of the prompt are still to come."""
        return self.record_service and self.records.misses(self.transcript.rules.start)

    def _waits_for_records(self, moment: Moment) -> bool:
        """The prompt's records follow its first verdict, and without them only half as many tokens
        are accepted: wait for them, at most half a round."""
        if not self.transcript.length or not self.lacks_records:
            return False
        if self._records_until is None:
            half = (self.controller.rtt.smoothed + self.controller.forward.seconds(1)) / 2
            self._records_until = moment.now + half
        return not moment.reached(self._records_until)
