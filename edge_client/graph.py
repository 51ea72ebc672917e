"""The drafter's step graph in ONNX Runtime: what it wants, and one call of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from moa.errors import BundleError

Array = NDArray[Any]
_WANTED = ("ids", "positions", "queries", "mask", "scale", "noise")


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads and their width: of a cache or of the records."""

    count: int
    width: int


def default_threads() -> int:
    """A draft step is short and bound by memory: a few physical cores are all it can use."""
    return max(1, min(4, (os.cpu_count() or 2) // 2))


class StepGraph:
    """One ONNX session, with the shapes that its inputs declare.

    `run_seconds` and `runs` add up the time inside ONNX Runtime, so that the client's own overhead can be told apart.
    """

    def __init__(self, model: Path, *, threads: int = 0, providers: Sequence[str] = ("CPUExecutionProvider",)) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or default_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning workers would take the core from whatever else the device does between two short steps.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self.session = onnxruntime.InferenceSession(str(model), options, providers=list(providers))
        except Exception as error:  # onnxruntime raises many types without a common base
            raise BundleError(f"ONNX Runtime cannot load {model}: {error}", hint="run `edge-client doctor`") from None
        self.threads = options.intra_op_num_threads
        self.run_seconds, self.runs = 0.0, 0
        shapes = {node.name: node.shape for node in self.session.get_inputs()}
        if missing := [name for name in _WANTED if name not in shapes]:
            raise BundleError(f"{model} is no drafter step graph: input {missing[0]} is missing")
        self.layers = sum(name.startswith("past_k_") for name in shapes)
        self.cache = Heads(*_heads(shapes["past_k_0"]))
        self.records = Heads(*_heads(shapes["record_k"])) if "record_k" in shapes else None
        self.cache_inputs = [f"past_{part}_{layer}" for layer in range(self.layers) for part in "kv"]
        self.outputs = ["top_logp", "top_tokens", *(f"new_{p}_{layer}" for layer in range(self.layers) for p in "kv")]

    def run(self, feeds: Mapping[str, Array]) -> tuple[NDArray[np.float32], NDArray[np.int64], list[Array]]:
        """Top log-probabilities and tokens, `[queries, K]`, and the new cache rows, `[1, heads, T, width]` each."""
        start = perf_counter()
        top_logp, top_tokens, *rows = self.session.run(self.outputs, dict(feeds))
        self.run_seconds += perf_counter() - start
        self.runs += 1
        return top_logp[0], top_tokens[0], rows


def _heads(shape: Sequence[int | str]) -> tuple[int, int]:
    count, width = shape[1], shape[3]
    if not isinstance(count, int) or not isinstance(width, int):
        raise BundleError(f"a cache of shape {list(shape)} does not tell its heads: the bundle is damaged")
    return count, width
