"""Siblings of every family with random weights, at the sizes of published small models: how long their
export takes, how large they are on disk and in memory, and how long a step takes, beside llama.cpp
where it runs the same shape.

Weights are random, so nothing is said of texts. A model that is too large for a small machine has
fewer layers than the published one, and says so. Results are kept in FOLDER as they come: a run that
was ended goes on with what is missing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.kit.figures import table
from benchmarks.kit.progress import say
from benchmarks.real.lines import Lines
from moa.bundle import Bundle
from moa.graph.cache import KVBuffer
from moa.graph.load import LoadedGraph
from moa.graph.step import Call, no_states

_PAST = 256
"""Tokens before a step: a chat of some length."""
_WIDTHS = (1, 8)
_TIMES = 15
_CAPACITY = 1024


@dataclass(frozen=True)
class Model:
    """A shape, and how it is called."""

    family: str
    says: str
    settings: Mapping[str, Any]


_QWEN35 = ["linear_attention"] * 3 + ["full_attention"]
_LFM2 = ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]
_GEMMA = ["sliding_attention"] * 4 + ["full_attention"]


def _shape(
    layers: int,
    width: int,
    feed_forward: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    **more: Any,
) -> dict[str, Any]:
    """`heads`: how many, how many of keys and values, and how wide."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        **more,
    }


