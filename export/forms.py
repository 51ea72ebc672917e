"""The forms of an exported drafter, operators and precision for each runtime: the layers' graph,
and what comes before and after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

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
from export.progress import Counted, uncounted
from export.source import Source
from export.storage import WeightedModel, quiet
from export.tables import BlockTable, FloatTable, Int8Table, Table, UnpackedTable
from moa.drafters.graph import Sizes

MakeTable = Callable[[str, NDArray[np.float32]], Table]
"""Makes a table of its name and the float32 rows of a matrix."""
_Value = tuple[str, int, Sizes]
"""An input or output of a graph: its name, its type in ONNX, and its sizes."""


@dataclass(frozen=True)
class Blocks:
    """How to store four-bit weights."""

    block: int
    """Weights that share a scale."""
    tables: int
    """Bits of embedding and head."""

    def __str__(self) -> str:
        text = f"int4 in blocks of {self.block}"
        if self.tables != 4:
            text += f", embedding and head int{self.tables}"
        return text


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
    counted: Counted = uncounted
    """Is told of each matrix that was quantized to four bits, how many weights it has."""
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
        if self.draft_to_target is None:
            return head[: self.source.vocabulary]
        return head[self.draft_to_target]

    @property
    def tied(self) -> bool:
        """Whether embedding and head share one table."""
        return self.source.tied and self.head_rows.shape == self.source.embedding().shape

    @property
    def parameters(self) -> int:
        """How many weights the graph has."""
        count = self.source.shared.embedding.numel()
        if not self.tied:
            count += self.head_rows.size
        return count + sum(weight.numel() for weight in self.source.module.parameters())

    def float_graph(self, opset: int) -> WeightedModel:
        """The graph in float32, exact."""
        return self._graph(WeightedModel.read(self.layers(opset)), FloatTable)

    def int8_graph(self, opset: int) -> tuple[WeightedModel, str]:
        """Returns the graph with weights in eight bits and activations that are quantized as it
        runs, and the quantizer's name."""
        if opset not in self._int8:
            work = self.folder / f"int8-{opset}"
            work.mkdir(parents=True, exist_ok=True)
            self._int8[opset] = int8_layers(self.layers(opset), work, self.int8_cpu)
        layers, maker = self._int8[opset]
        return self._graph(WeightedModel.read(layers), Int8Table), maker

    def unpacked_graph(self, opset: int) -> WeightedModel:
        """The graph with weights in eight bits, and products in float32."""
        return self._graph(unpacked_layers(self.layers(opset)), UnpackedTable)

    def block_graph(self, opset: int, blocks: Blocks) -> WeightedModel:
        """The graph in four bits, in blocks."""

        def table(name: str, rows: NDArray[np.float32]) -> Table:
            return BlockTable(
                name, rows, bits=blocks.tables, block=blocks.block, counted=self.counted
            )

        layers = block_layers(self.layers(opset), bits=4, block=blocks.block, counted=self.counted)
        return self._graph(layers, table)

    def _graph(self, model: WeightedModel, table: MakeTable) -> WeightedModel:
        """Add to a drafter's layers, `model`, what makes them its whole step, and return that: the
        embedding, the head and the choice of the likeliest tokens. `table` decides in which
        precision the matrices are stored; `docs/export.md` has the inputs and outputs."""
        graph = model.proto.graph
        types = {
            value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)
        }
        layer_nodes = list(graph.node)
        del graph.node[:]
        del graph.input[:]
        del graph.output[:]
        # Nodes are in the order in which they are computed.
        head = self._embeddings(model, table)
        graph.node.extend(layer_nodes)
        self._project(model, head)
        graph.input.extend(helper.make_tensor_value_info(*value) for value in self._inputs(types))
        graph.output.extend(helper.make_tensor_value_info(*value) for value in self._outputs(types))
        graph.name = "drafter_step"
        model.proto.producer_name = "moa-export"
        del graph.value_info[:]  # the exporter's shapes, which are wrong after quantization
        return model

    def _embeddings(self, model: WeightedModel, table: MakeTable) -> Table:
        """Add the nodes from the tokens' ids to the layers' inputs. Returns the table of the head,
        which may be the embedding's."""
        shared = self.source.shared
        embedding = table("embedding", self.source.embedding())
        head = embedding if self.tied else table("head", self.head_rows)
        self._embed(model, embedding, "x", shared.embedding_scale)
        if shared.per_layer is not None:
            per_layer = table("per_layer", self.source.per_layer())
            self._embed(model, per_layer, "per_layer", shared.per_layer_scale)
        return head

    def _inputs(self, types: Mapping[str, int]) -> list[_Value]:
        """Returns the inputs of the whole step; `types` are those of the layers' values."""
        spec = self.source.spec
        inputs: list[_Value] = [("ids", TensorProto.INT64, (1, "T"))]
        for name, shape in spec.inputs.items():
            if name not in spec.embedded:  # else the graph makes it of the ids
                inputs.append((name, types[name], shape))
        inputs.append(("scale", TensorProto.FLOAT, (1,)))
        inputs.append(("noise", TensorProto.FLOAT, (1, "n", "v")))
        return inputs

    def _outputs(self, types: Mapping[str, int]) -> list[_Value]:
        """Returns the outputs of the whole step; `types` are those of the layers' values."""
        best: Sizes = (1, "N", self.top_k)
        outputs: list[_Value] = [
            ("top_logp", TensorProto.FLOAT, best),
            ("top_tokens", TensorProto.INT64, best),
        ]
        for name, shape in self.source.spec.rows.items():
            outputs.append((name, types[name], shape))
        return outputs

    def _embed(self, model: WeightedModel, table: Table, out: str, factor: float) -> None:
        """From `ids` to rows of a table, times a factor."""
        if factor == 1.0:
            table.embed(model, "ids", out)
            return
        table.embed(model, "ids", f"{out}_unscaled")
        name = "embedding_scale" if out == "x" else f"{out}_scale"
        scale = model.constant(name, np.array(factor, np.float32))
        model.node("Mul", [f"{out}_unscaled", scale], [out])

    def _project(self, model: WeightedModel, table: Table) -> None:
        """Add the nodes from the layers' `hidden` states to the likeliest tokens, `top_tokens`, and
        their log-probabilities, `top_logp`."""
        self._logits(model, table)
        # `scale` is 1 / temperature, and `noise` makes sampling a choice of the largest.
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

    def _logits(self, model: WeightedModel, table: Table) -> None:
        """Add the nodes from the layers' `hidden` states to `logits`."""
        cap = self.source.shared.logit_softcap
        factor = self.source.shared.logit_scale
        uncapped = "logits" if cap is None else "logits_uncapped"
        if factor == 1.0:
            table.project(model, "hidden", uncapped)
        else:
            table.project(model, "hidden", "logits_unscaled")
            scale = model.constant("logit_scale", np.array(factor, np.float32))
            model.node("Mul", ["logits_unscaled", scale], [uncapped])
        if cap is None:
            return
        # Some models bend their logits: cap * tanh(logits / cap).
        limit = model.constant("logit_softcap", np.array(cap, np.float32))
        over_cap = model.node("Div", [uncapped, limit], ["logits_over_cap"])
        bent = model.node("Tanh", [over_cap], ["logits_bent"])
        model.node("Mul", [bent, limit], ["logits"])


