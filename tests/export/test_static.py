"""Static forms draft what the drafter drafts: padded, in pieces, with host-side rotation and top-k."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from export.forms import Workshop
from export.kinds import VARIANT_KINDS
from export.plan import make_plan
from export.runner import TorchRunner, random_steps
from export.static_forms import StaticRunner, StaticShape, export_static, partitions
from export.variants import calibration_feeds, make_static
from moa.errors import ConfigError, MoaError, UsageError
from moa.graph.step import open_session
from tests.export.conftest import Pair, make_pair

SHAPE = StaticShape(tokens=4, past=24, records=16)
SIZES = (
    (1, 1, 0, 0),
    (4, 4, 5, 3),
    (9, 9, 6, 16),
    (2, 2, 24, 1),
)  # nothing there, full, in pieces, at capacity


@pytest.fixture(scope="module")
def shop(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(pair.source(), tmp_path_factory.mktemp("static"), top_k=8)


@pytest.mark.parametrize("kind", ["nnapi", "coreml"])
def test_one_partition_and_the_reference_arithmetic(
    shop: Workshop, kind: str, tmp_path: Path
) -> None:
    if kind == "nnapi":  # a body of several layers
        deep = make_pair(tmp_path, shape={"layers": 2, "final_norm": True})
        shop = Workshop(deep.source(), tmp_path, top_k=8)
    made = make_static(shop, VARIANT_KINDS[kind], tmp_path / kind, SHAPE, None)
    assert made.checked == "static"
    assert "in one partition" in made.checked_with
    reference = TorchRunner(shop.source, 8)
    runner = StaticRunner(shop, made.files[0], SHAPE)
    for step in random_steps(shop.source.spec, shop.source.vocabulary, sizes=SIZES):
        wanted = reference.step(step)
        found = runner.step(step)
        np.testing.assert_allclose(
            found.top_logp, wanted.top_logp, atol=0.1
        )  # the host's embedding is float16
        for row, other in zip(found.rows, wanted.rows, strict=True):
            np.testing.assert_allclose(row, other, atol=0.02)


def test_htp_gets_16_bit_activations_and_8_bit_weights(shop: Workshop, tmp_path: Path) -> None:
    made = make_static(shop, VARIANT_KINDS["npu-qnn"], tmp_path / "qnn", SHAPE, None)
    assert made.precision == "a16w8"
    assert "random steps" in made.notes
    graph = onnx.load(made.files[0]).graph
    weights = {t.name: t for t in graph.initializer}
    assert (
        sum(t.data_type == onnx.TensorProto.UINT8 and len(t.dims) == 2 for t in weights.values())
        >= 12
    )
    zeros = [weights[n.input[2]].data_type for n in graph.node if n.op_type == "QuantizeLinear"]
    assert zeros.count(onnx.TensorProto.UINT16) > 0.9 * len(zeros)
    assert "RMSNormalization" in {n.op_type for n in graph.node}
    export_static(shop, SHAPE, tmp_path / "exact.onnx", opset=23, native_norm=True)
    exact = open_session(tmp_path / "exact.onnx")
    quantized = open_session(made.files[0])
    feeds = calibration_feeds(shop, StaticRunner(shop, made.files[0], SHAPE), ())
    wanted, found = (
        np.stack([one.run(None, step)[0] for step in feeds]) for one in (exact, quantized)
    )
    # 0.03 comes from the weights; with eight-bit activations it would be 0.07.
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.045


def test_a_graph_that_would_fall_apart_is_refused(shop: Workshop, tmp_path: Path) -> None:
    export_static(shop, SHAPE, tmp_path / "m.onnx", opset=23, native_norm=True)
    with pytest.raises(ConfigError, match="three positive numbers"):
        StaticShape(tokens=0)
    with pytest.raises(
        MoaError, match=r"NNAPI would take \d+ of \d+ nodes .* it lacks ai.onnx:RMSNormalization"
    ):
        partitions(tmp_path / "m.onnx", "NNAPI")


@pytest.mark.parametrize(
    "kind", [kind.name for kind in VARIANT_KINDS.values() if kind.form == "static"]
)
def test_drafters_that_have_no_static_form_are_refused_before_any_work(
    pair: Pair, kind: str, tmp_path: Path
) -> None:
    borrows = make_pair(tmp_path, shape={"tli": 1}).drafter
    alone = f"independent:{pair.target}"
    for drafter, why in ((str(borrows), "this one borrows 1"), (alone, "this one is independent")):
        with pytest.raises(
            UsageError, match=f"{kind} is only for MoA drafters .* no borrowed layers: {why}"
        ):
            make_plan(str(pair.target), drafter, ["cpu-int4", kind], None)
