"""The packed decoder against the library's own model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moa.target.head import Head
from moa.target.packed import PACKED_FAMILIES
from moa.target.products import can_pack
from moa.target.torch_target import Row, Target
from testing.close import assert_rounded
from testing.tiny import tiny
from tests.target.test_target import prefill
from tests.target.trees import random_tree


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_every_way_through_a_model_says_the_same_of_unlike_rows(family: str) -> None:
    """Long rows attend alone, short ones together; one shares its prefix, and a chunk of a prompt
    is in the same batch."""
    biased = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    ways: list[dict[str, Any]] = [
        {"packed": False},
        {},
        {"pack_weights": True},
        {"kv_tokens": 1600},
    ]
    outcomes = []
    for way in ways:
        model = tiny(family, **biased, max_position_embeddings=900)
        target = Target.from_model(model, slots=5, capacity=900, **way)
        rng = np.random.default_rng(1)
        slots = [
            prefill(target, rng.integers(4, 128, size).tolist(), 64) for size in (700, 3, 41, 20)
        ]
        slots.append(target.cache.share(slots[2], 37))
        rows = [
            Row(slot, *random_tree(rng, size))
            for slot, size in zip(slots[:4], (6, 1, 9, 8), strict=True)
        ]
        rows.append(Row.chain(slots[4], rng.integers(4, 128, 23).tolist()))
        step = target.forward(rows)
        outcomes.append(
            torch.cat([step.logits(b, range(len(row.tokens))) for b, row in enumerate(rows)])
        )
        assert_rounded(
            target.forward(rows[4:]).logits(0, range(23)), outcomes[-1][-23:]
        )  # not the next pages
    for outcome in outcomes[1:]:
        assert_rounded(outcome, outcomes[0])


@pytest.mark.parametrize("pack_weights", [False, True])
def test_weights_are_held_once_and_the_librarys_own_model_still_runs_on_them(
    pack_weights: bool,
) -> None:
    model = tiny("qwen2")
    plain = tiny("qwen2")
    first, second = (
        Target.from_model(model, capacity=32, pack_weights=pack_weights) for _ in range(2)
    )
    attention = model.model.layers[0].self_attn
    ids = torch.arange(4, 24).reshape(1, 20)
    if pack_weights:
        assert not any("proj" in name for name, _ in model.named_parameters())
        assert second.decoder._layers[0]._qkv is attention.q_proj.whole
    else:
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    rows = [Row.chain(0, [5, 6, 7], judged="all")]
    assert first.cache.acquire() == second.cache.acquire() == 0
    torch.testing.assert_close(first.forward(rows).hidden(0), second.forward(rows).hidden(0))
    with torch.no_grad():
        assert_rounded(model(ids).logits, plain(ids).logits)


@pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16),
    reason="a processor that only emulates bfloat16",
)
def test_bfloat16_weights_are_packed_and_their_head_is_widened_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Widening the head in every forward took a quarter of an 8B target's."""
    plain, fast = (
        Target.from_model(tiny("llama").bfloat16(), capacity=32, pack_weights=pack)
        for pack in (False, True)
    )
    assert not any("proj" in name for name, _ in fast.model.named_parameters())
    assert "wide" not in vars(fast.decoder._head), (
        "no copy of the head before somebody asks for logits"
    )
    steps = [
        target.forward([Row.chain(target.cache.acquire(), [5, 6, 7], judged="all")])
        for target in (plain, fast)
    ]
    torch.testing.assert_close(steps[1].hidden(0), steps[0].hidden(0), atol=2e-2, rtol=2e-2)
    hidden = steps[0].hidden(0)
    wide = plain.logits(hidden)
    monkeypatch.setattr(Head, "_widened_in_pieces", None)
    logits = fast.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wide)