def int8_layers(layers: Path, work: Path, cpu: str) -> tuple[Path, str]:
    """Write the layers with matrix products in eight bits into `work`; returns the model's path and
    the quantizer's name.

    optimum's quantizer is used if it is installed (it keeps transformers below 5), else ONNX
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
    """Do the work of `int8_layers` with ONNX Runtime's quantizer; the nodes `skip` stay in
    float32."""
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
    """Do the work of `int8_layers` with optimum's quantizer; the nodes `skip` stay in float32. An
    `ImportError` if optimum is not installed, or not for this transformers."""
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


def block_layers(
    layers: Path, *, bits: int, block: int, counted: Counted = uncounted
) -> WeightedModel:
    """Returns the layers with weights of `bits` bits that share a scale in blocks of `block`; their
    products are computed in eight bits (accuracy level 4). `counted` is told of each matrix."""
    skip = products_of_activations(onnx.load(layers, load_external_data=False))
    model = WeightedModel.read(layers)
    settings = DefaultWeightOnlyQuantConfig(
        block_size=block,
        is_symmetric=True,
        accuracy_level=4,
        bits=bits,
        op_types_to_quantize=("MatMul",),
    )
    quantizer = MatMulNBitsQuantizer(model.proto, nodes_to_exclude=skip, algo_config=settings)
    _give_matrices(quantizer, model, skip, counted)
    with quiet():
        quantizer.process()
    read = {name for node in model.proto.graph.node for name in node.input}
    model.weights = {name: value for name, value in model.weights.items() if name in read}
    return model


def _give_matrices(
    quantizer: MatMulNBitsQuantizer, model: WeightedModel, skip: Sequence[str], counted: Counted
) -> None:
    """Let a quantizer of this model's graph have each matrix at its turn, and tell `counted` of it
    with the number of its weights. The library has no call for that, and takes a graph with all
    matrices in memory: its function for one node is wrapped."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.proto.graph.initializer}
    sizes |= {name: value.size for name, value in model.weights.items()}
    products = [node for node in model.proto.graph.node if node.op_type == "MatMul"]
    total = len(products) - len(skip)
    quantize = quantizer.node_quantizer.quantize
    number = 0

    def quantize_one(node: onnx.NodeProto, graphs: list[onnx.GraphProto]) -> Any:
        nonlocal number
        name = node.input[1]
        # Here the library finds the matrix, and adds what it makes of it.
        beside = onnx.GraphProto()
        if name in model.weights:
            beside.initializer.append(numpy_helper.from_array(model.weights[name], name))
        quantized = quantize(node, [*graphs, beside])
        for tensor in beside.initializer:
            if tensor.name != name:
                model.add(tensor)
        number += 1
        counted(sizes.get(name, 0), f"matrix {number} of {total} of the layers")
        return quantized

    quantizer.node_quantizer.quantize = quantize_one


