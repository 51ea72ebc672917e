"""A graph is judged by what float32 costs in torch, over states that the model itself computes: right
graphs of models with the statistics of real ones pass, wrong ones are refused by their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from transformers import PreTrainedModel

from export import parity
from export.forms import Workshop
from export.kinds import OPSET
from export.parity import compare
from export.runner import TorchRunner
from export.source import Source, load_source
from export.storage import WeightedModel
from moa.errors import MoaError
from testing.tiny import tiny, tiny_tokenizer

LAYERS = 4


def real_statistics(family: str, seed: int = 0, **shape: int) -> PreTrainedModel:
    """A random model whose numbers are those of trained ones: key biases of the order of 100, a few
    words and channels with massive activations, norms that stretch single channels."""
    model = tiny(family, seed=seed, **shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("k_proj.bias"):
                weight.copy_(100 * torch.randn(weight.shape, generator=generator))
            elif "layernorm" in name and weight.ndim == 1:
                channels = torch.randint(0, len(weight), (3,), generator=generator)
                weight[channels] *= 8
            elif name.endswith("layers.1.mlp.down_proj.weight"):
                weight[5] *= 300  # one channel of the stream dwarfs the others from here on
        words = torch.randint(0, model.config.vocab_size, (20,), generator=generator)
        model.get_input_embeddings().weight[words] *= 30  # type: ignore[operator]
    return model


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return str(folder)


def exported(source: Source, folder: Path) -> WeightedModel:
    return Workshop(source, folder, top_k=8).float_graph(OPSET)


def judged(source: Source, graph: WeightedModel, folder: Path) -> float:
    graph.save(folder / "model.onnx")
    return compare(TorchRunner(source, 8), folder / "model.onnx", None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    model = real_statistics("qwen2", num_hidden_layers=LAYERS)
    folder = saved(model, tmp_path_factory.mktemp("model"))
    return load_source(folder, f"independent:{folder}")


@pytest.fixture(scope="module")
def right(source: Source, tmp_path_factory: pytest.TempPathFactory) -> WeightedModel:
    return exported(source, tmp_path_factory.mktemp("right"))


def test_large_biases_and_massive_activations_are_no_difference(
    source: Source, right: WeightedModel, tmp_path: Path
) -> None:
    assert judged(source, right, tmp_path) < 1e-3


MODELS = (
    ("qwen2", 24, 151_936),
    ("qwen2", 28, 151_936),
    ("qwen3", 36, 151_936),
    ("llama", 32, 128_256),
    ("llama", 24, 32_000),
    ("mistral", 32, 32_000),
    ("gemma2", 26, 256_000),
    ("gemma3", 26, 262_144),
)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers", "words"), MODELS)
def test_deep_models_with_large_vocabularies_are_accepted(
    family: str, layers: int, words: int, tmp_path: Path
) -> None:
    seed = layers + words
    model = real_statistics(family, seed, num_hidden_layers=layers, vocab_size=words)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    source = load_source(str(tmp_path / "model"), f"independent:{tmp_path / 'model'}")
    judged(source, exported(source, tmp_path), tmp_path)


# ---- wrong graphs


def weight(graph: WeightedModel, part: str) -> str:
    """The one initializer of this name's end."""
    named = initializers(graph)
    (found,) = [part] if part in named else [name for name in named if name.endswith(part)]
    return found


def initializers(graph: WeightedModel) -> list[str]:
    return [*graph.weights, *(tensor.name for tensor in graph.proto.graph.initializer)]


def value_of(graph: WeightedModel, name: str) -> np.ndarray:
    if name in graph.weights:
        return graph.weights[name]
    (tensor,) = [one for one in graph.proto.graph.initializer if one.name == name]
    return numpy_helper.to_array(tensor)


def replace(graph: WeightedModel, part: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    name = weight(graph, part)
    changed = change(value_of(graph, name).copy())
    if name in graph.weights:
        graph.weights[name] = changed
        return
    for tensor in graph.proto.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(changed, name))


def read_through(graph: WeightedModel, name: str, *nodes: onnx.NodeProto) -> None:
    """Every reader of the input `name` reads the last of `nodes` instead."""
    for node in graph.proto.graph.node:
        for at, given in enumerate(node.input):
            if given == name:
                node.input[at] = nodes[-1].output[0]
    for node in reversed(nodes):
        graph.proto.graph.node.insert(0, node)


def constant(graph: WeightedModel, name: str, value: np.ndarray) -> str:
    return graph.constant(f"wrong.{name}", value)


def rotation_of_another_step(graph: WeightedModel) -> None:
    one = constant(graph, "three", np.array(3, np.int64))
    late = helper.make_node("Mul", ["positions", one], ["positions.late"])
    read_through(graph, "positions", late)


def no_mask(graph: WeightedModel) -> None:
    zero = constant(graph, "zero", np.array(0, np.float32))
    read_through(graph, "mask", helper.make_node("Mul", ["mask", zero], ["mask.none"]))


def hides_the_first_two(graph: WeightedModel) -> None:
    far = constant(graph, "far", np.array(-1e9, np.float32))
    none = constant(graph, "none", np.array([0], np.int64))
    two = constant(graph, "two", np.array([2], np.int64))
    end = constant(graph, "end", np.array([2**31], np.int64))
    columns = constant(graph, "columns", np.array([3], np.int64))
    nodes = (
        helper.make_node("Slice", ["mask", none, two, columns], ["mask.first"]),
        helper.make_node("Slice", ["mask", two, end, columns], ["mask.rest"]),
        helper.make_node("Add", ["mask.first", far], ["mask.hidden"]),
        helper.make_node("Concat", ["mask.hidden", "mask.rest"], ["mask.short"], axis=3),
    )
    read_through(graph, "mask", *nodes)


