"""A verifier that sends fuzzed messages before, after and instead of the right answers.

The pauses between two dials are shortened, or the connections that a broken message ends would take
days: that a device does not loop is shown beside the fakes of `device.py`, with the pauses it has.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from unittest import mock

from edge_client import EdgeClient
from edge_client.device import Device
from edge_client.link import websocket
from edge_client.link.retry import Retry
from moa.wire import Refusal, decode_server, encode
from moa.wire.messages import ClientMessage, Hello, Message, ServerMessage
from tests.torture.device import ask, beside_device
from tests.torture.fake_verifier import Behaviour, Reply
from tests.torture.fuzz import Fuzzer

_TOKENS = 16
_TURN_SECONDS = 300.0
_HASTY = {
    "settle_seconds": 0.05,
    "offline_after": 0.05,
    "answer_seconds": 0.5,
    "connect_seconds": 1.0,
}


class _Eager(Retry):
    """Dials again at once, whatever it was asked."""

    def failed(self, now: float, *, asked_wait: float = 0.0) -> None:
        """An attempt failed."""
        self.not_before = now + 0.01


def saying_anything(seed: int, counts: Counter[str]) -> Behaviour:
    """A behaviour that fuzzes; what it sent is counted."""
    rng = random.Random(seed)
    fuzzer = Fuzzer(seed, kinds=ServerMessage)

    def behave(message: ClientMessage, right: list[Message]) -> Sequence[Reply]:
        if isinstance(message, Hello) and rng.random() < 0.9:
            return right
        round = getattr(message, "round", 0)
        base = getattr(message, "base", 0)
        fuzzer.about(
            getattr(message, "session", bytes(16)),
            round=round,
            base=base,
            start=base,
            length=base + 1,
        )
        replies: list[Reply] = [_one(fuzzer, rng) for _ in range(rng.choice([0, 1, 4, 12]))]
        replies += [
            fuzzer.mutated(encode(one)) if rng.random() < 0.05 else one
            for one in right
            if rng.random() < 0.97
        ]
        replies += [_one(fuzzer, rng) for _ in range(rng.choice([0, 1, 4, 12]))]
        counts["sent"] += len(replies)
        return replies

    return behave


def _one(fuzzer: Fuzzer, rng: random.Random) -> bytes:
    """Mostly one that can be read: another ends the connection, and with it what could be found
    behind it."""
    while True:
        made = fuzzer.message()
        try:
            decode_server(made)
        except Refusal:
            if rng.random() < 0.99:
                continue
        return made


async def fuzz_device(
    device: Device, messages: int, seed: int, *, lanes: int = 4
) -> tuple[Counter[str], list[str]]:
    """So many messages to devices that want answers, one turn after the other on each lane."""
    counts = Counter[str]()
    wrong = list[str]()
    seeds = random.Random(seed)

    def decode(frame: bytes) -> ServerMessage:
        counts["messages"] += 1
        message = decode_server(frame)
        counts[type(message).__name__] += 1
        return message

    with mock.patch.object(websocket, "decode_server", decode):
        await asyncio.gather(
            *(_lane(device, messages, seeds.getrandbits(60), counts, wrong) for _ in range(lanes))
        )
    return counts, wrong


async def _lane(
    device: Device, messages: int, seed: int, counts: Counter[str], wrong: list[str]
) -> None:
    async with (
        beside_device(saying_anything(seed, counts), device) as made,
        EdgeClient(device=device, verifier=made.url, **_HASTY) as client,  # type: ignore[arg-type]
    ):
        link = client.link
        assert link is not None
        link.dialling.retry = _Eager(0.01, 0.01)
        while counts["messages"] < messages:
            told = await ask(client, _TURN_SECONDS, _TOKENS)
            counts["turns"] += 1
            counts["verified"] += told.verified
            if told.verified > _TOKENS:
                told.problems.append(f"{told.verified} tokens for a limit of {_TOKENS}")
            wrong += [f"seed {seed}, turn {counts['turns']}: {one}" for one in told.problems]
        counts["connections"] += link.connections
