"""Quantizes the layers: eight bits with optimum's configurations or of the weights only, four bits in blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

from export.quiet import quiet


def int8_layers(layers: Path, work: Path, cpu: str) -> tuple[Path, str]:
    """Dynamically quantized products, written into `work`; returns the model and the quantizer's name.

    optimum's quantizer cannot be imported with transformers 5; then ONNX Runtime's own is used with the same settings.
    """
    skip = products_of_activations(onnx.load(layers, load_external_data=False))
    with quiet():
        try:
            from optimum.onnxruntime import ORTQuantizer
            from optimum.onnxruntime.configuration import AutoQuantizationConfig
        except ImportError:
            path, maker = work / "int8.onnx", "onnxruntime"
            quantize_dynamic(
                layers,
                path,
                op_types_to_quantize=["MatMul"],
                per_channel=True,
                weight_type=QuantType.QUInt8 if cpu == "avx2" else QuantType.QInt8,
                nodes_to_exclude=skip,
                extra_options={"WeightSymmetric": cpu != "avx2", "ActivationSymmetric": False, "EnableSubgraph": False},
                use_external_data_format=True,
            )
        else:
            maker = f"optimum.onnxruntime.ORTQuantizer ({cpu})"
            recipe = getattr(AutoQuantizationConfig, cpu)(
                is_static=False, per_channel=True, operators_to_quantize=["MatMul"], nodes_to_exclude=skip
            )
            quantizer = ORTQuantizer.from_pretrained(layers.parent, file_name=layers.name)
            quantizer.quantize(save_dir=work, quantization_config=recipe, use_external_data_format=True)
            path = work / f"{layers.stem}_quantized.onnx"
    return path, maker


def block_layers(layers: Path, *, bits: int, block: int) -> onnx.ModelProto:
    """Weights in blocks of `block`; products computed in eight bits (accuracy level 4)."""
    model = onnx.load(layers)
    settings = DefaultWeightOnlyQuantConfig(
        block_size=block, is_symmetric=True, accuracy_level=4, bits=bits, op_types_to_quantize=("MatMul",)
    )
    quantizer = MatMulNBitsQuantizer(model, nodes_to_exclude=products_of_activations(model), algo_config=settings)
    with quiet():
        quantizer.process()
    result: onnx.ModelProto = quantizer.model.model
    return result


def unpacked_layers(layers: Path) -> onnx.ModelProto:
    """Weights in eight bits with a scale for each column; products in float32, for the runtime unpacks them at load."""
    model = onnx.load(layers)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    products = [node.input[1] for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    unpacking = []
    for name in dict.fromkeys(products):
        value = numpy_helper.to_array(weights[name])
        scale = np.abs(value).max(axis=-2, keepdims=True) / np.float32(127)
        scale[scale == 0] = 1
        codes, wide, scales = f"{name}.int8", f"{name}.wide", f"{name}.scale"
        graph.initializer.remove(weights[name])
        graph.initializer.append(numpy_helper.from_array(np.rint(value / scale).astype(np.int8), codes))
        graph.initializer.append(numpy_helper.from_array(scale, scales))
        unpacking.append(helper.make_node("Cast", [codes], [wide], wide, to=TensorProto.FLOAT))
        unpacking.append(helper.make_node("Mul", [wide, scales], [name], f"{name}.unpacked"))
    nodes = [*unpacking, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def products_of_activations(model: onnx.ModelProto) -> list[str]:
    """Names of the MatMul nodes without a weight: quantizing attention's own products loses accuracy without gain."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [node.name for node in model.graph.node if node.op_type == "MatMul" and not weights & set(node.input)]
