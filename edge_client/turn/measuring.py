"""Measures link, server and drafter by the answers of a turn. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from edge_client.link.estimates import RoundTrip
from edge_client.turn.controller import Controller
from edge_client.turn.stats import Stats
from moa.speculation.guess_tree import GuessOutcome
from moa.speculation.prediction import Prediction
from moa.tree import DraftTree
from moa.wire import Advanced


def credible(event: Advanced, waited: float) -> Advanced:
    """Nobody works longer than he was waited for. What a verifier says of its time decides how long it is waited for
    the next time."""
    waited_ms = 1000 * max(0.0, waited)
    if event.queue_ms + event.forward_ms <= waited_ms:
        return event
    forward = min(event.forward_ms, waited_ms)
    return replace(event, forward_ms=forward, queue_ms=min(event.queue_ms, waited_ms - forward))


@dataclass
class Measuring:
    """Collects measurements; slow updates run while the device is idle."""

    stats: Stats
    controller: Controller
    rtt: RoundTrip
    unsent: int
    """Tokens of the prompt that the verifier has not run yet."""
    asked: DraftTree | None = None
    """The draft that is being verified."""
    drafts: Literal["server", "none", "device"] = "server"
    """Who drafts in the running stream."""
    prediction: Prediction | None = None
    _lesson: tuple[DraftTree, int, float, float] | None = None
    """A verified draft, how much of it was accepted, and the seconds of the round trip and of the verification."""
    _streamed_at: float | None = None
    _settled_at: float = 0.0
    """Until then tokens may come from who drafted before."""

    @property
    def usual(self) -> float:
        """Expected seconds for an answer, including the rest of the prompt."""
        forward = self.controller.forward.seconds(1) if self.controller.forward else 0.0
        return self.rtt.usual(forward) + self.unsent * self.controller.prefill.value

    def streams(self, drafts: Literal["server", "none", "device"]) -> None:
        """A stream is asked for."""
        self.asked, self.drafts, self._streamed_at = None, drafts, None

    def changes(self, drafts: Literal["server", "none", "device"], settled_at: float) -> None:
        """In the running stream somebody else drafts; what comes from then on was drafted so."""
        self.drafts, self._settled_at = drafts, settled_at

    def foresaw(self, outcome: GuessOutcome) -> None:
        """A forward of a stream that guesses were sent for, and whether what it brought was among them."""
        self.stats.outcomes[outcome] += 1

    def answered(self, event: Advanced, asked_at: float, now: float) -> None:
        """A round that was asked for at `asked_at` has advanced the log."""
        server = (event.queue_ms + event.forward_ms) / 1000
        accepted = len(event.path) - 1
        self.stats.forwards += bool(event.tokens)
        if event.path:
            self.stats.rounds += 1
            self.stats.accepted += accepted
            if self.asked is not None:
                # The first verdict of a turn also waited for the prompt, so it does not predict the next.
                verifying = server if not self.unsent else event.forward_ms / 1000
                self._lesson = self.asked, accepted, now - asked_at - server, verifying
            else:
                if not self.controller.forward:
                    self.controller.forward.observe(1, event.forward_ms / 1000)
                if self.prediction is not None:
                    self.prediction.judged(accepted)
        else:
            self._stream(event, now)
        self.asked = None
        if self.unsent and event.tokens:
            self.controller.prefilled(self.unsent, event.queue_ms / 1000)
            self.unsent = 0

    def learn(self) -> None:
        """Apply the latest measurement."""
        if self._lesson is not None:
            asked, accepted, round_trip, verifying = self._lesson
            self._lesson = None
            self.controller.verified(asked, accepted, verifying)
            self.rtt.add(round_trip)

    def _stream(self, event: Advanced, now: float) -> None:
        if self._streamed_at is not None and event.tokens and self._streamed_at >= self._settled_at:
            self.controller.streamed(
                len(event.tokens),
                now - self._streamed_at,
                drafts=self.drafts,
                server_seconds=event.forward_ms / 1000,
            )
        self._streamed_at = now
        if event.foreseen:
            self.stats.rounds += 1
            self.stats.accepted += len(event.tokens) - 1
            self.stats.drafted += event.foreseen
        if event.tokens:
            who = "device" if event.foreseen else "server" if event.drafted else "none"
            self.stats.by[who] += len(event.tokens)
