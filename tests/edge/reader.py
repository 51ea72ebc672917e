"""What a user was told, replayed strictly: a story that cannot be true fails the test.

Provisional text is confirmed, adopted or retracted, each token once and in order; verified text
stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_client.events import Adopt, AnswerSoFar, Confirm, Event, Link, Progress, Retract, Token


class Reader(AnswerSoFar):
    """Reads the events of a turn."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        super().__init__()
        self.prompt = list(prompt)
        self.events: list[Event] = []
        self.adopted = 0
        """Tokens up to the end of what was adopted."""
        self.told_at: list[float] = []
        """When each `Token` came."""
        self.heard_at: list[float] = []
        """When it was told how far the prompt is read."""
        self.late_at = 0.0
        """When the answer was called late for the last time."""
        self.changed_at = 0.0
        """When a token came, or was confirmed, for the last time."""

    def take(self, event: Event, now: float = 0.0) -> None:
        assert self.done is None, "an event after the end"
        self.events.append(event)
        if isinstance(event, Link) and event.state == "late":
            self.late_at = now
        if isinstance(event, Progress):
            self.heard_at.append(now)
        self.changed_at = now if isinstance(event, Token | Confirm) else self.changed_at
        start = len(self.prompt)
        end = start + len(self.ids)
        match event:
            case Token():
                assert event.position == end, "a gap"
                if event.status == "verified":
                    assert self.final == len(self.ids), "verified behind provisional text"
                self.told_at.append(now)
            case Confirm():
                assert event.start == start + self.final, "final twice, or behind provisional text"
                assert event.stop <= end, "settled what was never told"
            case Retract():
                assert event.stop == end, "taken back from the middle"
                assert event.start >= start + self.final, "final text was taken back"
            case Adopt():
                assert event.start == start + self.final, "final twice, or behind provisional text"
                assert event.stop == end, "adopted in the middle"
                self.adopted = len(self.ids)
            case _:
                pass
        super().take(event)
        if isinstance(event, Retract):
            assert len(self.text) == event.characters
        if self.done is not None:
            assert self.text == self.done.text[: len(self.text)]
            assert all(self.verified) or not self.done.verified, (
                "provisional text was never resolved"
            )

    @property
    def tokens(self) -> list[int]:
        return self.ids

    @property
    def verified(self) -> list[bool]:
        return [status == "verified" for status in self.statuses]

    @property
    def text(self) -> str:
        return self.text_of()

    @property
    def read(self) -> list[int]:
        """What the verifier had read when it said so for the last time, for each time."""
        told = [event for event in self.events if isinstance(event, Progress)]
        return [event.done for event in told if event.done == event.total]

    @property
    def states(self) -> list[str]:
        return [event.state for event in self.events if isinstance(event, Link)]
