"""Exactness is the product: speculative text is the target's own, greedy or sampled, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from moa.config import DrafterConfig
from moa.errors import FullError, UsageError
from moa.model.checkpoint import new_drafter
from moa.model.drafting import DraftRequest, MoaDrafting
from moa.model.generate import Generation, GenerationSettings, Speculator
from moa.model.target import Committed, Row, Step, Target
from moa.sampling import SamplingSettings, choose
from moa.speculation.policy import Policy
from moa.tree import DraftTree, TreeShape
from tests.tiny import FAMILIES, save_tiny, tiny

SHAPES = {"tree": TreeShape(), "chain": TreeShape.chain(4)}
LENGTHS = (1, 2, 17, 60)


def prompts_of(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(n)] for n in lengths]


def speculator(target: Target, tli: int = 0) -> Speculator:
    """A drafter with random weights: it is sometimes right."""
    drafter = new_drafter(DrafterConfig.for_target(target.facts, tli=tli, final_state=True), target.model)
    torch.manual_seed(0)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)
    drafting = MoaDrafting(drafter.eval(), slots=target.pool.slots, capacity=target.pool.capacity)
    return Speculator(target, drafting)


def generated(family: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The result of `transformers` itself."""
    reference = tiny(family)
    reference.set_attn_implementation("eager")  # its sdpa drops Gemma 2's soft cap
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        out.append(text[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    prompts = prompts_of(LENGTHS)
    wanted = generated(family, prompts, 16)
    for tli in (0, 3):
        for slots in (1, 4):
            engine = speculator(Target.from_model(tiny(family), slots=slots, capacity=128), tli)
            for shape in SHAPES.values():
                out = engine.generate(prompts, GenerationSettings(max_new_tokens=16, shape=shape))
                assert [o.ids for o in out] == wanted, (tli, slots, shape)
            assert engine.target.pool.free == slots, "every slot is given back"


def test_long_prompts() -> None:
    prompts = prompts_of((511, 512, 513))
    wanted = generated("llama", prompts, 8)
    engine = speculator(Target.from_model(tiny("llama", max_position_embeddings=1024), slots=2, capacity=640))
    assert [o.ids for o in engine.generate(prompts, GenerationSettings(max_new_tokens=8))] == wanted


@pytest.fixture(scope="module")
def engine() -> Speculator:
    return speculator(Target.from_model(tiny("llama"), slots=4, capacity=128))


@pytest.mark.parametrize("seed", range(20))
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


def test_sampled_next_tokens_are_chosen_from_the_targets_logits(engine: Speculator) -> None:
    """How often `choose` takes which token is in `tests/test_sampling.py`."""
    prompt = prompts_of((9,))[0]
    logits = engine.target.model(torch.tensor([prompt])).logits[0, -1].detach().float().numpy()
    for seed in range(40):
        settings = GenerationSettings(max_new_tokens=1, sampling=SamplingSettings(temperature=1.0, seed=seed))
        assert engine.generate([prompt], settings)[0].ids == [choose(logits, settings.sampling, len(prompt))]


def test_the_same_noise_makes_a_drafter_agree_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hot enough for the noise to matter beside the logits of two models that have nothing to do with each other.
    engine = speculator(Target.from_model(tiny("llama"), slots=4, capacity=128))
    sampling = SamplingSettings(temperature=8.0, seed=5)
    settings = GenerationSettings(
        max_new_tokens=40, sampling=sampling, shape=TreeShape.chain(4), ignore_eos=True, adapt=False
    )

    def acceptance() -> float:
        return float(np.mean([o.acceptance_length for o in engine.generate(prompts_of((9, 20, 30, 40)), settings)]))

    coupled = acceptance()
    other_noise = MoaDrafting._noise
    monkeypatch.setattr(MoaDrafting, "_noise", lambda self, level: other_noise(self, level).flip(-1))
    assert coupled > 1.08 * acceptance()


def test_more_prompts_than_slots_are_all_served(engine: Speculator) -> None:
    prompts = prompts_of(tuple(range(1, 12)))
    one_by_one = [engine.generate([p], GenerationSettings(max_new_tokens=6))[0].ids for p in prompts]
    assert [o.ids for o in engine.generate(prompts, GenerationSettings(max_new_tokens=6))] == one_by_one


def test_a_context_that_is_full_ends_the_text_where_plain_decoding_ends(engine: Speculator) -> None:
    prompt = prompts_of((120,))
    settings = GenerationSettings(max_new_tokens=50, ignore_eos=True)
    drafted = engine.generate(prompt, settings)[0]
    plain = engine.generate(prompt, GenerationSettings(max_new_tokens=50, ignore_eos=True, shape=None))[0]
    assert drafted.ids == plain.ids
    assert drafted.finish == plain.finish == "context"
    assert len(prompt[0]) + len(drafted.ids) == engine.target.pool.capacity


def test_counting(engine: Speculator) -> None:
    out = engine.generate(prompts_of((5,)), GenerationSettings(max_new_tokens=20, ignore_eos=True, adapt=False))[0]
    assert sum(out.won) == len(out.ids) == 20
    assert out.finish == "length"
    assert out.acceptance_length == 20 / len(out.won)
    assert out.drafted >= len(out.won) - 1
    assert Generation().acceptance_length == 0.0


def test_a_stop_string_ends_the_text_after_the_token_that_completes_it(tmp_path: object) -> None:
    target = Target.load(save_tiny("llama", str(tmp_path)), slots=1, capacity=128)
    engine = speculator(target)
    prompt = prompts_of((6,))
    plain = engine.generate(prompt, GenerationSettings(max_new_tokens=20, ignore_eos=True, shape=None))[0].ids
    stop = target.tokenizer.decode(plain[8:10])
    out = engine.generate(prompt, GenerationSettings(max_new_tokens=20, ignore_eos=True, stop=(stop,)))[0]
    assert out.finish == "stop"
    assert out.ids == plain[: len(out.ids)]
    assert stop in target.tokenizer.decode(out.ids)
    assert stop not in target.tokenizer.decode(out.ids[:-1])


@pytest.mark.parametrize("prompts", [[[]], [[1] * 128], [[5, 128]], [[-1]]])
def test_bad_prompts_are_refused_and_take_no_slot(engine: Speculator, prompts: list[list[int]]) -> None:
    with pytest.raises(UsageError):
        engine.generate(prompts)
    assert engine.target.pool.free == engine.target.pool.slots


def test_work_that_raises_gives_every_slot_back(engine: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prompt's forward, in its drafter's slot, and in a round beside another text."""
    drafting = engine.drafting
    assert isinstance(drafting, MoaDrafting)
    target, free = engine.target, (engine.target.pool.free, drafting.pool.free)
    settings = GenerationSettings(max_new_tokens=8, adapt=False)
    real = target.forward
    for owner, name, after in ((target, "forward", 0), (target, "forward", 1), (target, "forward", 3),
                               (drafting, "open", 0), (drafting, "open", 1), (drafting, "draft", 0)):  # fmt: skip
        calls, whole = [], getattr(owner, name)

        def fails(*given: object, calls: list[int] = calls, whole=whole, after: int = after):  # type: ignore[no-untyped-def]
            calls.append(1)
            if len(calls) > after:
                raise FullError("no page is free")
            return whole(*given)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            with pytest.raises(FullError):
                engine.generate(prompts_of((20, 5)), settings)
        assert (target.pool.free, drafting.pool.free) == free, (name, after)
    assert target.forward == real


@pytest.mark.parametrize("bad", [{"max_new_tokens": 0}, {"stop": ("",)}])
def test_bad_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        GenerationSettings(**bad)  # type: ignore[arg-type]


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class WrongDrafting:
    """Drafts what the target never says; a level takes half a plain round, and a token is read in a fiftieth."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.read = clock, 0

    def open(self) -> int:
        return 0

    def close(self, slot: int) -> None:
        self.read = 0

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        assert committed.positions.tolist() == list(range(self.read, self.read + len(tokens)))
        self.read += len(tokens)
        self.clock.now += 0.02 * len(tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        (request,) = requests
        self.clock.now += 0.5 * request.shape.depth
        levels = range(request.shape.depth)
        return [DraftTree([request.pending, *[0 for _ in levels]], [-1, *levels], [0.0, *[-1.0 for _ in levels]])]


class Counted(Policy):
    """Counts policies."""

    made = 0

    def __init__(self, shape: TreeShape) -> None:
        super().__init__(shape)
        Counted.made += 1


def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("moa.model.generate.Policy", Counted)
    monkeypatch.setattr("moa.model.generate.time", clock)
    target = Target.from_model(tiny("llama", max_position_embeddings=1024), slots=1, capacity=1024)
    forward = target.forward

    def timed(rows: Sequence[Row]) -> Step:
        clock.now += 1.0 + 0.1 * (len(rows[0].tokens) - 1)
        return forward(rows)

    engine = Speculator(target, WrongDrafting(clock))
    settings = GenerationSettings(max_new_tokens=400, ignore_eos=True, shape=TreeShape.chain(6))
    prompt = prompts_of((60,))
    target.forward = timed  # type: ignore[method-assign]
    first = engine.generate(prompt, settings)[0]
    for _ in range(2):
        engine.generate(prompt, settings)  # what it costs to learn is bounded, and spent
    began, rounds = clock.now, 4 * (1 + len(first.ids))
    for _ in range(4):
        again = engine.generate(prompt, settings)[0]
        assert again.ids == first.ids
    assert first.drafted > 0
    assert rounds / (clock.now - began) > 0.96, "the prompt takes 1.5 % of it, trials as much"
    assert Counted.made == 1
