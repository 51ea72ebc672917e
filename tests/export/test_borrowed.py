"""Borrowed target layers (TLI) on the device: records bring the target's rows, and drafts equal those on the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_client.device import Device
from export.build import BuildSettings, build
from moa.bundle import Bundle
from moa.graph.drafter import OnnxDrafter, run
from moa.model.checkpoint import load_drafter
from moa.model.drafting import DraftRequest, MoaDrafting
from moa.model.target import Committed, Row, Target
from moa.sampling import SamplingSettings
from moa.tree import DraftTree, TreeShape
from tests.export.conftest import Pair, make_pair

IDS = [5, 9, 77, 30, 64, 8, 100, 12, 61, 17]
SHAPE = TreeShape(breadth=2, depth=3, nodes=6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two body layers, two borrowed ones; CA's heads are half as wide as the target's."""
    shape = {"layers": 2, "tli": 2, "num_attention_heads": 8, "cross_attention_num_key_value_heads": 4}
    return make_pair(tmp_path_factory.mktemp("borrows"), shape=shape)


@pytest.fixture(scope="module")
def bundle(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("built") / "bundle"
    settings = BuildSettings(
        target=str(pair.target), drafter=str(pair.drafter), out=out, variants=("cpu-fp32",), prompts=("hello",),
        new_tokens=6, time_steps=False,
    )  # fmt: skip
    return build(settings)


class Beside:
    """The target, its drafter beside it, and what of it travels."""

    def __init__(self, pair: Pair, ids: list[int]) -> None:
        self.target = Target.load(pair.target, slots=1, capacity=64)
        drafter = load_drafter(pair.drafter, self.target.model, self.target.facts)
        self.drafting = MoaDrafting(drafter, slots=1, capacity=64)
        slot, self.slot = self.target.pool.acquire(), self.drafting.open()
        step = self.target.forward([Row.chain(slot, ids)])
        done: Committed = self.target.commit(step, 0, range(len(ids)))
        self.drafting.observe(self.slot, ids, done)
        with torch.inference_mode():
            own = drafter.project(*done.kv, done.hidden, done.positions)
        sides = zip(own, done.kv, strict=True)
        self.keys, self.values = (
            drafter.layout.join([part.numpy() for part in (mine, *theirs[-2:])]) for mine, theirs in sides
        )

    def draft(self, pending: int) -> DraftTree:
        return self.drafting.draft([DraftRequest(self.slot, pending, SHAPE, SamplingSettings())])[0]


def drafted(drafter: OnnxDrafter, ids: list[int]) -> DraftTree:
    return run(drafter.draft(ids, SHAPE, SamplingSettings()))


def device_drafter(bundle: Bundle) -> OnnxDrafter:
    drafter = Device.load(bundle.folder, variant="cpu-fp32", threads=1).new_drafter()
    assert isinstance(drafter, OnnxDrafter)
    return drafter


@pytest.mark.parametrize("arrival", ["before", "after", "in two runs", "while drafting"])
def test_the_device_drafts_what_is_drafted_beside_the_target(pair: Pair, bundle: Bundle, arrival: str) -> None:
    """Whenever the rows arrive: before the device has read the tokens, afterwards, or after it drafted them itself."""
    beside, drafter = Beside(pair, IDS[:-1]), device_drafter(bundle)
    assert drafter.records is not None
    if arrival != "before":
        if arrival == "in two runs":
            drafter.records.put(3, beside.keys[3:], beside.values[3:])
        drafted(drafter, IDS if arrival != "while drafting" else IDS[:6])
    drafter.records.put(0, beside.keys, beside.values)
    mine, theirs = drafted(drafter, IDS), beside.draft(IDS[-1])
    assert mine.tokens == theirs.tokens
    assert mine.parents == theirs.parents
    np.testing.assert_allclose(mine.scores, theirs.scores, atol=1e-4)
