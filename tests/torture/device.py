"""A device with a fake verifier that breaks a rule: it must end without loops, and tell a story
that can be true."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_client import EdgeClient
from edge_client.device import Device
from edge_client.events import Token
from moa.errors import MoaError
from tests.edge.reader import Reader
from tests.torture.fake_verifier import BEHAVIOURS, Behaviour, Fake, fake

_TOKENS = 24
_A_SECOND, _AT_ONCE, _A_TOKEN = 5, 10, 4
"""Requests and connections that are no loop. A token may take a connection, a hello, an opening and
a round."""
PROMPT = range(40, 60)


@dataclass
class Told:
    """One turn: what a user was told, and what was wrong with it."""

    behaviour: str = ""
    first_token: float = 0.0
    """Seconds until it was seen, and until the end."""
    seconds: float = 0.0
    tokens: int = 0
    verified: int = 0
    """Those that were verified when they were told."""
    asked: int = 0
    """Requests and connections."""
    megabytes: float = 0.0
    """Growth of the process."""
    answer: list[int] = field(default_factory=list)
    done: str = ""
    problems: list[str] = field(default_factory=list)


async def ask(
    client: EdgeClient, patience: float, tokens: int, prompt: Sequence[int] = PROMPT
) -> Told:
    """Ask for so many tokens. The client must end by itself, with an answer or a word."""
    told = Told()
    transcript = Reader()
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience):
            async for event in client.generate(
                ids=list(prompt), max_new_tokens=tokens, ignore_eos=True
            ):
                transcript.take(event, time.monotonic() - began)
    except TimeoutError:
        told.problems.append(f"did not end within {patience:.0f} s")
    except MoaError as error:
        told.problems += [] if str(error) else ["an error without a word"]
    except Exception as error:  # a story that cannot be true is one of them
        told.problems.append(f"{type(error).__name__}: {error}"[:300])
    told.seconds = time.monotonic() - began
    told.answer = transcript.tokens
    told.first_token = next(iter(transcript.told_at), 0.0)
    told.tokens = len(transcript.told_at)
    told.verified = sum(
        isinstance(one, Token) and one.status == "verified" for one in transcript.events
    )
    if transcript.done is not None:
        told.done = "verified" if transcript.done.verified else "not verified"
    return told


def beside_device(
    behaviour: Behaviour, device: Device
) -> contextlib.AbstractAsyncContextManager[Fake]:
    """A fake verifier with the device's vocabulary."""
    return fake(
        behaviour, range(60, 90), {"vocab_size": device.bundle.manifest.target.facts.vocab_size}
    )


async def beside(behaviour: str, device: Device, patience: float = 60.0) -> Told:
    """Ask for a short answer, whatever the client is told."""
    before = megabytes()
    waits = {
        "settle_seconds": 0.5,
        "offline_after": 0.3,
        "answer_seconds": 5.0,
        "connect_seconds": 3.0,
    }
    async with (
        beside_device(BEHAVIOURS[behaviour], device) as made,
        EdgeClient(device=device, verifier=made.url, **waits) as client,  # type: ignore[arg-type]
    ):
        began = time.monotonic()
        with contextlib.suppress(MoaError):
            await client.wait_online(2.0)
        waited = time.monotonic() - began
        asked_before = made.asked
        told = await ask(client, patience, _TOKENS)
    told.behaviour = behaviour
    told.asked = made.asked
    told.megabytes = megabytes() - before
    if told.tokens > 4 * _TOKENS:
        told.problems.append(f"{told.tokens} tokens for a limit of {_TOKENS}")
    # Each by the time in which it was asked: a turn of 0.8 s is not to pay for what came before it.
    told.problems += _loops(asked_before, waited, verified=0)
    told.problems += _loops(made.asked - asked_before, told.seconds, told.verified)
    return told


def _loops(asked: int, seconds: float, verified: int) -> list[str]:
    """What to say of so many requests and connections, if they are a loop."""
    if asked <= _AT_ONCE + _A_SECOND * seconds + _A_TOKEN * verified:
        return []
    return [f"{asked} requests and connections in {seconds:.1f} s, for {verified} verified tokens"]


def megabytes() -> float:
    """The most that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def demo_device() -> Device:
    """The embedded bundle."""
    return Device.load(threads=1)
