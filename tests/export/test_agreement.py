"""Replaying recorded texts gives the acceptance of speculative decoding with the target."""

from __future__ import annotations

import operator
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from export.agreement import (
    CHAIN,
    TREE,
    Continuation,
    Reference,
    Replay,
    encode_prompts,
    make_traces,
    offline,
    rounds,
)
from export.runner import StepInput, StepOutput, TorchRunner
from export.source import Source
from moa.errors import UsageError
from moa.target.torch_target import Target
from tests.export.conftest import PROMPTS, Pair

VOCABULARY = 32


class Oracle:
    """A drafter that knows that the text counts upwards, and is wrong after every multiple of
    `blind`."""

    def __init__(self, source: Source, blind: int) -> None:
        self.spec = source.spec
        self.blind = blind

    def step(self, step: StepInput) -> StepOutput:
        ids = np.array(step.ids)[list(step.queries)]
        best = np.where(ids % self.blind == 0, 0, (ids + 1) % VOCABULARY)
        tokens = np.stack([best, (best + 7) % VOCABULARY], axis=1)
        logp = np.tile(np.log(np.array([[0.9, 0.1]], np.float32)), (len(ids), 1))
        heads = self.spec.cache[0]
        rows = [np.zeros((heads.kv_heads, len(step.ids), heads.head_dim), np.float32) for _ in "kv"]
        return StepOutput(logp, tokens, rows)


@pytest.fixture(scope="module")
def source(pair: Pair) -> Source:
    return pair.source()


@pytest.fixture(scope="module")
def traces(pair: Pair, source: Source) -> list[Continuation]:
    target = Target.load(pair.target, slots=2, capacity=64)
    return make_traces(target, source, encode_prompts(target, PROMPTS), new_tokens=12)


def counting(length: int, prompt: int) -> Continuation:
    return Continuation(list(range(1, length + 1)), prompt, None, None)


def test_every_round_is_counted_until_the_text_ends(source: Source) -> None:
    # blind after 5 and 10: from 3 on, the guesses 4, 5 are right, then the target's own 6; 7..10
    # are right, then 11.
    chain = rounds(Oracle(source, 5), [counting(13, 2)], CHAIN)
    assert chain.accepted == [2, 4, 2]
    assert chain.tokens_per_round == pytest.approx(8 / 3 + 1)
    assert chain.by_depth() == (1.0, 1.0, 0.3333, 0.3333, 0.0, 0.0)


def test_offline_agreement_is_by_distance(source: Source) -> None:
    found = offline(Oracle(source, 5), [counting(13, 2)], cold=False)
    assert found.lengths == (1, 2, 4, 8)  # no text is 16 tokens long
    assert found.agreement == (1.0, 1.0, 0.5, 0.75)
    assert found.unbroken == (1.0, 1.0, 0.0, 0.0)


def test_a_cold_start_holds_no_record_and_a_cut_those_of_the_prompt(source: Source) -> None:
    rows = np.zeros((1, 12, 16), np.float32)
    oracle = Oracle(source, 5)
    trace = Continuation(list(range(1, 14)), 2, rows, rows)
    spy = Mock(wraps=oracle.step)
    oracle.step = spy  # type: ignore[method-assign]
    for cold, held in ((True, 0), (False, 2)):
        offline(oracle, [trace], cold=cold)
        assert spy.call_args.args[0].record_k.shape == (1, held, 16)


def test_traces_hold_the_targets_own_text_and_records(
    pair: Pair, source: Source, traces: list[Continuation]
) -> None:
    target = Target.load(pair.target, capacity=64)
    for trace, prompt in zip(traces, encode_prompts(target, PROMPTS), strict=True):
        assert trace.ids[: trace.prompt] == prompt
        logits = target.model(torch.tensor([trace.ids[:-1]])).logits[0, trace.prompt - 1 :]
        assert logits.argmax(-1).tolist() == trace.ids[trace.prompt :]
        assert trace.record_k is not None
        assert trace.record_k.shape == (1, len(trace.ids) - 1, 16)


def test_a_replayed_round_is_a_plain_step_of_the_drafter(
    source: Source, traces: list[Continuation]
) -> None:
    """The first guess of a replay is the module's own, from the whole text with exactly the records
    before it."""
    trace = traces[0]
    runner = TorchRunner(source, 4)
    at = trace.prompt + 3
    module = source.module
    assert trace.record_k is not None
    assert trace.record_v is not None
    ids = torch.tensor([trace.ids[: at + 1]])
    positions = torch.arange(at + 1)[None]
    heads = source.spec.cache[0]
    past = [(torch.zeros(1, heads.kv_heads, 0, heads.head_dim),) * 2]
    mask = torch.full((1, 1, at + 1, at + 1), -1e9).triu(1)
    key = torch.from_numpy(trace.record_k[None, :, :at])
    value = torch.from_numpy(trace.record_v[None, :, :at])
    with torch.inference_mode():
        hidden, _ = module.features(
            ids, positions, mask, past, key, value, torch.zeros(1, 1, 1, at)
        )
        logits = module.logits(hidden)
    assert Replay(runner, trace).guesses(at, at + 1, at)[0] == int(logits[0, -1].argmax())


def test_a_prompt_that_does_not_fit_is_refused(pair: Pair, source: Source) -> None:
    target = Target.load(pair.target, capacity=16)
    with pytest.raises(UsageError, match="a calibration prompt has 20 tokens, at most 3 fit"):
        make_traces(target, source, [[5] * 20], new_tokens=12)


def test_calibration_counts_accepted_drafts_by_depth(source: Source) -> None:
    reference = Reference([counting(13, 2)], Oracle(source, VOCABULARY), "counting")  # type: ignore[arg-type]
    found = reference.calibration()
    assert found.acceptance.chain == pytest.approx((1.0, 1.0, 1.0, 0.5, 0.5, 0.5))  # the text ends
    assert all(map(operator.ge, found.acceptance.tree, found.acceptance.chain))
    assert found.acceptance.tree_shape.depth == TREE.depth
    assert reference.judge(reference.reference).acceptance == 1 + sum(found.acceptance.tree)
