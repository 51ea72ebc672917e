"""This year's families through the library's layers and our caches: beyond what
`tests/target/test_conformance.py` asks of every target, long texts, real statistics, low precision,
and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from moa.drafters.attention.config import AttentionConfig
from moa.errors import UnsupportedModelError, UsageError
from moa.target.torch_target import Row, Target
from moa.training.teacher import Teacher
from testing.close import assert_rounded
from testing.tiny import CHAIN_FAMILIES, MODERN_FAMILIES, available, save_tiny, tiny
from testing.tiny import FAMILIES as EARLIER_FAMILIES
from tests.stand_in import Elsewhere, moved, stand_in
from tests.target.test_target import prefill
from tests.target.trees import plain_logits, reference

FAMILIES = [family for family in MODERN_FAMILIES if available(family)]
EVERY_FAMILY = [*EARLIER_FAMILIES, "mixtral", "qwen3_moe", *FAMILIES]
CHAINS = [family for family in CHAIN_FAMILIES if available(family)]


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, 128, length).tolist()


def continues(target: Target, plain: PreTrainedModel, slot: int, ids: list[int]) -> None:
    """Three draft tokens behind the text score as plain forwards do; the first two are kept."""
    tokens = text(len(ids), 3)
    step = target.forward([Row.chain(slot, tokens, judged="all")])
    wanted = [plain_logits(plain, [*ids, *tokens[: node + 1]]) for node in range(3)]
    found = step.logits(0, range(3))
    if target.capabilities.trees:
        assert_rounded(found, torch.stack(wanted))
    else:  # a recurrence carries its roundings along the text, and the library's pieces are others
        torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=5e-3)
    target.commit(step, 0, [0, 1])
    ids += tokens[:2]


@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts_score_as_plain_forwards_do(family: str) -> None:
    """Beyond windows, and beyond where phi3's long frequencies begin."""
    target = Target.from_model(tiny(family), slots=2, capacity=500)
    plain = reference(family)
    for length in (150, 440):
        ids = text(length, length)
        slot = prefill(target, ids, chunk=100)
        for _ in range(2):
            continues(target, plain, slot, ids)


def test_two_kinds_of_frequencies_are_settled_by_the_capacity() -> None:
    short = Target.from_model(tiny("phi3"), capacity=128)
    long = Target.from_model(tiny("phi3"), capacity=129)
    plain = reference("phi3")
    ids = text(1, 40)
    slot = prefill(short, ids)
    step = short.forward([Row.chain(slot, [9])])
    assert_rounded(step.logits(0, [0])[0], plain_logits(plain, [*ids, 9]))
    step = long.forward([Row.chain(prefill(long, ids), [9])])
    assert not torch.allclose(step.logits(0, [0])[0], plain_logits(plain, [*ids, 9]), atol=1e-2)


