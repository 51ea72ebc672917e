"""The text is the target's own, for any drafts and any other sessions in the batch.

The reference is the library's `generate` on an unmodified model. A sampled token is a fixed
function of the logits, so there the truth is what that function makes of `generate`'s own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from cloud_verifier.app import Verifier
from cloud_verifier.model import load
from moa.demo import paths
from moa.sampling import SamplingSettings
from moa.wire_sampling import wire_sampling
from testing.tiny import tiny
from tests.verifier import kit

EMBEDDED = "embedded"
FAMILIES = ("llama", "qwen3", "mistral", "gemma3", EMBEDDED)
COUNT = 12
GREEDY = SamplingSettings()
SAMPLED = SamplingSettings(temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.2, seed=7)
SETTINGS = dataclasses.replace(kit.SETTINGS, slots=32, device="cpu")


@dataclasses.dataclass
class Speech:
    """A prompt, and what the target says to it."""

    seed: int
    vocab: int
    ids: list[int]
    truth: list[int]
    sampling: SamplingSettings
    ended: bool
    """Whether the last token is one that ends a turn."""


@cache
def library(family: str) -> Any:
    """The model as the library knows it."""
    if family == EMBEDDED:
        return AutoModelForCausalLM.from_pretrained(
            paths().target, dtype="float32", trust_remote_code=False
        ).eval()
    return tiny(family)


@cache
def speech(
    seed: int, family: str = "llama", sampling: SamplingSettings = GREEDY, count: int = COUNT
) -> Speech:
    """A prompt of its own length, the same for every test."""
    model = library(family)
    ids = kit.prompt(seed, random.Random(seed).randrange(1, 60), model.config.vocab_size)
    truth = kit.generate(model, ids, count, sampling)
    ended = truth[-1] == model.generation_config.eos_token_id
    return Speech(seed, model.config.vocab_size, ids, truth, sampling, ended)


async def speak(running: Verifier, one: Speech, order: random.Random) -> None:
    """One client from prompt to end, by random trees at random moments; every other one gets
    records along with it."""
    rng = random.Random(one.seed)
    start = len(one.ids)
    sampling, penalties = wire_sampling(one.sampling)
    await asyncio.sleep(order.random() * 0.02)
    async with kit.client(running) as edge:
        session = await edge.start(
            one.ids,
            patient=True,
            max_new_tokens=len(one.truth),
            sampling=sampling,
            penalties=penalties,
            records="int8" if one.seed % 2 else "off",
        )
        while not session.finish:
            rest = one.truth[len(session.log) - start :]
            draft = kit.random_draft(rng, rest, session.log[-1], rng.randrange(1, 20), one.vocab)
            await edge.advance(session, *draft)
            await asyncio.sleep(order.random() * 0.005)
        assert session.log[start:] == one.truth
        assert session.finish == ("eos" if one.ended else "length")


async def all_at_once(running: Verifier, said: Sequence[Speech]) -> None:
    """All of them, in an order that changes from test to test and not from run to run.

    The first forward waits until two more rounds are queued, so that some share a batch on a machine
    of any speed.
    """
    order = random.Random(len(said))
    speakers = asyncio.gather(
        *(speak(running, one, order) for one in order.sample(said, len(said)))
    )
    if len(said) > 1:
        with kit.held_forward(running) as (entered, release):
            assert await asyncio.to_thread(entered.wait, kit.PATIENCE)
            await kit.until(lambda: running.work.queued > 1)
            release.set()
            await speakers
    await speakers


@pytest.mark.parametrize(
    ("family", "sampling"),
    [*((family, SAMPLED) for family in FAMILIES), ("llama", GREEDY), (EMBEDDED, GREEDY)],
    ids=lambda one: one if isinstance(one, str) else "sampled" if one.temperature else "greedy",
)
async def test_sessions_alone_and_together_are_told_what_the_library_says(
    family: str, sampling: SamplingSettings
) -> None:
    own = kit.served(SETTINGS, family=family) if family != EMBEDDED else load(SETTINGS)
    async with Verifier(own, SETTINGS).open() as running:
        assert sampling == GREEDY or speech(0, family, sampling).truth != speech(0, family).truth
        for sessions in (1, 8, 32) if family == "llama" else (1, 8):
            await all_at_once(running, [speech(seed, family, sampling) for seed in range(sessions)])
    alone, batches = (
        kit.metric(running, f"moa_batch_rows_{of}") for of in ('bucket{le="1.0"}', "count")
    )
    assert alone < batches, "some of them ran together"


async def test_32_sessions_on_8_slots_lose_and_regain_them() -> None:
    async with kit.verifier(kit.limited(idle_seconds=1e-6, busy_retry_seconds=0.01)) as running:
        await all_at_once(running, [speech(seed, count=6) for seed in range(32)])
        page = running.metrics.page().decode()
    assert 'moa_session_evictions_total{reason="slot_needed"}' in page
