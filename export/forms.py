"""The forms of an exported drafter, operators and precision for each runtime: the layers' graph,
and what comes before and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from export.body import export_body
from export.source import Source
from export.storage import WeightedModel, quiet
from export.tables import BlockTable, FloatTable, Int8Table, Table, UnpackedTable
from moa.drafters.graph import Sizes


@dataclass(frozen=True)
class Blocks:
    """How to store four-bit weights; `tables` are the bits of embedding and head."""

    block: int
    tables: int

    def __str__(self) -> str:
        return f"int4 in blocks of {self.block}" + (
            f", embedding and head int{self.tables}" if self.tables != 4 else ""
        )


BLOCKS = (Blocks(32, 4), Blocks(32, 8))
"""From the fastest to the most accurate; the first with enough agreement is used."""


@dataclass
class Workshop:
    """A source and the intermediate results made from it, each computed once."""

    source: Source
    folder: Path
    top_k: int
    draft_to_target: NDArray[np.int64] | None = None
    int8_cpu: str = "avx512_vnni"
    _int8: dict[int, tuple[Path, str]] = field(default_factory=dict)

    def layers(self, opset: int) -> Path:
        """The layers' graph in float32."""
        path = self.folder / f"layers-{opset}" / "layers.onnx"
        if not path.exists():
            path.parent.mkdir(parents=True)
            export_body(self.source.module.graph_module(), self.source.spec, path, opset=opset)
        return path

    @cached_property
    def head_rows(self) -> NDArray[np.float32]:
        """The head's matrix: only the rows of the draft vocabulary."""
        head = self.source.head()
        return (
            head[: self.source.vocabulary]
            if self.draft_to_target is None
            else head[self.draft_to_target]
        )

    @property
    def tied(self) -> bool:
        """Whether embedding and head share one table."""
        return self.source.tied and self.head_rows.shape == self.source.embedding().shape

    @property
    def parameters(self) -> int:
        """How many weights the graph has."""
        tables = self.source.shared.embedding.numel() + (0 if self.tied else self.head_rows.size)
        return tables + sum(weight.numel() for weight in self.source.module.parameters())

    def float_graph(self, opset: int) -> WeightedModel:
        """Float32, exact."""
        return self._graph(onnx.load(self.layers(opset)), FloatTable)

    def int8_graph(self, opset: int) -> tuple[WeightedModel, str]:
        """Eight bits with dynamically quantized activations; returns also the name of the
        quantizer."""
        if opset not in self._int8:
            work = self.folder / f"int8-{opset}"
            work.mkdir(parents=True, exist_ok=True)
            self._int8[opset] = int8_layers(self.layers(opset), work, self.int8_cpu)
        layers, maker = self._int8[opset]
        return self._graph(onnx.load(layers), Int8Table), maker

    def unpacked_graph(self, opset: int) -> WeightedModel:
        """Weights in eight bits, products in float32."""
        return self._graph(unpacked_layers(self.layers(opset)), UnpackedTable)

    def block_graph(self, opset: int, blocks: Blocks) -> WeightedModel:
        """Four bits in blocks."""
        layers = block_layers(self.layers(opset), bits=4, block=blocks.block)
        return self._graph(
            layers,
            lambda name, rows: BlockTable(name, rows, bits=blocks.tables, block=blocks.block),
        )

    def _graph(
        self, layers: onnx.ModelProto, table: Callable[[str, NDArray[np.float32]], Table]
    ) -> WeightedModel:
        """The step graph: `docs/export.md` has its inputs and outputs."""
        model = WeightedModel.take(layers)
        spec = self.source.spec
        graph = model.proto.graph
        kinds = {
            value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)
        }
        nodes = list(graph.node)
        for part in (graph.node, graph.input, graph.output):
            del part[:]
        embedding = table("embedding", self.source.embedding())
        self._embed(model, embedding)
        graph.node.extend(nodes)
        self._project(model, embedding if self.tied else table("head", self.head_rows))
        best: Sizes = (1, "N", self.top_k)
        inputs: list[tuple[str, int, Sizes]] = [("ids", TensorProto.INT64, (1, "T"))]
        inputs += [(name, kinds[name], shape) for name, shape in spec.inputs.items() if name != "x"]
        inputs += [("scale", TensorProto.FLOAT, (1,)), ("noise", TensorProto.FLOAT, (1, "n", "v"))]
        outputs: list[tuple[str, int, Sizes]]
        outputs = [("top_logp", TensorProto.FLOAT, best), ("top_tokens", TensorProto.INT64, best)]
        outputs += [(name, kinds[name], shape) for name, shape in spec.rows.items()]
        graph.input.extend(helper.make_tensor_value_info(*value) for value in inputs)
        graph.output.extend(helper.make_tensor_value_info(*value) for value in outputs)
        graph.name = "drafter_step"
        model.proto.producer_name = "moa-export"
        del graph.value_info[:]  # the exporter's shapes, which are wrong after quantization
        return model

    def _embed(self, model: WeightedModel, table: Table) -> None:
        factor = self.source.shared.embedding_scale
        table.embed(model, "ids", "x" if factor == 1.0 else "x_unscaled")
        if factor != 1.0:
            scale = model.constant("embedding_scale", np.array(factor, np.float32))
            model.node("Mul", ["x_unscaled", scale], ["x"])

    def _project(self, model: WeightedModel, table: Table) -> None:
        cap = self.source.shared.logit_softcap
        factor = self.source.shared.logit_scale
        uncapped = "logits" if cap is None else "logits_uncapped"
        table.project(model, "hidden", uncapped if factor == 1.0 else "logits_unscaled")
        if factor != 1.0:
            scale = model.constant("logit_scale", np.array(factor, np.float32))
            model.node("Mul", ["logits_unscaled", scale], [uncapped])
        if cap is not None:
            limit = model.constant("logit_softcap", np.array(cap, np.float32))
            small = model.node("Div", ["logits_uncapped", limit], ["logits_over_cap"])
            bent = model.node("Tanh", [small], ["logits_bent"])
            model.node("Mul", [bent, limit], ["logits"])
        scaled = model.node("Mul", ["logits", "scale"], ["logits_scaled"])
        noisy = model.node("Add", [scaled, "noise"], ["logits_noisy"])
        logp = model.node("LogSoftmax", [noisy], ["logp"], axis=-1)
        k = model.constant("top_k", np.array([self.top_k], np.int64))
        if self.draft_to_target is None:
            model.node("TopK", [logp, k], ["top_logp", "top_tokens"])
        else:
            model.node("TopK", [logp, k], ["top_logp", "top_draft_ids"])
            ids = model.constant("draft_to_target", self.draft_to_target)
            model.node("Gather", [ids, "top_draft_ids"], ["top_tokens"])


