"""The text is the target's own: greedy and sampled, device- and server-drafted, over good, bad and
cut links."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.tools.emulated_network import PROFILES
from moa.sampling import SamplingSettings
from testing.tiny import EOS
from tests.edge import kit
from tests.edge.cutting import CuttingLink
from tests.edge.reader import Reader
from tests.verifier import kit as verifier_kit

COUNT = 40
WAYS: dict[str, dict[str, Any]] = {
    "device": {"draft": "device", "guess_ahead": False},
    "server": {"draft": "server"},
    "auto": {"draft": "auto", "guess_ahead": False},
    "device, guessing ahead": {"draft": "device", "guess_ahead": True},
    "auto, guessing ahead": {"draft": "auto", "guess_ahead": True},
}
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3}


def truth(ids: list[int], **sampling: Any) -> list[int]:
    return verifier_kit.generated(ids, COUNT, SamplingSettings(**sampling))


PENALIZED = {
    "temperature": 0.0,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "logit_bias": ((5, 3.0), (9, -100.0)),
}


@pytest.mark.parametrize("way", WAYS)
async def test_penalties_and_biases_are_exact_and_drafted_for(way: str) -> None:
    """Prompts of more than one turn: only the answer's own tokens are counted."""
    async with kit.verifier() as running:
        ids = verifier_kit.prompt(3, 12)
        expected = truth(ids, **PENALIZED)
        assert expected != truth(ids)
        settings = {**WAYS[way], "max_new_tokens": COUNT, **PENALIZED}
        device = kit.oracle([*ids, *expected], seed=3)
        async with (
            EdgeClient(verifier=running.transport.url, device=device, **settings) as client,
            client.conversation() as conversation,
        ):
            for _ in range(2):
                reader = Reader(ids)
                async for event in conversation.generate(ids=ids):
                    reader.take(event)
                assert reader.tokens == expected
                assert all(reader.verified)
                ids = [*ids, *expected, *verifier_kit.prompt(4, 5)]
                expected = truth(ids, **PENALIZED)


async def test_a_device_alone_keeps_to_penalties_and_biases() -> None:
    """They are in what the drafter's graph adds to its logits."""
    ids = verifier_kit.prompt(3, 12)
    async with EdgeClient(device=kit.device(), max_new_tokens=24) as client:
        plain = (await kit.transcribe(client, ids)).tokens
        first = plain[0]
        banned = await kit.transcribe(client, ids, logit_bias=((first, -100.0),))
        assert first not in banned.tokens
        spread = await kit.transcribe(client, ids, frequency_penalty=2.0, presence_penalty=2.0)
    assert max(map(spread.tokens.count, spread.tokens)) < max(map(plain.count, plain))


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
async def test_over_a_good_link(way: str, sampling: dict[str, Any]) -> None:
    """Each way greedy and sampled, once with records and once without."""
    sync = "int4" if (list(WAYS).index(way) + bool(sampling)) % 2 else "off"
    async with kit.verifier() as running:
        for seed in range(2):
            ids = verifier_kit.prompt(seed, 12)
            expected = truth(ids, **sampling)
            settings = {**WAYS[way], "sync": sync, "max_new_tokens": COUNT, **sampling}
            device = kit.device() if seed == 0 else kit.oracle([*ids, *expected], seed=seed)
            async with EdgeClient(
                verifier=running.transport.url, device=device, **settings
            ) as client:
                reader = await kit.transcribe(client, ids)
            assert reader.tokens == expected
            assert all(reader.verified)
            assert reader.done is not None
            assert reader.done.reason == ("eos" if expected[-1] == EOS else "length")


@pytest.mark.parametrize("draft", ["device", "server"])
async def test_one_connection_serves_one_conversation_after_another(draft: Any) -> None:
    async with kit.linked(draft=draft, guess_ahead=False, max_new_tokens=COUNT) as (
        client,
        _,
        link,
    ):
        for seed in range(3):
            ids = verifier_kit.prompt(seed, 12)
            reader = await kit.transcribe(client, ids)
            assert reader.tokens == truth(ids)
            assert reader.done is not None
            assert reader.done.stats["offline_tokens"] == 0, (
                "the session must be opened without a reconnection"
            )
        assert link.connections == 1


async def test_more_conversations_than_the_verifier_has_slots() -> None:
    """Its opening is refused for a while, and so is the round that was sent right behind it."""

    async def converse(seed: int) -> None:
        ids = verifier_kit.prompt(seed, 12)
        device = kit.oracle([*ids, *truth(ids)])
        how = {"draft": "device", "max_new_tokens": COUNT, "offline_after": 20.0}
        async with EdgeClient(verifier=running.transport.url, device=device, **how) as client:
            assert (await kit.transcribe(client, ids)).tokens == truth(ids)

    async with kit.verifier(dataclasses.replace(verifier_kit.SETTINGS, slots=1)) as running:
        await asyncio.gather(*(converse(seed) for seed in range(3)))


@pytest.mark.parametrize(
    ("way", "profile"),
    [
        ("device", "4g-weak"),
        ("server", "5g"),
        ("device, guessing ahead", "5g"),
        ("auto, guessing ahead", "4g-weak"),
    ],
)
async def test_over_a_bad_link(way: str, profile: str) -> None:
    ids = verifier_kit.prompt(5, 12)
    expected = truth(ids)
    device = kit.oracle([*ids, *expected])
    async with kit.linked(device, PROFILES[profile], max_new_tokens=COUNT, **WAYS[way]) as (
        client,
        _,
        _,
    ):
        reader = await kit.transcribe(client, ids)
    assert reader.tokens == expected
    assert all(reader.verified)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "auto"])
async def test_cuts_at_random_bytes_change_nothing(way: str) -> None:
    rng = random.Random(0)
    wanted = 6
    async with (
        kit.verifier() as running,
        CuttingLink(running.transport.port, seed=0) as link,
    ):
        # What a connection carries depends on timing, and so does how many answers it takes.
        for run in range(20 * wanted):
            if link.cuts >= wanted:
                break
            sampling = SAMPLED if run % 2 else {}
            ids = verifier_kit.prompt(run, 12)
            expected = truth(ids, **sampling)
            device = kit.oracle([*ids, *expected], rng.choice([0.5, 0.9]), seed=run)
            settings = kit.FAST | {**WAYS[way], "max_new_tokens": COUNT, **sampling}
            async with EdgeClient(verifier=link.url, device=device, **settings) as client:
                reader = await kit.transcribe(client, ids)
            assert reader.tokens == expected, (run, way)
            assert all(reader.verified)
        assert link.cuts >= wanted
