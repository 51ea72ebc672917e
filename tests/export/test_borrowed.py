"""Borrowed target layers (TLI) on the device: records bring the target's rows, and drafts equal
those on the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_client.device import Device
from export.build import build
from moa.bundle import Bundle
from moa.drafters.attention.model import load_attention
from moa.drafters.body_drafting import BodyDrafting
from moa.drafters.contract import DraftRequest
from moa.graph.drafter import OnnxDrafter, run
from moa.sampling import SamplingSettings
from moa.target.torch_target import Row, Target
from moa.tree import DraftTree, TreeShape
from tests.export.conftest import Pair, make_pair, settings_for

IDS = [5, 9, 77, 30, 64, 8, 100, 12, 61, 17]
SHAPE = TreeShape(breadth=2, depth=3, nodes=6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two body layers, two borrowed ones; CA's heads are half as wide as the target's."""
    shape = {
        "layers": 2,
        "tli": 2,
        "num_attention_heads": 8,
        "cross_attention_num_key_value_heads": 4,
    }
    return make_pair(tmp_path_factory.mktemp("borrows"), shape=shape)


@pytest.fixture(scope="module")
def bundle(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    how = {"variants": ("cpu-fp32",), "prompts": ("hello",), "new_tokens": 6}
    return build(settings_for(pair, tmp_path_factory.mktemp("built") / "bundle", **how))


def beside(pair: Pair, ids: list[int]) -> tuple[DraftTree, list[np.ndarray]]:
    """What the drafter beside the target drafts after all but the last of `ids`, and the keys and
    values that travel to the device."""
    target = Target.load(pair.target, slots=1, capacity=64)
    drafter = load_attention(pair.drafter, target.model, target.facts)
    drafting = BodyDrafting(drafter, slots=1, capacity=64)
    done = target.commit(
        target.forward([Row.chain(target.cache.acquire(), ids[:-1])]), 0, range(len(ids) - 1)
    )
    drafting.observe(drafting.open(), ids[:-1], done)
    with torch.inference_mode():
        own = drafter.project(*done.kv, done.hidden, done.positions)
    travels = [
        drafter.record_layout.join([part.numpy() for part in (mine, *theirs[-2:])])
        for mine, theirs in zip(own, done.kv, strict=True)
    ]
    return drafting.draft([DraftRequest(0, ids[-1], SHAPE, SamplingSettings())])[0], travels


def drafted(drafter: OnnxDrafter, ids: list[int]) -> DraftTree:
    return run(drafter.draft(ids, SHAPE, SamplingSettings()))


@pytest.mark.parametrize("arrival", ["before", "after", "in two runs", "while drafting"])
def test_the_device_drafts_what_is_drafted_beside_the_target(
    pair: Pair, bundle: Bundle, arrival: str
) -> None:
    """Whenever the rows arrive: before the device has read the tokens, afterwards, or after it
    drafted them itself."""
    theirs, (keys, values) = beside(pair, IDS)
    drafter = Device.load(bundle.folder, variant="cpu-fp32", threads=1).new_drafter()
    assert isinstance(drafter, OnnxDrafter)
    assert drafter.records is not None
    if arrival != "before":
        if arrival == "in two runs":
            drafter.records.put(3, keys[3:], values[3:])
        drafted(drafter, IDS if arrival != "while drafting" else IDS[:6])
    drafter.records.put(0, keys, values)
    mine = drafted(drafter, IDS)
    assert mine.tokens == theirs.tokens
    assert mine.parents == theirs.parents
    np.testing.assert_allclose(mine.scores, theirs.scores, atol=1e-4)