def with_real_statistics(model: PreTrainedModel) -> PreTrainedModel:
    """What trained models have and random ones lack: key biases of the order of 100, and a token
    with activations that are a thousand times those of the others."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.get_input_embeddings().weight[7, 3] = 400.0
        for name, weight in model.named_parameters():
            if name.endswith("k_proj.bias"):
                weight.copy_(100 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_depth_key_biases_and_massive_activations(family: str) -> None:
    depth: dict[str, Any] = {"num_hidden_layers": 24}
    if family in ("glm4", "gpt_oss", "smollm3", "granite", "olmo3", "llama", "qwen3", "qwen3_moe"):
        depth["attention_bias"] = True
    target = Target.from_model(with_real_statistics(tiny(family, **depth)), capacity=112)
    plain = with_real_statistics(tiny(family, **depth))
    plain.set_attn_implementation("eager")
    exact = with_real_statistics(tiny(family, **depth)).double()
    exact.set_attn_implementation("eager")
    with_plain_experts(exact)  # the fused products have no float64
    ids = [7, *text(3, 30)]
    tokens = text(4, 5)
    step = target.forward([Row.chain(prefill(target, ids), tokens, judged="all")])
    found = step.logits(0, range(5)).double()
    paths = [[*ids, *tokens[: node + 1]] for node in range(5)]
    with torch.no_grad():
        wanted = torch.stack([exact(torch.tensor([path])).logits[0, -1] for path in paths])
        theirs = torch.stack([plain(torch.tensor([path])).logits[0, -1] for path in paths])
    # Depth multiplies roundings: ours may be as wrong as the library's own, a few times over.
    error = float((found - wanted).abs().max())
    theirs_error = float((theirs.double() - wanted).abs().max())
    assert error <= 8 * theirs_error + 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_in_bfloat16_it_is_as_near_to_float32_as_the_library_is(family: str) -> None:
    target = Target.from_model(tiny(family).bfloat16(), capacity=112)
    plain = reference(family)
    ids = text(5, 40)
    tokens = text(6, 8)
    step = target.forward([Row.chain(prefill(target, ids), tokens, judged="all")])
    found = step.logits(0, range(8))
    wanted = torch.stack(
        [plain_logits(plain, [*ids, *tokens[: node + 1]]) for node in range(len(tokens))]
    )
    with torch.no_grad():
        theirs = (
            reference(family).bfloat16()(torch.tensor([[*ids, *tokens]])).logits[0, -8:].float()
        )
    error = float((found - wanted).abs().max())
    assert error <= 3 * float((theirs - wanted).abs().max())


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_on_a_device_of_its_own_in_bfloat16_it_is_as_near(family: str) -> None:
    """Two texts at a time, in pieces with a rejected token behind each."""
    texts = [text(1, 20), text(2, 20)]
    with stand_in():
        model = moved(with_plain_experts(tiny(family).bfloat16()))
        target = Target.from_model(model, slots=2, capacity=64)
        slots = [target.cache.acquire() for _ in texts]
        for start, stop in ((0, 12), (12, 15), (15, 20)):
            rows = [
                Row.chain(slot, [*ids[start:stop], 9], judged="all")
                for slot, ids in zip(slots, texts, strict=True)
            ]
            step = target.forward(rows)
            found = [step.logits(row, [stop - start - 1])[0] for row in range(len(rows))]
            for row in range(len(rows)):
                target.commit(step, row, range(stop - start))
    assert all(isinstance(logits, Elsewhere) for logits in found)
    narrow = with_plain_experts(reference(family).bfloat16())
    wanted = torch.stack([plain_logits(reference(family), ids) for ids in texts])
    theirs = torch.stack([plain_logits(narrow, ids) for ids in texts])
    error = float((torch.stack([logits.inner for logits in found]) - wanted).abs().max())
    assert error <= 3 * float((theirs - wanted).abs().max())


def with_plain_experts(model: Any) -> Any:
    """A mixture whose experts are computed one after another: the fused products need an
    accelerator."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("histories", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CHAINS)
def test_a_rejected_tail_leaves_the_bits_of_a_text_that_never_had_it(
    family: str, histories: int
) -> None:
    """Random histories: drafts of which a part is kept, against the same pieces alone."""
    rng = np.random.default_rng(11)
    target = Target.from_model(tiny(family), slots=3, capacity=112)
    for _ in range(histories):
        drafted = target.cache.acquire()
        afresh = target.cache.acquire()
        for _ in range(int(rng.integers(1, 5))):
            size = int(rng.integers(1, 8))
            kept = int(rng.integers(0, size + 1))
            tokens = rng.integers(4, 128, size).tolist()
            step = target.forward([Row.chain(drafted, tokens)])
            target.commit(step, 0, range(kept))
            if kept:
                step = target.forward([Row.chain(afresh, tokens[:kept])])
                target.commit(step, 0, range(kept))
        probe = [
            target.forward([Row.chain(slot, [9])]).logits(0, [0]) for slot in (drafted, afresh)
        ]
        assert_rounded(*probe)
        target.cache.release(drafted)
        target.cache.release(afresh)


@pytest.mark.parametrize("family", CHAINS)
def test_a_branch_is_refused_before_anything_changes(family: str) -> None:
    target = Target.from_model(tiny(family), capacity=32)
    assert not target.capabilities.trees
    slot = prefill(target, [5, 6, 7])
    with pytest.raises(UsageError, match="must be chains"):
        target.forward([Row(slot, [8, 9, 10], [-1, 0, 0])])
    continues(target, reference(family), slot, [5, 6, 7])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_it_loads_and_is_its_model(family: str, tmp_path: Path) -> None:
    target = Target.load(save_tiny(family, tmp_path), capacity=64)
    plain = reference(family)
    ids = text(7, 20)
    continues(target, plain, prefill(target, ids), ids)


def test_layers_that_differ_are_read_by_no_drafter_of_keys_and_values() -> None:
    for family in ("gemma4", "lfm2"):
        if available(family):
            target = Target.from_model(tiny(family), capacity=32)
            with pytest.raises(UsageError, match="whose layers differ"):
                AttentionConfig.for_target(target.facts).check_fits(target.facts)


@pytest.mark.parametrize("family", CHAINS)
def test_no_drafter_is_trained_beside_running_states(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="packed row"):
        Teacher(tiny(family))