def int8_layers(layers: Path, work: Path, cpu: str) -> tuple[Path, str]:
    """Dynamically quantized products, written into `work`; returns the model and the quantizer's
    name.

    With optimum installed (which keeps transformers below 5) its quantizer is used, otherwise ONNX
    Runtime's own with the same settings: both give the same bits.
    """
    skip = products_of_activations(onnx.load(layers, load_external_data=False))
    with quiet():
        try:
            return int8_by_optimum(layers, work, cpu, skip)
        except ImportError:
            return int8_by_onnxruntime(layers, work, cpu, skip)


def int8_by_onnxruntime(
    layers: Path, work: Path, cpu: str, skip: Sequence[str]
) -> tuple[Path, str]:
    """`int8_layers` by ONNX Runtime, without the nodes `skip`."""
    path = work / "int8.onnx"
    quantize_dynamic(
        layers,
        path,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        weight_type=QuantType.QUInt8 if cpu == "avx2" else QuantType.QInt8,
        nodes_to_exclude=list(skip),
        extra_options={"WeightSymmetric": True},
        use_external_data_format=True,
    )
    return path, "onnxruntime"


def int8_by_optimum(layers: Path, work: Path, cpu: str, skip: Sequence[str]) -> tuple[Path, str]:
    """`int8_layers` by optimum; an `ImportError` where it is not, or not beside this transformers."""
    from optimum.onnxruntime import ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    recipe = getattr(AutoQuantizationConfig, cpu)(
        is_static=False,
        per_channel=True,
        operators_to_quantize=["MatMul"],
        nodes_to_exclude=list(skip),
    )
    quantizer = ORTQuantizer.from_pretrained(layers.parent, file_name=layers.name)
    quantizer.quantize(save_dir=work, quantization_config=recipe, use_external_data_format=True)
    return work / f"{layers.stem}_quantized.onnx", f"optimum.onnxruntime.ORTQuantizer ({cpu})"


def block_layers(layers: Path, *, bits: int, block: int) -> onnx.ModelProto:
    """Weights in blocks of `block`; products computed in eight bits (accuracy level 4)."""
    model = onnx.load(layers)
    settings = DefaultWeightOnlyQuantConfig(
        block_size=block,
        is_symmetric=True,
        accuracy_level=4,
        bits=bits,
        op_types_to_quantize=("MatMul",),
    )
    quantizer = MatMulNBitsQuantizer(
        model, nodes_to_exclude=products_of_activations(model), algo_config=settings
    )
    with quiet():
        quantizer.process()
    result: onnx.ModelProto = quantizer.model.model
    return result


def unpacked_layers(layers: Path) -> onnx.ModelProto:
    """Weights in eight bits with a scale for each column; products in float32, for the runtime
    unpacks them at load."""
    model = onnx.load(layers)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    products = [
        node.input[1]
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in weights
    ]
    unpacking = []
    for name in dict.fromkeys(products):
        value = numpy_helper.to_array(weights[name])
        scale = np.abs(value).max(axis=-2, keepdims=True) / np.float32(127)
        scale[scale == 0] = 1
        codes = f"{name}.int8"
        wide = f"{name}.wide"
        scales = f"{name}.scale"
        graph.initializer.remove(weights[name])
        graph.initializer.append(
            numpy_helper.from_array(np.rint(value / scale).astype(np.int8), codes)
        )
        graph.initializer.append(numpy_helper.from_array(scale, scales))
        unpacking.append(helper.make_node("Cast", [codes], [wide], wide, to=TensorProto.FLOAT))
        unpacking.append(helper.make_node("Mul", [wide, scales], [name], f"{name}.unpacked"))
    nodes = [*unpacking, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def products_of_activations(model: onnx.ModelProto) -> list[str]:
    """Names of the MatMul nodes without a weight: quantizing attention's own products loses
    accuracy without gain."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "MatMul" and not weights & set(node.input)
    ]
