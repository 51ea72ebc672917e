"""A normal client beside a hostile one: it keeps asking, checks every token, and measures each answer."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from moa.wire import ClientSession, Refused
from moa.wire.events import Advanced, Ready
from moa.wire.messages import Ack, Activations
from tests.torture.raw import Raw, binary

PROMPT = list(range(40, 56))
TOKENS = 200


@dataclass
class Watched:
    """The neighbour's measurements."""

    seconds: list[float] = field(default_factory=list)
    """Of each round, from asking to the verdict."""
    texts: list[list[int]] = field(default_factory=list)
    admitted: float = 0.0
    """Seconds from the first asking until it was let in, with a session."""

    def percentile(self, share: float) -> float:
        """Milliseconds that this share of the rounds took at most."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")

    @property
    def p50(self) -> float:
        """Median, in milliseconds."""
        return 1000 * statistics.median(self.seconds) if self.seconds else float("inf")


async def neighbour(port: int, token: str, seconds: float) -> Watched:
    """Ask for that long, one round after another; a text is `TOKENS` long, then comes the next session."""
    began, watched = time.monotonic(), Watched()
    raw = await Raw.greeted(port, token)
    received = 0
    while time.monotonic() - began < seconds:
        session = ClientSession(list(PROMPT), max_new_tokens=TOKENS, ignore_eos=True)
        raw.write(binary(session.open()))
        asked = time.monotonic()
        while not session.finish and time.monotonic() - began < seconds:
            message = await raw.message()
            if isinstance(message, Activations):
                received += len(message.payload)
                raw.write(binary(Ack(received)))
            if getattr(message, "session", b"") != session.id:
                continue
            event = session.receive(message)  # type: ignore[arg-type]
            if isinstance(event, Refused):
                if not event.retry:
                    raise AssertionError(f"refused: {event.error}")
                await asyncio.sleep(event.retry_after)
                for again in session.unsettled:
                    raw.write(binary(again))
                continue
            if isinstance(event, Advanced):
                watched.admitted = watched.admitted or time.monotonic() - began
                watched.seconds.append(time.monotonic() - asked)
            if isinstance(event, Ready | Advanced) and not session.finish:
                asked = time.monotonic()
                raw.write(binary(session.verify([session.log[-1]])))
        watched.texts.append(session.log[len(PROMPT) :])
        raw.write(binary(session.close()))
    await raw.gone()
    return watched


def same_text(texts: Sequence[Sequence[int]]) -> bool:
    """Whether all are beginnings of one text."""
    longest = max(texts, key=len, default=[])
    return all(list(text) == list(longest[: len(text)]) for text in texts)