def unpacked_layers(layers: Path) -> WeightedModel:
    """Returns the layers with weights in eight bits, a scale for each column, and nodes that
    multiply the two into float32: the runtime does that once, when it loads the graph."""
    model = WeightedModel.read(layers)
    graph = model.proto.graph
    small = {tensor.name: tensor for tensor in graph.initializer}
    factors = [node.input[1] for node in graph.node if node.op_type == "MatMul"]
    unpacking: list[onnx.NodeProto] = []
    for name in dict.fromkeys(factors):  # each once
        if name in small:
            weight = numpy_helper.to_array(small[name])
            graph.initializer.remove(small[name])
        elif name in model.weights:
            weight = model.weights.pop(name)
        else:
            continue  # an activation
        codes, scale = _codes_and_scale(weight)
        model.constant(f"{name}.int8", codes)
        model.constant(f"{name}.scale", scale)
        unpacking += _unpacking_nodes(name)
    nodes = [*unpacking, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def _codes_and_scale(
    weight: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Returns a matrix as integers of eight bits, and the scale of each of its columns."""
    scale = np.abs(weight).max(axis=-2, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1  # a column of zeros
    return np.rint(weight / scale).astype(np.int8), scale


def _unpacking_nodes(name: str) -> list[onnx.NodeProto]:
    """Returns the nodes that multiply a matrix's integers and scales, which are stored as
    `name.int8` and `name.scale`, into the float32 matrix `name`."""
    wide = f"{name}.wide"
    to_float = helper.make_node("Cast", [f"{name}.int8"], [wide], wide, to=TensorProto.FLOAT)
    multiply = helper.make_node("Mul", [wide, f"{name}.scale"], [name], f"{name}.unpacked")
    return [to_float, multiply]


def products_of_activations(model: onnx.ModelProto) -> list[str]:
    """Names of the MatMul nodes without a weight: quantizing attention's own products loses
    accuracy without gain."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "MatMul" and not weights & set(node.input)
    ]
