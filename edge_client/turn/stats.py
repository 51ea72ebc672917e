"""Figures of a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edge_client.events import Adopt, Confirm, Event, Retract, Token
from moa.speculation.guess_tree import GuessOutcome
from moa.wire.messages import Usage

_COUNTS = (
    "tokens",
    "calls",
    "rounds",
    "drafted",
    "accepted",
    "offline_tokens",
    "confirmed",
    "retracted",
    "adopted",
    "resumes",
    "forwards",
    "guess_messages",
)


@dataclass(slots=True)
class Stats:
    """What is counted while a turn runs. Times are in seconds."""

    started: float
    finished: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    calls: int = 0
    """Requests for a stream, and guesses for one that stood still without them: a round trip each."""
    rounds: int = 0
    """Forwards of the target over guesses of the device."""
    drafted: int = 0
    accepted: int = 0
    offline_tokens: int = 0
    tokens: int = 0
    confirmed: int = 0
    retracted: int = 0
    adopted: int = 0
    resumes: int = 0
    """How often the answer went on behind the loss of its connection, or of the verifier's session:
    resumed there, or opened again with all that had come."""
    forwards: int = 0
    """Forwards of the target that brought tokens, whoever had drafted for them."""
    guess_messages: int = 0
    """Messages with guesses for a running stream."""
    outcomes: Counter[GuessOutcome] = field(default_factory=Counter)
    """Forwards of such streams, by whether their tokens had been guessed."""
    by: Counter[str] = field(default_factory=Counter)
    """Tokens of streams, by who drafted the forward that brought them: device, server or none."""

    usages: list[Usage | None] = field(default_factory=list)
    """What an engine behind the verifier has counted for each round that has ended; None where it
    did not tell."""

    @property
    def usage(self) -> Usage | None:
        """What the engine behind has counted for the turn; None if it did not tell that of each
        round, or a part of the text is not its own."""
        known = [usage for usage in self.usages if usage is not None]
        if not known or len(known) < len(self.usages) or self.adopted:
            return None
        return Usage(sum(one.read for one in known), sum(one.written for one in known))

    @property
    def unverified_tokens(self) -> int:
        """Tokens of the answer that the device has written alone and the target has not verified,
        among them adopted ones, which it was made to go on from: a program asks who vouches for
        the text. `AnswerSoFar.unverified` is what a person reads, of what may still change."""
        return max(0, self.offline_tokens - self.confirmed - self.retracted)

    def count(self, events: Iterable[Event], now: float) -> None:
        """Count the tokens in these events, which are on their way to the user, and note when they
        were shown."""
        for event in events:
            match event:
                case Token():
                    self.tokens += 1
                    self.first_token = self.first_token or now
                    self.last_token = now
                case Confirm(start=start, stop=stop):
                    self.confirmed += stop - start
                case Retract(start=start, stop=stop):
                    self.retracted += stop - start
                    self.tokens -= stop - start
                    if not self.tokens:  # nothing of what came first stands
                        self.first_token = 0.0
                case Adopt(start=start, stop=stop):
                    self.adopted += stop - start
                case _:
                    pass

    def speed(self, now: float) -> float:
        """Tokens a second so far."""
        return self.tokens / max(1e-3, now - self.started)

    def report(self, now: float) -> dict[str, Any]:
        """The turn's figures as a dict of rounded numbers; times are seconds since the turn
        began."""
        seconds = max(1e-3, (self.finished or now) - self.started)
        tokens_per_forward = None
        if self.forwards:
            tokens_per_forward = round(self.by.total() / self.forwards, 3)
        return {
            "seconds": round(seconds, 4),
            "first_token_seconds": round(max(0.0, self.first_token - self.started), 4),
            "last_token_seconds": round(max(0.0, self.last_token - self.started), 4),
            "tokens_per_second": round(self.tokens / seconds, 2),
            "tokens_per_forward": tokens_per_forward,
            **{name: getattr(self, name) for name in _COUNTS},
            "unverified_tokens": self.unverified_tokens,
            "outcomes": dict(self.outcomes),
            "streamed_by": dict(self.by),
            **self._told(),
        }

    def _told(self) -> dict[str, Any]:
        """What the engine behind has counted, with OpenAI's names; empty if it is not known."""
        usage = self.usage
        if usage is None:
            return {}
        told = {"prompt_tokens": usage.read, "completion_tokens": usage.written}
        return {"upstream_usage": told}