MODELS = {
    "qwen2": Model("qwen2", "Qwen2.5 0.5B", _shape(24, 896, 4864, (14, 2, 64), 151936)),
    "qwen3": Model("qwen3", "Qwen3 0.6B", _shape(28, 1024, 3072, (16, 8, 128), 151936)),
    "llama": Model("llama", "Llama 3.2 1B", _shape(16, 2048, 8192, (32, 8, 64), 128256)),
    "gemma3": Model(
        "gemma3",
        "Gemma 3 1B",
        _shape(26, 1152, 6912, (4, 1, 256), 262144, sliding_window=512, query_pre_attn_scalar=256),
    ),
    "lfm2": Model(
        "lfm2",
        "LFM2 350M",
        _shape(16, 1024, 4608, (16, 8, 64), 65536, layer_types=_LFM2),
    ),
    "qwen3_5": Model(
        "qwen3_5",
        "Qwen3.5, 0.8B parameters",
        _shape(
            24,
            1024,
            3584,
            (8, 2, 256),
            248320,
            layer_types=_QWEN35 * 6,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
    ),
    "gemma4": Model(
        "gemma4",
        "Gemma 4 E2B's width, 10 layers",
        _shape(
            10,
            1536,
            6144,
            (8, 1, 256),
            262144,
            layer_types=_GEMMA * 2,
            sliding_window=512,
            global_head_dim=512,
            num_kv_shared_layers=5,
            hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=262144,
        ),
    ),
    "granite": Model("granite", "Granite 4.0 350M", _shape(28, 1024, 2048, (16, 4, 64), 100352)),
    "smollm3": Model(
        "smollm3", "SmolLM3 3B's width, 8 layers", _shape(8, 2048, 11008, (16, 4, 128), 128256)
    ),
    "phi3": Model(
        "phi3",
        "Phi-4-mini's width, 4 layers",
        _shape(
            4,
            3072,
            8192,
            (24, 8, 128),
            200064,
            sliding_window=None,
            rope_scaling=None,
            partial_rotary_factor=0.75,
        ),
    ),
    "olmo3": Model(
        "olmo3",
        "OLMo 3 7B's width, 3 layers",
        _shape(3, 4096, 11008, (32, 32, 128), 100278, sliding_window=4096),
    ),
    "glm4": Model(
        "glm4", "GLM-4 9B's width, 2 layers", _shape(2, 4096, 13696, (32, 2, 128), 151552)
    ),
}
_IN_GGUF = ("gemma3", "llama", "qwen2", "qwen3")
"""Families whose files `testing/gguf_tiny.py` can write."""


@dataclass
class Options:
    """What to measure."""

    families: tuple[str, ...] = tuple(MODELS)
    """Of which families."""
    folder: str = "families"
    """Where models are made, one after another, and results are kept."""


def measure(options: Options) -> dict[str, Any]:
    """Every family that has no result yet."""
    folder = Path(options.folder)
    lines = Lines(folder / "results.jsonl")
    for name in options.families:
        if name not in lines:
            say(f"{name}: {MODELS[name].says}")
            lines.add(name, **_measured(name, folder / name))
    return {"models": [lines.found[name] for name in options.families]}


def _measured(name: str, folder: Path) -> dict[str, Any]:
    """Make a model, export it, and time it; the folder is removed again."""
    from export.build import BuildSettings, build
    from moa.drafters.sibling import PREFIX
    from testing.gguf_tiny import save as save_gguf
    from testing.tiny import save_tiny, tiny

    shutil.rmtree(folder, ignore_errors=True)
    settings = dict(MODELS[name].settings)
    vocabulary = {"vocab_size": settings["vocab_size"], "num_hidden_layers": 1}
    target = save_tiny("llama", folder / "target", **vocabulary)
    small = save_tiny(name, folder / "small", **settings)
    file = None
    if name in _IN_GGUF:
        file = save_gguf(tiny(name, **settings), folder / "small.gguf", kind="Q4_0")
    began = time.perf_counter()
    worked = time.process_time()
    build(
        BuildSettings(
            target=str(target),
            drafter=f"{PREFIX}{small}",
            out=folder / "bundle",
            variants=("cpu-int4",),
            time_steps=False,
        ),
        say,
    )
    found: dict[str, Any] = {
        "model": MODELS[name].says,
        "export_seconds": time.perf_counter() - began,
        "export_processor_seconds": time.process_time() - worked,
        "parameters": sum(file.stat().st_size for file in small.glob("*.safetensors")) // 4,
        "bundle_bytes": sum(
            file.stat().st_size
            for file in (folder / "bundle" / "variants").rglob("*")
            if file.is_file()
        ),
    }
    command = [sys.executable, "-m", "benchmarks.device.families", str(folder / "bundle")]
    if file is not None:
        found["gguf_bytes"] = file.stat().st_size
        command.append(str(file))
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(folder)
    return found | json.loads(ran.stdout)


def _stepped(bundle: Path, file: Path | None) -> dict[str, Any]:
    """Times of steps, and the memory of a process that does nothing else."""
    found: dict[str, Any] = {}
    for threads in (1, 2):
        graph = LoadedGraph.load(Bundle.open(bundle), threads=threads).graph
        rows = KVBuffer(graph.cache)
        rows.reserve(2 * _PAST)
        works: dict[str, Callable[[], Any]] = {}
        silence = np.zeros((1, 1, 1), np.float32)
        for width in _WIDTHS:
            call = Call(graph, width, cache=rows.arrays, records={}, text=True)
            call.ids[0] = range(100, 100 + width)
            call.positions[0] = np.arange(_PAST, _PAST + width)
            call.mask[..., :_PAST] = 0
            if graph.states:
                call.carry(no_states(graph.states), no_states(graph.states))
            works[f"ours_{width}"] = partial(call.run, silence)
        for work in works.values():
            work()
        if threads == 1:
            found["memory"] = _memory()
        if file is not None:
            works |= _llama(file, threads)
        # One thread by the processor's clock, which other programs change little.
        clock = time.process_time if threads == 1 else time.perf_counter
        found |= {
            f"{name}_of_{threads}": 1000 * seconds
            for name, seconds in _in_turn(works, clock).items()
        }
    return found


def _llama(file: Path, threads: int) -> dict[str, Callable[[], Any]]:
    from moa.llama.library import find, load
    from moa.llama.runtime import Run, Runtime, Shape

    shape = Shape(
        sequences=1,
        capacity=_CAPACITY,
        batch=_PAST,
        kv_type="f16",
        gpu_layers=0,
        threads=threads,
    )
    runtime = Runtime(load(find("")), file, shape)
    text = list(range(100, 100 + _PAST))
    runtime.run([Run(0, 0, text, [])])

    def step(width: int) -> None:
        runtime.run([Run(0, _PAST, text[:width], [width - 1])])
        runtime.cut(0, _PAST)

    return {f"llama_{width}": partial(step, width) for width in _WIDTHS}


def _in_turn(
    works: Mapping[str, Callable[[], Any]], clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each, all of them once before the next time."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(_TIMES):
        for name, work in works.items():
            began = clock()
            work()
            times[name].append(clock() - began)
    return {name: median(seconds) for name, seconds in times.items()}


def _memory() -> dict[str, int]:
    """Bytes of this process: its own, and pages of files, which the system may take back."""
    status = Path("/proc/self/status").read_text("ascii")
    kilobytes = {
        line.partition(":")[0]: int(line.split()[1])
        for line in status.splitlines()
        if line.startswith(("RssAnon", "RssFile"))
    }
    return {"own": 1024 * kilobytes["RssAnon"], "of_files": 1024 * kilobytes["RssFile"]}


def tables(result: Mapping[str, Any]) -> str:
    """A line for each model."""
    header = [
        "shape, random weights",
        "parameters",
        "export",
        "bundle, int4",
        "memory: own + pages of files",
        "1 / 8 tokens, one thread",
        "the same, two threads",
        "llama.cpp Q4_0, one thread",
        "two threads",
    ]
    rows = []
    for model in result["models"]:
        memory = model["memory"]
        cells = [
            f"`{model['key']}`: {model['model']}",
            f"{model['parameters'] / 1e6:,.0f} M",
            f"{model['export_processor_seconds']:.0f} s",
            f"{model['bundle_bytes'] / 1e6:,.0f} MB",
            f"{memory['own'] / 1e6:,.0f} + {memory['of_files'] / 1e6:,.0f} MB",
        ]
        for who in ("ours", "llama"):
            for threads in (1, 2):
                names = [f"{who}_{width}_of_{threads}" for width in _WIDTHS]
                if names[0] in model:
                    cells.append(" / ".join(f"{model[name]:.3g}" for name in names) + " ms")
                else:
                    cells.append("-")
        rows.append(cells)
    return table(header, rows) + (
        "\n\nExport and one thread are processor time, two threads time by the clock, on a machine"
        " that others used meanwhile; medians, ours and llama.cpp's step by step in turn. Behind"
        f" {_PAST} tokens. Export is `moa-export build` for `cpu-int4`, with its comparison with"
        " torch, on two cores.\n"
    )


if __name__ == "__main__":
    words = [Path(word) for word in sys.argv[1:]]
    print(json.dumps(_stepped(words[0], words[1] if len(words) > 1 else None)))
