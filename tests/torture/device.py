"""A device with a fake verifier that breaks a rule: it must end without loops, and tell a story that can be true."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

from edge_client import EdgeClient
from edge_client.device import Device
from edge_client.events import Token
from edge_client.turn.controller import WhoDrafts
from moa.errors import MoaError
from tests.edge.reader import Reader
from tests.torture.fake_verifier import BEHAVIOURS, Behaviour, Fake, fake

_TOKENS = 24
_A_SECOND, _AT_ONCE = 5, 10
PROMPT = range(40, 60)

PROGRESS = ("honest", "forward", "activations", "notices", "huge", "opened twice", "records", "text frames", "log-prob")
"""Behaviours that begin so still win tokens: there the client may ask as fast as it is answered."""


class Told:
    """One turn: what a user was told, how long it took, and what was wrong with it."""

    def __init__(self) -> None:
        self.transcript, self.problems = Reader(), list[str]()
        self.tokens = self.verified = 0
        self.first_token = self.seconds = 0.0

    async def ask(self, client: EdgeClient, patience: float, tokens: int, prompt: Sequence[int] = PROMPT) -> Told:
        """Ask for so many tokens. The client must end by itself, with an answer or a word."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                async for event in client.generate(ids=list(prompt), max_new_tokens=tokens, ignore_eos=True):
                    if isinstance(event, Token):
                        self.first_token = self.first_token or time.monotonic() - began
                        self.tokens += 1
                        self.verified += event.status == "verified"
                    self.transcript.take(event)
        except TimeoutError:
            self.problems.append(f"did not end within {patience:.0f} s")
        except MoaError as error:
            self.problems += [] if str(error) else ["an error without a word"]
        except Exception as error:  # a story that cannot be true is one of them
            self.problems.append(f"{type(error).__name__}: {error}"[:300])
        self.seconds = time.monotonic() - began
        return self


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
    problems: list[str]


def beside_device(behaviour: Behaviour, device: Device) -> contextlib.AbstractAsyncContextManager[Fake]:
    """A fake verifier with the device's vocabulary."""
    return fake(behaviour, range(60, 90), {"vocab_size": device.bundle.manifest.target.facts.vocab_size})


async def beside(behaviour: str, device: Device, patience: float = 60.0, draft: WhoDrafts = "auto") -> Outcome:
    """Ask for a short answer, whatever the client is told."""
    before = megabytes()
    async with (
        beside_device(BEHAVIOURS[behaviour], device) as made,
        EdgeClient(
            device=device,
            verifier=made.url,
            draft=draft,
            settle_seconds=0.5,
            offline_after=0.3,
            answer_seconds=5.0,
            connect_seconds=3.0,
        ) as client,
    ):
        with contextlib.suppress(MoaError):
            await client.wait_online(2.0)
        told = await Told().ask(client, patience, _TOKENS)
    problems, done = told.problems, told.transcript.done
    if told.tokens > 4 * _TOKENS:
        problems.append(f"{told.tokens} tokens for a limit of {_TOKENS}")
    if not behaviour.startswith(PROGRESS) and made.asked > _AT_ONCE + _A_SECOND * told.seconds:
        problems.append(f"{made.asked} requests and connections in {told.seconds:.1f} s, without progress")
    return Outcome(
        behaviour=behaviour,
        seconds=told.seconds,
        asked=made.asked,
        tokens=told.tokens,
        first_token=told.first_token,
        verified=done is not None and done.verified,
        megabytes=max(0.0, megabytes() - before),
        problems=problems,
    )


def megabytes() -> float:
    """The most that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def demo_device() -> Device:
    """The embedded bundle."""
    return Device.load(threads=1)
