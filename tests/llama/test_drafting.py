"""A small model in a GGUF file that drafts at the server: what it drafts is what it would say by
itself, whatever was drafted and rejected before; and it changes no text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from moa.drafters.contract import DraftRequest
from moa.errors import FullError, UsageError
from moa.llama.drafting import LlamaDrafting
from moa.llama.target import LlamaTarget
from moa.sampling import SamplingSettings, choose
from moa.target.contract import LoadOptions, Node
from moa.target.registry import open_target
from moa.target.rows import Row
from moa.tree import TreeShape
from moa.wire.limits import Limits
from moa.wire.messages import Sampling
from testing import gguf_tiny
from testing.tiny import tiny
from tests.verifier import kit

OPTIONS = LoadOptions(slots=3, capacity=160, threads=1)
CHAIN = TreeShape.chain(6, min_score=-1000.0)
GREEDY = SamplingSettings()
SAMPLED = SamplingSettings(temperature=0.8, seed=3)


@pytest.fixture(autouse=True)
def llama_is_installed() -> None:
    gguf_tiny.need_llama()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return gguf_tiny.save(tiny("llama"), tmp_path / "small.gguf")


@pytest.fixture
def truth(file: Path) -> Iterator[LlamaTarget]:
    target = open_target(str(file), OPTIONS)
    assert isinstance(target, LlamaTarget)
    yield target
    target.close()


@pytest.fixture
def alike(file: Path) -> Iterator[LlamaTarget]:
    """The same file with the same numbers: a drafter's batches and values are llama.cpp's own."""
    target = open_target(str(file), replace(OPTIONS, exact=False))
    assert isinstance(target, LlamaTarget)
    yield target
    target.close()


def drafting_of(file: Path, truth: LlamaTarget) -> LlamaDrafting:
    return LlamaDrafting.load(file, truth.facts, OPTIONS)


def said(truth: LlamaTarget, ids: list[int], count: int, sampling: SamplingSettings) -> list[int]:
    """What the same file says by itself, by the target's own rule."""
    slot = truth.cache.acquire()
    log = list(ids)
    new = log
    for _ in range(count):
        step = truth.forward([Row.chain(slot, new)])
        truth.commit(step, 0, range(len(new)))
        new = [choose(step.host_logits([Node(0, -1)])[0], sampling, len(log))]
        log += new
    truth.cache.release(slot)
    return log[len(ids) :]


def drafted(drafting: LlamaDrafting, slot: int, pending: int, sampling: Any) -> list[int]:
    (tree,) = drafting.draft([DraftRequest(slot, pending, CHAIN, sampling)])
    assert tree.parents == list(range(-1, len(tree) - 1))
    return tree.tokens[1:]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_it_drafts_what_it_would_say_itself(
    file: Path, alike: LlamaTarget, sampling: SamplingSettings
) -> None:
    drafting = drafting_of(file, alike)
    ids = kit.prompt(1, 40)
    slot = drafting.open()
    drafting.read(slot, ids[:-1])
    assert drafting.known(slot) == 39
    assert drafted(drafting, slot, ids[-1], sampling) == said(alike, ids, 6, sampling)


def test_random_histories_of_rejected_drafts_leave_nothing_behind(
    file: Path, alike: LlamaTarget
) -> None:
    drafting = drafting_of(file, alike)
    rng = random.Random(4)
    for _ in range(40):
        slots = [drafting.open() for _ in range(rng.randrange(1, 4))]
        texts = {slot: kit.prompt(rng.randrange(1000), rng.randrange(2, 60)) for slot in slots}
        for slot in slots:
            drafting.read(slot, texts[slot][:-1])
        for _ in range(rng.randrange(1, 5)):
            some = rng.sample(slots, rng.randrange(1, len(slots) + 1))
            trees = drafting.draft(
                [DraftRequest(slot, texts[slot][-1], CHAIN, GREEDY) for slot in some]
            )
            for slot, tree in zip(some, trees, strict=True):
                kept = tree.tokens[1 : 1 + rng.randrange(0, 7)]
                more = [texts[slot][-1], *kept]
                texts[slot] += [*kept, rng.randrange(4, 120)]
                drafting.read(slot, more)
        slot = slots[0]
        expected = said(alike, texts[slot], 6, GREEDY)
        assert drafted(drafting, slot, texts[slot][-1], GREEDY) == expected
        for slot in slots:
            drafting.close(slot)
    slots = [drafting.open() for _ in range(3)]
    assert not drafting.free
    with pytest.raises(FullError):
        drafting.open()


def test_it_drafts_nothing_where_its_context_ends(file: Path, truth: LlamaTarget) -> None:
    drafting = drafting_of(file, truth)
    slot = drafting.open()
    drafting.read(slot, kit.prompt(2, 156))
    assert drafted(drafting, slot, 9, GREEDY) == []
    drafting.read(slot, kit.prompt(3, 100))
    assert drafted(drafting, slot, 9, GREEDY) == []


def test_a_model_of_another_tokenizer_is_refused(tmp_path: Path, truth: LlamaTarget) -> None:
    other = gguf_tiny.save(tiny("llama", vocab_size=120), tmp_path / "other.gguf")
    with pytest.raises(UsageError, match="cannot draft: it has another tokenizer"):
        LlamaDrafting.load(other, truth.facts, OPTIONS)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
async def test_a_stream_says_the_targets_text_and_drafts_are_taken(
    file: Path, truth: LlamaTarget, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and drafter are the same file: every draft is right."""
    kit.draft_in_every_round(monkeypatch)
    settings = Settings(
        target=str(file),
        server_drafter=str(file),
        threads=1,
        slots=2,
        port=0,
        limits=Limits(
            max_context_tokens=120, max_prompt_tokens=100, max_guess_tokens=16, max_tree_nodes=16
        ),
    )
    served = load(settings)
    assert served.drafts == "small.gguf"
    wanted = SamplingSettings(temperature=sampling.temperature, seed=sampling.seed)
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        ids = kit.prompt(3, 30)
        session = await edge.start(ids, max_new_tokens=40, ignore_eos=True, sampling=sampling)
        while not session.finish:
            await edge.stream(session)
        assert session.log[len(ids) :] == said(truth, ids, 40, wanted)
        accepted = kit.metric(running, "moa_spec_decode_num_accepted_tokens_total")
        assert accepted > 20
    np.testing.assert_equal(len(session.log), 70)
