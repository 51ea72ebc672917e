"""Exactness is the product: speculative text is the target's own, greedy or sampled, whatever is
drafted."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.drafters.body_drafting import BodyDrafting
from moa.errors import FullError, UsageError
from moa.sampling import SamplingSettings
from moa.target.torch_target import Target
from moa.tree import TreeShape
from testing.speculator import GenerationSettings, Speculator
from testing.tiny import FAMILIES, save_tiny, tiny
from tests.verifier.kit import generate

SHAPES = {"tree": TreeShape(), "chain": TreeShape.chain(4)}
LENGTHS = (1, 2, 17, 60)


def prompts_of(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(n)] for n in lengths]


def speculator(target: Target, tli: int = 0) -> Speculator:
    """A drafter with random weights: it is sometimes right."""
    drafter = new_attention(
        AttentionConfig.for_target(target.facts, tli=tli, final_state=True), target.model
    )
    torch.manual_seed(0)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)
    drafting = BodyDrafting(
        drafter.eval(), slots=target.cache.slots, capacity=target.cache.capacity
    )
    return Speculator(target, drafting)


def generated(family: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The result of `transformers` itself."""
    reference = tiny(family)
    reference.set_attn_implementation("eager")  # its sdpa drops Gemma 2's soft cap
    return [generate(reference, prompt, count) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    prompts = prompts_of(LENGTHS)
    wanted = generated(family, prompts, 16)
    for tli, slots, shape in (
        (0, 4, SHAPES["tree"]),
        (0, 1, SHAPES["chain"]),
        (3, 4, SHAPES["tree"]),
    ):
        engine = speculator(Target.from_model(tiny(family), slots=slots, capacity=128), tli)
        out = engine.generate(prompts, GenerationSettings(max_new_tokens=16, shape=shape))
        assert [o.ids for o in out] == wanted, (tli, slots, shape)
        assert engine.target.cache.free == slots, "every slot is given back"


def test_long_prompts() -> None:
    prompts = prompts_of((511, 512, 513))
    wanted = generated("llama", prompts, 8)
    engine = speculator(
        Target.from_model(tiny("llama", max_position_embeddings=1024), slots=2, capacity=640)
    )
    assert [o.ids for o in engine.generate(prompts, GenerationSettings(max_new_tokens=8))] == wanted


@pytest.fixture(scope="module")
def engine() -> Speculator:
    return speculator(Target.from_model(tiny("llama"), slots=4, capacity=128))


@pytest.mark.parametrize("seed", range(8))
def test_sampled_text_does_not_depend_on_speculation(engine: Speculator, seed: int) -> None:
    prompts = prompts_of((1, 9), seed)
    sampling = SamplingSettings(
        temperature=random.Random(seed).choice([0.5, 1.0, 1.7]),
        top_p=random.Random(seed + 1).choice([1.0, 0.8]),
        top_k=random.Random(seed + 2).choice([0, 20]),
        repetition_penalty=random.Random(seed + 3).choice([1.0, 1.2]),
        seed=seed,
    )

    def ids(shape: TreeShape | None) -> list[list[int]]:
        settings = GenerationSettings(max_new_tokens=12, sampling=sampling, shape=shape)
        return [o.ids for o in engine.generate(prompts, settings)]

    plain = ids(None)
    assert ids(SHAPES["tree"]) == plain
    assert ids(SHAPES["chain"]) == plain


def test_the_same_noise_makes_a_drafter_agree_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hot enough for the noise to matter beside the logits of two models that have nothing to do
    # with each other.
    engine = speculator(Target.from_model(tiny("llama"), slots=4, capacity=128))
    monkeypatch.setattr("moa.sampling.MAX_TEMPERATURE", 8.0)
    sampling = SamplingSettings(temperature=8.0, seed=5)
    settings = GenerationSettings(
        max_new_tokens=40, sampling=sampling, shape=TreeShape.chain(4), ignore_eos=True
    )

    def acceptance() -> float:
        return float(
            np.mean(
                [
                    o.acceptance_length
                    for o in engine.generate(prompts_of((9, 20, 30, 40)), settings)
                ]
            )
        )

    coupled = acceptance()
    other_noise = BodyDrafting._noise
    monkeypatch.setattr(
        BodyDrafting, "_noise", lambda self, level: other_noise(self, level).flip(-1)
    )
    assert coupled > 1.08 * acceptance()


def test_more_prompts_than_slots_are_all_served_and_counted(engine: Speculator) -> None:
    prompts = prompts_of(tuple(range(1, 8)))
    settings = GenerationSettings(max_new_tokens=6, ignore_eos=True)
    together = engine.generate(prompts, settings)
    assert [o.ids for o in together] == [engine.generate([p], settings)[0].ids for p in prompts]
    for out in together:
        assert (sum(out.won), out.finish) == (len(out.ids), "length")
        assert out.acceptance_length == len(out.ids) / len(out.won)
        assert out.drafted >= len(out.won) - 1


def test_a_context_that_is_full_ends_the_text_where_plain_decoding_ends(engine: Speculator) -> None:
    drafted, plain = (
        engine.generate(
            prompts_of((120,)), GenerationSettings(max_new_tokens=50, ignore_eos=True, shape=shape)
        )[0]
        for shape in (SHAPES["tree"], None)
    )
    assert (drafted.ids, drafted.finish) == (plain.ids, plain.finish)
    assert (plain.finish, 120 + len(plain.ids)) == ("context", engine.target.cache.capacity)


def test_a_stop_string_ends_the_text_after_the_token_that_completes_it(tmp_path: object) -> None:
    target = Target.load(save_tiny("llama", str(tmp_path)), slots=1, capacity=128)
    engine = speculator(target)
    prompt = prompts_of((6,))
    plain = engine.generate(
        prompt, GenerationSettings(max_new_tokens=20, ignore_eos=True, shape=None)
    )[0].ids
    stop = target.tokenizer.decode(plain[8:10])
    out = engine.generate(
        prompt, GenerationSettings(max_new_tokens=20, ignore_eos=True, stop=(stop,))
    )[0]
    assert out.finish == "stop"
    assert out.ids == plain[: len(out.ids)]
    assert stop in target.tokenizer.decode(out.ids)
    assert stop not in target.tokenizer.decode(out.ids[:-1])


@pytest.mark.parametrize("prompts", [[[]], [[1] * 128], [[5, 128]], [[-1]]])
def test_bad_prompts_and_settings_are_refused_and_take_no_slot(
    engine: Speculator, prompts: list[list[int]]
) -> None:
    with pytest.raises(UsageError):
        engine.generate(prompts)
    assert engine.target.cache.free == engine.target.cache.slots
    for bad in ({"max_new_tokens": 0}, {"stop": ("",)}):
        with pytest.raises(UsageError):
            GenerationSettings(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "name", "after"),
    [
        *(("target", "forward", after) for after in (0, 1, 3)),
        *(("drafting", name, after) for name, after in (("open", 0), ("open", 1), ("draft", 0))),
    ],
)
def test_work_that_raises_gives_every_slot_back(
    engine: Speculator, monkeypatch: pytest.MonkeyPatch, part: str, name: str, after: int
) -> None:
    """In a prompt's forward, in its drafter's slot, and in a round beside another text."""
    # type: ignore[union-attr]
    owner = getattr(engine, part)
    pools = (engine.target.cache, engine.drafting.pool)
    free = [pool.free for pool in pools]
    method = getattr(owner, name)
    calls = count()

    def failing(*given: Any) -> Any:
        if next(calls) >= after:
            raise FullError("no page is free")
        return method(*given)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(FullError):
        engine.generate(prompts_of((20, 5)), GenerationSettings(max_new_tokens=8))
    assert [pool.free for pool in pools] == free
