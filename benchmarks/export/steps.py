"""Step time of every CPU form compared with the time to read its weights, for shapes from the embedded one to 8B.

Larger shapes have random weights: only their embedding, head and drafter are made. The figures are only valid on an
idle machine.
"""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.kit.figures import table, titled, values_of
from benchmarks.kit.options import one_of
from benchmarks.kit.progress import say, steps
from benchmarks.kit.random_pair import llama
from export.embedded import embedded_sources
from export.forms import OPSET, Blocks, Workshop
from export.measure import step_times
from export.parity import parity
from export.runner import TorchRunner
from export.source import Source, load_source
from export.storage import WeightedModel
from moa.config import DrafterConfig
from moa.demo import paths
from moa.model.drafter import Drafter
from moa.model.partial_target import read_facts
from moa.model.shared import SharedWeights


@dataclass(frozen=True)
class Shape:
    """A random target's dimensions."""

    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    layers: int
    draft_vocabulary: int


SHAPES = {"2k": Shape(2048, 32_000, 16, 4, 16, 8_000), "8b": Shape(4096, 128_256, 32, 8, 32, 32_000)}

TITLES = {
    "embedded": "The embedded drafter: hidden 256, vocabulary 4,096",
    "2k": "Hidden 2,048, vocabulary 32,000, random weights",
    "8b": "8B-Llama-shaped: hidden 4,096, vocabulary 128,256, random weights",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which shapes, and where there is room for them."""

    work: str = ""
    """Folder for random weights, kept, and graphs (8b: 20 GB); without it a temporary one."""
    shapes: tuple[str, ...] = one_of(tuple(TITLES), TITLES)
    """Shapes of drafters."""
    fp32: bool = True
    """Measure the largest graph, too, and compare it with torch."""


def random_pair(shape: Shape, folder: Path) -> tuple[str, str]:
    """A target with nothing but its ends, and a drafter: as much as an export reads."""
    target, drafter = folder / "target", folder / "drafter"
    if (drafter / "config.json").exists():
        return str(target), str(drafter)
    target.mkdir(parents=True, exist_ok=True)
    drafter.mkdir(exist_ok=True)
    heads: dict[str, int] = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    config = llama(shape.hidden, shape.layers, shape.vocabulary, head_dim=shape.hidden // shape.heads, **heads)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(target)
    torch.manual_seed(0)
    ends = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    sizes: dict[str, tuple[int, ...]] = dict.fromkeys(ends[:2], (shape.vocabulary, shape.hidden))
    sizes[ends[2]] = (shape.hidden,)
    save_file({name: _random(size).bfloat16() for name, size in sizes.items()}, target / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):  # any will do: no text is read
        (target / file).write_bytes((paths().tokenizer / file).read_bytes())
    settings = DrafterConfig.for_target(read_facts(target)[0])
    save_file({name: _random(size) for name, size in _weights(settings)}, drafter / "model.safetensors")
    settings.write(drafter)
    return str(target), str(drafter)


def _random(size: tuple[int, ...]) -> torch.Tensor:
    return torch.ones(size) if len(size) == 1 else torch.randn(size) * size[-1] ** -0.5


def _weights(config: DrafterConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        nothing = torch.empty(1, config.hidden_size)
        module = Drafter(config, SharedWeights(nothing, nothing))
    yield from ((name, tuple(value.shape)) for name, value in module.state_dict().items())


def read_speed(nbytes: int, threads: int) -> float:
    """Bytes a second at which so many bytes are summed, again and again: what a one-token step, which reads every
    weight once, cannot beat. Weights that fit in a cache are read at the cache's speed, so the size matters. (A product
    of a matrix and a vector, the obvious yardstick, reads at half of this in torch and gains nothing from threads.)"""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    values = torch.randn(max(1, nbytes // 4))
    repeats = max(1, 2**26 // nbytes)

    def read() -> None:
        for _ in range(repeats):
            values.sum()

    read()
    best = min(timeit.repeat(read, number=1, repeat=5))
    torch.set_num_threads(before)
    return repeats * values.nbytes / best


def bytes_read(model: WeightedModel) -> int:
    """Weights that a one-token step reads: all but a table that is only gathered from."""
    gathered = {node.input[0] for node in model.proto.graph.node if node.op_type.startswith("Gather")}
    others = {name for node in model.proto.graph.node if not node.op_type.startswith("Gather") for name in node.input}
    return sum(value.nbytes for name, value in model.weights.items() if name not in gathered - others)


def rows_of(
    source: Source, work: Path, draft_vocabulary: int, memory: dict[int, float], *, exact: bool
) -> list[dict[str, Any]]:
    """One row for each form, thread count and width."""
    shop = Workshop(source, work / "shop", top_k=16)
    forms: dict[str, Callable[[Workshop], WeightedModel]] = {
        "int8": lambda s: s.int8_graph(OPSET)[0],
        "int4 b32": lambda s: s.block_graph(OPSET, Blocks(32, 4)),
        "int4 b128": lambda s: s.block_graph(OPSET, Blocks(128, 4)),
    }
    if exact:
        forms = {"fp32": lambda s: s.float_graph(OPSET)} | forms
    small = Workshop(source, work / "small", 16, np.arange(draft_vocabulary), _layers=shop._layers)
    rows = []
    plan = [(name, shop, make) for name, make in forms.items()]
    plan.append((f"int4 b128, drafts from {draft_vocabulary}", small, forms["int4 b128"]))
    for name, where, make in steps(plan, "forms"):
        graph = make(where)
        where.folder.mkdir(parents=True, exist_ok=True)
        path = where.folder / "model.onnx"
        files = graph.save(path)
        if name == "fp32":
            difference = parity(TorchRunner(source, 16), path, source.vocabulary, None)
            say(f"parity with torch: {difference:.2e}")
        read, size = bytes_read(graph), sum(file.stat().st_size for file in files)
        del graph
        same_size = {threads: read_speed(read, threads) for threads in (1, 2)}
        for time in step_times(path, source.spec, source.vocabulary, tokens=(1, 8, 16), seconds=1.0):
            row = {
                "form": name,
                "mb": round(size / 1e6, 1),
                "read_mb": round(read / 1e6, 1),
                "threads": time.threads,
                "tokens": time.tokens,
                "ms": time.ms,
            }
            if time.tokens == 1:
                for bound, speed in (("of_memory", memory), ("of_same_size", same_size)):
                    row[bound] = round(1000 * read / speed[time.threads] / time.ms, 3)
            rows.append(row)
    return rows


def measure(options: Options) -> dict[str, Any]:
    """Every form of every shape."""
    memory = {threads: read_speed(2**30, threads) for threads in (1, 2)}
    shapes = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(options.work or folder)
        work.mkdir(parents=True, exist_ok=True)
        for name in options.shapes:
            say(TITLES[name])
            pair = embedded_sources() if name == "embedded" else random_pair(SHAPES[name], work / name)
            source = load_source(*pair)
            reduced = SHAPES[name].draft_vocabulary if name in SHAPES else source.vocabulary // 4
            with tempfile.TemporaryDirectory(dir=work) as graphs:
                shapes[name] = rows_of(source, Path(graphs), reduced, memory, exact=options.fp32)
    return {"memory_gb_s": {str(n): round(speed / 1e9, 1) for n, speed in memory.items()}, "shapes": shapes}


def tables(result: Mapping[str, Any]) -> str:
    """A table for each shape: a form a row."""
    speeds = " and ".join(f"{speed} GB/s with {n}" for n, speed in result["memory_gb_s"].items())
    widths = values_of([row for rows in result["shapes"].values() for row in rows], "tokens")
    header = ["form", "MB", "read a step, MB"]
    header += [f"T={tokens}, {n} thread{'s' * (n > 1)}, ms" for n in (1, 2) for tokens in widths]
    header += ["of memory's speed", "of the speed at that size", "against fp32"]
    parts = []
    for shape, rows in result["shapes"].items():
        lines = []
        first = {row["threads"]: row["ms"] for row in rows if row["form"] == rows[0]["form"] and row["tokens"] == 1}
        for form in values_of(rows, "form"):
            times = {(row["threads"], row["tokens"]): row for row in rows if row["form"] == form}
            one = [times[n, 1] for n in (1, 2)]
            lines.append(
                [form, f"{one[0]['mb']:,.1f}", f"{one[0]['read_mb']:,.1f}"]
                + [f"{times[n, tokens]['ms']:.2f}" for n in (1, 2) for tokens in widths]
                + [" / ".join(f"{row[bound]:.0%}" for row in one) for bound in ("of_memory", "of_same_size")]
                + [" / ".join(f"{first[row['threads']] / row['ms']:.1f}x" for row in one)]
            )
        parts.append((TITLES[shape], table(header, lines)))
    return f"Memory is read at {speeds} threads.\n\n{titled(*parts)}"
