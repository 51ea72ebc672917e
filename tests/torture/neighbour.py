"""A normal client beside a hostile one: it keeps asking, checks every token, and measures each answer."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field

from moa.wire import ClientSession, Refused
from moa.wire.events import Advanced, Ready
from moa.wire.messages import Ack, Activations
from tests.torture.history import Entry, Finished, Opened, Verified, violations
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
    entries: list[Entry] = field(default_factory=list)
    """What it was told, for the checker of histories."""

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
        name = session.id.hex()
        watched.entries.append(Opened(name, list(PROMPT)))
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
                watched.entries.append(Verified(name, event.base + 1, list(event.tokens)))
            if isinstance(event, Ready | Advanced) and not session.finish:
                asked = time.monotonic()
                raw.write(binary(session.verify([session.log[-1]])))
        watched.texts.append(session.log[len(PROMPT) :])
        watched.entries.append(Finished(name, list(session.log)))
        raw.write(binary(session.close()))
    await raw.gone()
    return watched


def problems(*seen: Watched) -> list[str]:
    """What is wrong with what was told: each story must be possible, and all texts beginnings of one."""
    found = [problem for watched in seen for problem in violations(watched.entries)]
    texts = [text for watched in seen for text in watched.texts]
    longest = max(texts, key=len, default=[])
    if any(text != longest[: len(text)] for text in texts):
        found.append("the neighbour's text changed")
    return found
