"""Builds the step graph around the layers' graph: embedding before them; head, noise and top-k after them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper

from export.body import BodySpec
from export.storage import WeightedModel
from export.tables import Table


@dataclass(frozen=True)
class Ends:
    """The parts before and after the layers; `draft_to_target` if the head has a reduced vocabulary."""

    embedding: Table
    head: Table
    top_k: int
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    draft_to_target: NDArray[np.int64] | None = None


def step_graph(body: onnx.ModelProto, spec: BodySpec, ends: Ends) -> WeightedModel:
    """The step graph: `docs/export.md` has its inputs and outputs."""
    model = WeightedModel.take(body)
    graph = model.proto.graph
    layers = list(graph.node)
    inputs = {value.name: value for value in graph.input}
    outputs = {value.name: value for value in graph.output}
    del graph.node[:]
    _embed(model, ends)
    graph.node.extend(layers)
    _head(model, ends)
    del graph.input[:]
    graph.input.extend(_step_inputs(spec, inputs))
    del graph.output[:]
    graph.output.extend([_value("top_logp", TensorProto.FLOAT, [1, "N", ends.top_k])])
    graph.output.extend([_value("top_tokens", TensorProto.INT64, [1, "N", ends.top_k])])
    shapes: list[list[int | str]] = [[1, of.kv_heads, "T", of.head_dim] for of in spec.cache for _ in "kv"]
    for name, shape in zip(spec.outputs[1:], shapes, strict=True):
        graph.output.extend([_value(name, outputs[name].type.tensor_type.elem_type, shape)])
    graph.name = "drafter_step"
    model.proto.producer_name = "moa-export"
    del graph.value_info[:]  # the exporter's shapes, which are wrong after quantization
    return model


def _step_inputs(spec: BodySpec, inputs: dict[str, ValueInfoProto]) -> list[ValueInfoProto]:
    """Only inputs that the layers read are inputs of the graph; their dynamic axes get the documented names."""
    shapes: dict[str, list[int | str]] = {"mask": [1, 1, "T", "P+T"], "positions": [1, "T"], "queries": ["N"]}
    if spec.records:
        rows: list[int | str] = [1, spec.records.kv_heads, "R", spec.records.head_dim]
        shapes |= {"record_k": rows, "record_v": rows, "record_mask": [1, 1, 1, "R"]}
    for i, heads in enumerate(spec.cache):
        shapes |= {f"past_{kind}_{i}": [1, heads.kv_heads, "P", heads.head_dim] for kind in "kv"}
    values = [_value("ids", TensorProto.INT64, [1, "T"])]
    values += [_value(n, inputs[n].type.tensor_type.elem_type, shapes[n]) for n in spec.inputs[1:]]
    values += [_value("scale", TensorProto.FLOAT, [1]), _value("noise", TensorProto.FLOAT, [1, "n", "v"])]
    return values


def _embed(model: WeightedModel, ends: Ends) -> None:
    scaled = ends.embedding_scale != 1.0
    ends.embedding.embed(model, "ids", "x_unscaled" if scaled else "x")
    if scaled:
        scale = model.constant("embedding_scale", np.array(ends.embedding_scale, np.float32))
        model.node("Mul", ["x_unscaled", scale], ["x"])


def _head(model: WeightedModel, ends: Ends) -> None:
    cap = ends.logit_softcap
    ends.head.project(model, "hidden", "logits" if cap is None else "logits_uncapped")
    if cap is not None:
        limit = model.constant("logit_softcap", np.array(cap, np.float32))
        small = model.node("Div", ["logits_uncapped", limit], ["logits_over_cap"])
        bent = model.node("Tanh", [small], ["logits_bent"])
        model.node("Mul", [bent, limit], ["logits"])
    scaled = model.node("Mul", ["logits", "scale"], ["logits_scaled"])
    noisy = model.node("Add", [scaled, "noise"], ["logits_noisy"])
    logp = model.node("LogSoftmax", [noisy], ["logp"], axis=-1)
    k = model.constant("top_k", np.array([ends.top_k], np.int64))
    if ends.draft_to_target is None:
        model.node("TopK", [logp, k], ["top_logp", "top_tokens"])
    else:
        model.node("TopK", [logp, k], ["top_logp", "top_draft_ids"])
        ids = model.constant("draft_to_target", ends.draft_to_target)
        model.node("Gather", [ids, "top_draft_ids"], ["top_tokens"])


def _value(name: str, kind: int, shape: list[int | str]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
