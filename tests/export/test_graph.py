"""The float32 graph is the torch drafter: over random caches, trees, records, families, with and
without TLI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from export.forms import Workshop
from export.kinds import OPSET, PORTABLE_OPSET
from export.parity import compare
from export.runner import OrtRunner, TorchRunner, random_steps
from export.source import Source, load_source
from moa.errors import MoaError
from testing.tiny import save_tiny
from tests.export.conftest import Pair, make_pair

TOLERANCE = 1e-4


def workshop(source: Source, folder: Path, **settings: object) -> Workshop:
    return Workshop(source, folder, top_k=8, **settings)  # type: ignore[arg-type]


def saved(shop: Workshop, opset: int = OPSET) -> Path:
    path = shop.folder / f"model-{opset}.onnx"
    shop.float_graph(opset).save(path)
    return path


@pytest.mark.parametrize(
    ("family", "opset", "shape"),
    [("gemma2", OPSET, {"tli": 1}), ("llama", PORTABLE_OPSET, {"layers": 3, "final_norm": True})],
)
def test_the_graph_computes_what_torch_does(
    family: str, opset: int, shape: dict[str, Any], tmp_path: Path
) -> None:
    shop = workshop(make_pair(tmp_path, family, shape).source(), tmp_path)
    assert compare(TorchRunner(shop.source, 8), saved(shop, opset), None) <= TOLERANCE


@pytest.fixture(scope="module")
def shop(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return workshop(pair.source(), tmp_path_factory.mktemp("shop"))


def test_noise_and_scale_change_the_order_as_documented(shop: Workshop) -> None:
    reference = TorchRunner(shop.source, 8)
    runner = OrtRunner(saved(shop), shop.source.spec)
    (step,) = random_steps(shop.source.spec, shop.source.vocabulary, sizes=((4, 3, 6, 2),))
    plain = reference.step(step)
    found = runner.step(step)
    assert (found.top_tokens == plain.top_tokens).all()
    np.testing.assert_allclose(found.top_logp, plain.top_logp, atol=TOLERANCE)
    logits, _ = reference.logits(step)
    for shape in ((1, 1, 1), (1, 1, shop.source.vocabulary), (1, 3, shop.source.vocabulary)):
        noise = np.random.default_rng(0).gumbel(size=shape).astype(np.float32)
        feeds = step.feeds(shop.source.spec) | {
            "scale": np.array([0.5], np.float32),
            "noise": noise,
        }
        logp, tokens = runner.session.run(["top_logp", "top_tokens"], feeds)
        wanted = torch.log_softmax(logits * 0.5 + torch.from_numpy(noise)[0], -1).topk(8)
        assert (tokens[0] == wanted.indices.numpy()).all()
        np.testing.assert_allclose(logp[0], wanted.values.numpy(), atol=TOLERANCE)


def test_a_wrong_graph_is_not_let_through(shop: Workshop, tmp_path: Path) -> None:
    graph = shop.float_graph(OPSET)
    graph.weights["table.head.weight"] = graph.weights["table.head.weight"] + 0.01
    graph.save(tmp_path / "model.onnx")
    with pytest.raises(MoaError, match="differs from torch in the logits"):
        compare(TorchRunner(shop.source, 8), tmp_path / "model.onnx", None)


def test_inputs_have_the_documented_names_and_shapes(shop: Workshop) -> None:
    graph = onnx.load(saved(shop), load_external_data=False).graph
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in graph.input
    }
    assert shapes == {
        "ids": [1, "T"],
        "positions": [1, "T"],
        "queries": ["N"],
        "mask": [1, 1, "T", "P+T"],
        "record_k": [1, 1, "R", 16],
        "record_v": [1, 1, "R", 16],
        "record_mask": [1, 1, 1, "R"],
        "past_k_0": [1, 1, "P", 16],
        "past_v_0": [1, 1, "P", 16],
        "scale": [1],
        "noise": [1, "n", "v"],
    }
    assert [v.name for v in graph.output] == ["top_logp", "top_tokens", "new_k_0", "new_v_0"]
    kinds = [node.op_type for node in graph.node]
    assert (kinds.count("Attention"), kinds.count("RMSNormalization")) == (2, 4), "they stay whole"


def test_a_reduced_vocabulary_returns_target_ids(pair: Pair, tmp_path: Path) -> None:
    chosen = np.array([1, 2, 9, 40, 41, 77, 90, 100, 127])
    shop = workshop(pair.source(), tmp_path, draft_to_target=chosen)
    path = saved(shop)
    assert compare(TorchRunner(shop.source, 8), path, chosen) <= TOLERANCE
    reference = TorchRunner(shop.source, 8)
    runner = OrtRunner(path, shop.source.spec)
    for step in random_steps(shop.source.spec, shop.source.vocabulary):
        best = reference.logits(step)[0][:, chosen].topk(8).indices.numpy()
        assert (runner.step(step).top_tokens == chosen[best]).all()


def test_an_independent_drafter_needs_no_records_and_large_logits_may_differ_by_their_last_digits(
    pair: Pair, tmp_path: Path
) -> None:
    small = save_tiny("llama", tmp_path / "small", num_hidden_layers=1, hidden_size=32)
    source = load_source(str(pair.target), f"independent:{small}")
    assert source.spec.records is None
    assert len(source.spec.cache) == 1
    shop = workshop(source, tmp_path)
    path = saved(shop)
    assert compare(TorchRunner(source, 8), path, None) <= TOLERANCE
    assert not [
        v.name
        for v in OrtRunner(path, source.spec).session.get_inputs()
        if v.name.startswith("record")
    ]
    with torch.no_grad():  # a trained model's numbers are larger than random ones
        source.shared.head.mul_(2.0**14)
    assert compare(TorchRunner(source, 8), saved(workshop(source, tmp_path)), None) <= TOLERANCE
