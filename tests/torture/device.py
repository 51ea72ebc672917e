"""A device with a fake verifier that breaks a rule: it must end without loops and with a consistent history."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass

from edge_client import EdgeClient
from edge_client.device import Device
from edge_client.events import Adopt, Confirm, Done, Event, Prompt, Retract, Token
from edge_client.turn.controller import WhoDrafts
from moa.errors import MoaError
from tests.torture.fake_verifier import BEHAVIOURS, fake
from tests.torture.history import Entry, Finished, Opened, Provisional, Resolved, Verified, violations

_TOKENS = 24
_A_SECOND, _AT_ONCE = 5, 10
PROMPT = tuple(range(40, 60))

PROGRESS = frozenset(
    name
    for name in BEHAVIOURS
    if name.startswith(
        ("honest", "forward", "activations", "notices", "huge", "opened twice", "records", "text frames")
    )
)
"""Behaviours beside which tokens are still won: there the client may ask as fast as it is answered."""


@dataclass(frozen=True)
class Outcome:
    """The result."""

    behaviour: str
    seconds: float
    asked: int
    """Requests and connections."""
    tokens: int
    first_token: float
    """Seconds until it was seen."""
    verified: bool
    megabytes: float
    """Growth of the process."""
    problems: tuple[str, ...]

    def row(self) -> str:
        """One line of a table."""
        return (
            f"| {self.behaviour} | {self.first_token:.1f} | {self.seconds:.1f} | {self.asked} | {self.tokens} "
            f"| {'yes' if self.verified else 'no'} | {self.megabytes:.0f} | {'; '.join(self.problems) or '-'} |"
        )


def story(events: Iterable[Event]) -> list[Entry]:
    """What a user was told, as the checker of histories reads it."""
    entries: list[Entry] = []
    log: dict[int, int] = {}
    for event in events:
        match event:
            case Prompt():
                log = dict(enumerate(event.ids))
                entries.append(Opened("turn", list(event.ids)))
            case Token():
                log[event.position] = event.id
                kind = Verified if event.status == "verified" else Provisional
                entries.append(kind("turn", event.position, [event.id]))
            case Confirm():
                entries.append(Resolved("turn", "confirmed", event.stop - event.start))
            case Adopt():
                entries.append(Resolved("turn", "adopted", event.stop - event.start))
            case Retract():
                log = {position: token for position, token in log.items() if position < event.start}
                entries.append(Resolved("turn", "retracted", event.stop - event.start))
            case Done(verified=True):
                entries.append(Finished("turn", [log[position] for position in sorted(log)]))
            case _:
                pass
    return entries


async def beside(behaviour: str, device: Device, patience: float = 60.0, draft: WhoDrafts = "auto") -> Outcome:
    """Ask for a short answer; the client must end by itself, whatever it is told."""
    before, problems, events = _megabytes(), list[str](), list[Event]()
    first_token = 0.0
    welcome = {"vocab_size": device.bundle.manifest.target.facts.vocab_size}
    async with fake(BEHAVIOURS[behaviour], tuple(range(60, 90)), welcome) as made:
        began = time.monotonic()
        waits = {"settle_seconds": 0.5, "offline_after": 0.3, "answer_seconds": 5.0, "connect_seconds": 3.0}
        try:
            async with asyncio.timeout(patience):
                async with EdgeClient(device=device, verifier=made.url, draft=draft, **waits) as client:  # type: ignore[arg-type]
                    with contextlib.suppress(MoaError):
                        await client.wait_online(2.0)
                    turn = client.generate(ids=list(PROMPT), max_new_tokens=_TOKENS, ignore_eos=True)
                    began = time.monotonic()
                    async for event in turn:
                        events.append(event)
                        if isinstance(event, Token) and not first_token:
                            first_token = time.monotonic() - began
        except TimeoutError:
            problems.append(f"did not end within {patience:.0f} s")
        except MoaError as error:
            problems += [] if str(error) else ["an error without a word"]
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}"[:200])
        seconds = time.monotonic() - began
    tokens = sum(isinstance(event, Token) for event in events)
    if tokens > 4 * _TOKENS:
        problems.append(f"{tokens} tokens for a limit of {_TOKENS}")
    asked = len(made.seen.requests) + len(made.seen.connections)
    if behaviour not in PROGRESS and asked > _AT_ONCE + _A_SECOND * seconds:
        problems.append(f"{asked} requests and connections in {seconds:.1f} s, without progress")
    problems += violations(story(events))[:3]
    done = next((event for event in events if isinstance(event, Done)), None)
    return Outcome(
        behaviour=behaviour,
        seconds=seconds,
        asked=asked,
        tokens=tokens,
        first_token=first_token,
        verified=done is not None and done.verified,
        megabytes=max(0.0, _megabytes() - before),
        problems=tuple(problems),
    )


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def demo_device() -> Device:
    """The embedded bundle."""
    return Device.load(threads=1)
