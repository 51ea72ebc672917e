"""The text is the target's own, whatever is drafted, by whomever, next to whichever other sessions."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from cloud_verifier.app import Verifier
from moa.sampling import SamplingSettings
from moa.wire.messages import Sampling
from tests.verifier import kit

COUNT = 16


@dataclasses.dataclass
class Speech:
    """A prompt, and what the target says to it."""

    seed: int
    ids: list[int]
    truth: list[int]
    sampling: SamplingSettings


def _speech(seed: int, family: str = "llama", sampling: SamplingSettings | None = None, count: int = COUNT) -> Speech:
    sampling = sampling or SamplingSettings()
    ids = kit.prompt(seed, random.Random(seed).randrange(1, 60))
    if sampling.plain_greedy:
        truth = kit.generated(ids, count, family=family)
    else:
        truth = kit.reference(ids, count, family=family, sampling=sampling)
    return Speech(seed, ids, truth, sampling)


async def _speak(running: Verifier, speech: Speech) -> None:
    rng = random.Random(speech.seed)
    start = len(speech.ids)
    async with kit.client(running) as edge:
        session = await edge.start(
            speech.ids,
            max_new_tokens=len(speech.truth),
            sampling=Sampling(**dataclasses.asdict(speech.sampling)),
            records="off",
        )
        while not session.finish:
            rest = speech.truth[len(session.log) - start :]
            await edge.advance(session, *kit.random_draft(rng, rest, session.log[-1], rng.randrange(1, 20)))
        assert session.log[start:] == speech.truth
        assert session.finish == ("eos" if speech.truth[-1] == kit.EOS else "length")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize(
    "sampling",
    [SamplingSettings(), SamplingSettings(temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.2, seed=7)],
    ids=["greedy", "sampled"],
)
async def test_eight_sessions_at_once(family: str, sampling: SamplingSettings) -> None:
    speeches = [_speech(seed, family, sampling) for seed in range(8)]
    async with kit.verifier(family=family) as running:
        await asyncio.gather(*(_speak(running, speech) for speech in speeches))


async def test_one_session_alone() -> None:
    speech = _speech(1)
    async with kit.verifier() as running:
        await _speak(running, speech)


async def test_32_sessions_on_8_slots_lose_and_regain_them() -> None:
    speeches = [_speech(seed, count=6) for seed in range(32)]
    limits = dataclasses.replace(kit.LIMITS, idle_seconds=1e-6, busy_retry_seconds=0.01)
    async with kit.verifier(dataclasses.replace(kit.SETTINGS, limits=limits)) as running:
        await asyncio.gather(*(_speak(running, speech) for speech in speeches))
        page = running.metrics.page().decode()
    assert 'moa_session_evictions_total{reason="slot_needed"}' in page


def test_the_reference_is_the_library_itself() -> None:
    assert kit.reference(kit.prompt(0, 9), COUNT) == kit.generated(kit.prompt(0, 9), COUNT)
