"""A drafter of states on the device: records bring what the target's states make of its rows, and
drafts equal those on the server; without them it feeds on its own outputs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from edge_client.device import Device
from export.body import export_body
from export.build import BuildSettings, build
from export.cli import main
from export.forms import Workshop, block_layers, products_of_activations
from export.kinds import OPSET
from export.source import load_source
from moa.bundle import Bundle
from moa.drafters.contract import DraftRequest
from moa.drafters.features import FeatureDrafting
from moa.drafters.graph import GraphSpec
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.model import StateDrafter
from moa.drafters.states.training import absent
from moa.errors import MoaError
from moa.graph.drafter import OnnxDrafter, run
from moa.manifest import KVHeads
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import save_drafter
from moa.sampling import SamplingSettings
from moa.target.loading import load_model
from moa.target.torch_target import Committed, Row, Target
from moa.tree import DraftTree, TreeShape
from testing.tiny import save_tiny
from tests.export.conftest import Pair

IDS = [5, 9, 77, 30, 64, 8, 100, 12, 61, 17]
SHAPE = TreeShape(breadth=2, depth=3, nodes=6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("states")
    loaded = load_model(save_tiny("gemma3", folder / "target"))
    torch.manual_seed(3)
    drafter = StateDrafter.new(
        StateDrafterConfig.for_target(loaded.facts), SharedWeights.of(loaded.model)
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(
                4.0
            )  # large enough that a wrong path through the graph shows in the logits
    save_drafter(drafter, folder / "drafter")
    return Pair(folder / "target", folder / "drafter")


@pytest.fixture(scope="module")
def bundle(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    settings = BuildSettings(
        target=str(pair.target),
        drafter=str(pair.drafter),
        out=tmp_path_factory.mktemp("built") / "bundle",
        variants=("cpu-fp32", "cpu-int8", "cpu-int4"),
        prompts=("hello", "1+1="),
        new_tokens=6,
        time_steps=False,
    )
    return build(settings)


@pytest.fixture(scope="module")
def beside(pair: Pair) -> Beside:
    return Beside(pair, IDS[:-1])


class Beside:
    """The target, its drafter beside it, and the records of a text that ran in two forwards."""

    def __init__(self, pair: Pair, ids: list[int]) -> None:
        self.target = Target.load(pair.target, slots=1, capacity=64)
        self.drafter = StateDrafter.load(
            pair.drafter, self.target.facts, SharedWeights.of(self.target.model)
        )
        self.target.tap(self.drafter.config.taps)
        self.drafting = FeatureDrafting(self.drafter, slots=1, capacity=64)
        slot, self.slot = self.target.cache.acquire(), self.drafting.open()
        pieces: list[Committed] = []
        for part in (ids[:4], ids[4:]):
            pieces.append(
                self.target.commit(
                    self.target.forward([Row.chain(slot, part)]), 0, range(len(part))
                )
            )
            self.drafting.observe(self.slot, part, pieces[-1])
        self.whole = Committed.joined(pieces)
        self.keys, self.values = self.drafter.records([self.whole])

    def draft(self, pending: int) -> DraftTree:
        return self.drafting.draft([DraftRequest(self.slot, pending, SHAPE, SamplingSettings())])[0]


def drafted(drafter: OnnxDrafter, ids: list[int]) -> DraftTree:
    return run(drafter.draft(ids, SHAPE, SamplingSettings()))


def device_drafter(bundle: Bundle) -> OnnxDrafter:
    drafter = Device.load(bundle.folder, variant="cpu-fp32", threads=1).new_drafter()
    assert isinstance(drafter, OnnxDrafter)
    return drafter


@pytest.mark.parametrize("arrival", ["before", "after", "in two runs", "while drafting"])
def test_the_device_drafts_what_is_drafted_beside_the_target(
    beside: Beside, bundle: Bundle, arrival: str
) -> None:
    drafter = device_drafter(bundle)
    assert drafter.records is not None
    if arrival != "before":
        if arrival == "in two runs":
            drafter.records.put(3, beside.keys[3:], beside.values[3:])
        drafted(drafter, IDS if arrival != "while drafting" else IDS[:6])
    drafter.records.put(0, beside.keys, beside.values)
    mine = drafted(drafter, IDS)
    theirs = beside.draft(IDS[-1])
    assert mine.tokens == theirs.tokens
    assert mine.parents == theirs.parents
    np.testing.assert_allclose(mine.scores, theirs.scores, atol=1e-3)


def test_records_are_the_same_in_any_pieces(beside: Beside) -> None:
    whole = beside.whole
    parts = [whole.part(6, 9), whole.part(0, 2), whole.part(2, 6)]
    keys, values = beside.drafter.records(parts)
    order = [6, 7, 8, 0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(keys, beside.keys[order], atol=1e-4)
    np.testing.assert_allclose(values, beside.values[order], atol=1e-4)


def test_without_records_each_token_reads_what_the_one_before_it_made(
    beside: Beside, bundle: Bundle
) -> None:
    """Token by token on the device, and by hand in torch."""
    drafter, model = device_drafter(bundle), beside.drafter
    mine = [run(drafter.guess(IDS[: at + 1], SamplingSettings())) for at in range(len(IDS))]
    past = model.empty_rows(torch.tensor([IDS]))
    feature = torch.zeros(1, 1, model.feature_size)
    wanted = []
    with torch.inference_mode():
        for at, token in enumerate(IDS):
            mask = torch.zeros(1, 1, 1, at + 1)
            hidden, rows = model.step(
                torch.tensor([[token]]), feature, torch.tensor([[at]]), mask, past
            )
            past = torch.cat([past[0], rows[0]], -2), torch.cat([past[1], rows[1]], -2)
            feature = model.feedback(hidden)
            wanted.append(int(model.logits(hidden)[0, 0].argmax()))
    assert mine == wanted


def test_a_prompt_in_one_run_is_read_in_two_passes_as_it_was_trained(
    beside: Beside, bundle: Bundle
) -> None:
    ids = torch.tensor([IDS])
    hidden = absent(beside.drafter, ids, torch.arange(len(IDS))[None], torch.ones_like(ids))
    (guess,) = beside.drafter.logits(hidden[:, -1]).argmax(-1).tolist()
    assert run(device_drafter(bundle).guess(IDS, SamplingSettings())) == guess


def test_no_product_of_a_wide_drafter_is_left_unquantized(tmp_path: Path) -> None:
    """Tiny weights are folded by the exporter however they are used; wide ones are not."""
    wide = save_tiny(
        "llama", tmp_path / "target", hidden_size=256, num_attention_heads=4, num_key_value_heads=2
    )
    loaded = load_model(wide)
    config = StateDrafterConfig.for_target(loaded.facts)
    save_drafter(StateDrafter.new(config, SharedWeights.of(loaded.model)), tmp_path / "drafter")
    source = load_source(str(wide), str(tmp_path / "drafter"))
    shop = Workshop(source, tmp_path, top_k=4)
    graph = block_layers(shop.layers(OPSET), bits=4, block=32).proto.graph
    count = Counter(node.op_type for node in graph.node)
    products = sum(
        isinstance(part, nn.Linear)
        for name, part in source.module.named_modules()
        if name != "fuse"
    )
    assert count["MatMulNBits"] == products
    assert count["MatMul"] == len(
        products_of_activations(onnx.load(shop.layers(OPSET), load_external_data=False))
    )


class Twice(nn.Module):
    """A weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(512, 512, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        row = (
            x[:, None, :, :8]
            + positions[:, None, :, None]
            + sum(part.sum() for part in (mask, *past))
        )
        return self.weight(self.weight(x)).index_select(1, queries), row, row + 1


def test_layers_that_no_quantizer_would_find_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(MoaError, match="turned at run time"):
        export_body(
            Twice(),
            GraphSpec(512, (KVHeads(kv_heads=1, head_dim=8),), None),
            tmp_path / "layers.onnx",
            opset=OPSET,
        )


def test_quantized_forms_and_calibration_are_made(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.drafter.kind == "states"
    assert manifest.calibration is not None
    assert {name: variant.agreement is not None for name, variant in manifest.variants.items()} == {
        "cpu-fp32": True,
        "cpu-int8": True,
        "cpu-int4": True,
    }
    assert manifest.variants["cpu-fp32"].agreement is not None
    assert manifest.variants["cpu-fp32"].agreement.top1_same == 1.0


def test_a_form_for_npus_is_refused(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "build",
        "--target",
        str(pair.target),
        "--drafter",
        str(pair.drafter),
        "--out",
        str(tmp_path / "b"),
    ]
    assert main([*command, "-v", "npu-qnn"]) == 2
    assert "reads states" in capsys.readouterr().err