def cache_row_off_by_one(graph: WeightedModel) -> None:
    last = constant(graph, "last", np.array([-1], np.int64))
    first = constant(graph, "first", np.array([0], np.int64))
    end = constant(graph, "end", np.array([2**31], np.int64))
    rows = constant(graph, "rows", np.array([2], np.int64))
    nodes = (
        helper.make_node("Slice", ["past_k_2", last, end, rows], ["past.last"]),
        helper.make_node("Slice", ["past_k_2", first, last, rows], ["past.before"]),
        helper.make_node("Concat", ["past.last", "past.before"], ["past.turned"], axis=2),
    )
    read_through(graph, "past_k_2", *nodes)


def keys_for_values(graph: WeightedModel) -> None:
    same = helper.make_node("Identity", ["past_k_1"], ["past.swapped"])
    read_through(graph, "past_v_1", same)


MATRICES = 7
"""Of a layer, in order: queries, keys, values, output, and three of the MLP."""


def matrices(graph: WeightedModel, layer: int) -> list[str]:
    """The exporter turns matrices and numbers them, in the order of their use."""
    found = [name for name in graph.weights if name.startswith("val_")]
    assert len(found) == LAYERS * MATRICES
    return found[layer * MATRICES : (layer + 1) * MATRICES]


def swapped_layers(graph: WeightedModel) -> None:
    named = [name for name in initializers(graph) if ".layers.1." in name]
    pairs = [(name, name.replace(".layers.1.", ".layers.2.")) for name in named]
    pairs += zip(matrices(graph, 1), matrices(graph, 2), strict=True)
    for one, two in pairs:
        first, second = value_of(graph, one).copy(), value_of(graph, two).copy()
        replace(graph, one, lambda _, new=second: new)  # type: ignore[misc]
        replace(graph, two, lambda _, new=first: new)  # type: ignore[misc]


def half_the_scale(graph: WeightedModel) -> None:
    """Of attention's scores in layer 1: queries of half the length."""
    replace(graph, "layers.1.self_attn.q_proj.bias", lambda bias: bias / 2)
    replace(graph, matrices(graph, 1)[0], lambda matrix: matrix / 2)


def smaller_mlp(graph: WeightedModel) -> None:
    (down,) = [name for name in matrices(graph, 0) if graph.weights[name].shape == (96, 64)]
    replace(graph, down, lambda matrix: matrix * np.float32(0.999))


def changed(
    part: str, change: Callable[[np.ndarray], np.ndarray]
) -> Callable[[WeightedModel], None]:
    return lambda graph: replace(graph, part, change)


WRONG: dict[str, tuple[Callable[[WeightedModel], None], str]] = {
    "rotation": (rotation_of_another_step, "layer 0's keys"),
    "key bias": (changed("layers.2.self_attn.k_proj.bias", np.zeros_like), "layer 2's keys"),
    "value bias": (changed("layers.1.self_attn.v_proj.bias", np.zeros_like), "layer 1's values"),
    "no mask": (no_mask, "layer 1's keys"),
    "a mask that hides": (hides_the_first_two, "layer 1's keys"),
    "input norm": (changed("layers.3.input_layernorm.weight", np.ones_like), "layer 3's keys"),
    "last norm": (changed("decoder.norm.weight", np.ones_like), "the final states"),
    "head": (changed("table.head.weight", lambda w: np.roll(w, 1, axis=-1)), "the logits"),
    "embedding": (
        changed("table.embedding.weight", lambda w: np.roll(w, 1, axis=0)),
        "layer 0's keys",
    ),
    "layers swapped": (swapped_layers, "layer 1's keys"),
    "a cache row off by one": (cache_row_off_by_one, "layer 3's keys"),
    "keys for values": (keys_for_values, "layer 2's keys"),
    "scale": (half_the_scale, "layer 2's keys"),
    "MLP": (smaller_mlp, "layer 1's keys"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_graph_is_refused_and_its_place_named(
    kind: str, source: Source, right: WeightedModel, tmp_path: Path
) -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(right.proto)
    graph = WeightedModel(proto, dict(right.weights))
    spoil, place = WRONG[kind]
    spoil(graph)
    with pytest.raises(MoaError, match=f"differs from torch in {place}") as refused:
        judged(source, graph, tmp_path)
    assert refused.value.hint


def test_float64_is_computed_in_float64(source: Source) -> None:
    from export.parity import _InDouble, working_steps

    reference = TorchRunner(source, 8)
    _, step = next(iter(working_steps(reference)))
    with _InDouble():
        exact = reference.parts(step)
    source.module.double()
    try:
        assert exact.logits.dtype == np.float64
        assert all(rows.dtype == np.float64 for rows in exact.rows)
    finally:
        source.module.float()


def test_a_running_state_is_judged_as_a_whole_where_one_of_its_rows_is_nearly_zero() -> None:
    spec: Any = SimpleNamespace(cache=(), states=("memory",))
    part = next(part for part in parity._parts(spec) if part.says == "running state 0")

    def error(found: np.ndarray, truth: np.ndarray) -> float:
        outputs: Any = [SimpleNamespace(states=[state]) for state in (found, truth)]
        return parity._error(*map(part.take, outputs))

    truth = np.ones((4, 8, 16))
    truth[2, 3] = 1e-9  # a key's number that cancelled out
    rounded = truth + 1e-7
    assert error(rounded, truth) < 1e-6
    wrong = rounded.copy()
    wrong[1] = 0.0
    assert error(wrong, truth) > 0.1
