"""The drafter's step graph in ONNX Runtime: its inputs, and bound calls."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from moa.errors import BundleError
from moa.graph.control_flow import refuse_control_flow
from moa.process.memory import give_back_free_memory
from moa.process.watch import watched
from moa.tree import MASKED, additive

Array = NDArray[Any]
Float = NDArray[np.float32]
_STEP_BYTES = 2**30
"""Bytes of memory for a step beside the weights. A graph from a stranger could want any amount: an
operator such as `Expand` or `Tile` needs a few bytes to ask for terabytes."""
_UNPACKED = 8
"""Bytes of memory for each byte of the bundle: 4-bit weights may be unpacked to float32."""
_MOST_STATE_BYTES = 2**28
"""Of all running states of a text; a model of 2B parameters keeps 40 MB."""
_arena_limits: list[int] = []
"""The limit in bytes of the arena that all graphs of this process share, once there is one: ONNX
Runtime has one for a process, and its first graph decides."""
_NO_CAPTURE = ("gpu_graph_id", "-1")
"""An entry of run options: this run is not captured as a GPU's graph. A CPU captures none in any
case; but where the entry is missing, ONNX Runtime raises inside of itself at each run, which takes
a sixth of a short step."""
_SHRINK = ("memory.enable_memory_arena_shrinkage", "cpu:0")
"""An entry of run options: what the arena holds of this run is given back behind it."""
_NO_NOISE = np.zeros((1, 1, 1), np.float32)
"""Adds nothing to logits."""
_REQUIRED_INPUTS = ("ids", "positions", "queries", "mask", "scale", "noise")


@dataclass(frozen=True, slots=True)
class Heads:
    """Number and width of heads, of a cache or of the records."""

    count: int
    width: int


def default_threads() -> int:
    """A draft step is short and limited by memory bandwidth, so it cannot use more than a few
    physical cores."""
    return max(1, min(4, usable_cores() // 2))


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 2


def open_session(
    model: Path, *, threads: int = 1, bounded: bool = False, packs: bool = True
) -> Any:
    """Load a graph for the CPU, and refuse one with loops or branches, which could run for ever. A
    `bounded` graph allocates from memory of a limited size, which all graphs of this process share.
    A graph that `packs` copies its matrices into the order in which the processor multiplies
    fastest; else it reads them from its file, which is mapped."""
    refuse_control_flow(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails is raised
    if not packs:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if bounded:
        _bound_memory(model)
        options.add_session_config_entry("session.use_env_allocators", "1")
    # Spinning threads would take CPU time from other work between two short steps.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        with watched():
            return onnxruntime.InferenceSession(
                str(model), options, providers=["CPUExecutionProvider"]
            )
    except Exception as error:  # onnxruntime raises many types without a common base
        raise BundleError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {model}: {error}",
            hint="run `edge-client doctor`",
        ) from None


class StepGraph:
    """One ONNX session, with the shapes of its inputs."""

    def __init__(self, model: Path, *, threads: int = 0) -> None:
        """Load the graph of a drafter's step, and read from its inputs and outputs what it needs; a
        `BundleError` if they are not those of such a graph."""
        self.threads = threads or default_threads()
        self.session = open_session(model, threads=self.threads, bounded=True)
        self._latest_options: Any = None
        """Run options of the latest step, by which it can be ended."""
        self.longest = 0.0
        """Seconds of the longest step so far that has come to its end."""
        self.gives_back = False
        """Set by the caller: the next run is the last over many tokens, whose arrays are as many
        times as large as a step's. Behind it they are given back to the system."""
        shapes = {node.name: node.shape for node in self.session.get_inputs()}
        _check_inputs(shapes, model)
        self.layers = sum(name.startswith("past_k_") for name in shapes)
        self.cache = [_heads(shapes[f"past_k_{layer}"]) for layer in range(self.layers)]
        """Heads of each layer with a cache."""
        self.records = _heads(shapes["record_k"]) if "record_k" in shapes else None
        self.states = _states(shapes, model)
        """Shapes of the running states that other layers keep. With any, a call's tokens are a
        chain, and the states after the last of them come out."""
        self.features = "feature_rows" in shapes
        """Whether each token reads a feature, from a row of the last layer of the cache."""
        self.top = _guesses(self.session, model)
        """Guesses after each token."""
        self.cache_inputs: list[str] = []
        self.outputs = ["top_logp", "top_tokens"]
        for layer in range(self.layers):
            self.cache_inputs += [f"past_k_{layer}", f"past_v_{layer}"]
            self.outputs += [f"new_k_{layer}", f"new_v_{layer}"]
        self.state_inputs = [f"past_state_{place}" for place in range(len(self.states))]
        self.state_outputs = [f"new_state_{place}" for place in range(len(self.states))]

    def run(self, binding: Any) -> None:
        """Run one step over the arrays that are bound. A `BundleError` if it fails, or if it was
        ended from another thread or after a time limit."""
        options = onnxruntime.RunOptions()
        options.add_run_config_entry(*_NO_CAPTURE)
        gives_back = self.gives_back
        self.gives_back = False
        if gives_back:
            options.add_run_config_entry(*_SHRINK)
        self._latest_options = options
        start = perf_counter()
        try:
            with watched(options, self.longest) as seconds:
                self.session.run_with_iobinding(binding, options)
        except Exception as error:  # onnxruntime raises many types without a common base
            if options.terminate:
                raise BundleError(
                    "a step of the drafter's graph was ended: nobody waited for it any more,"
                    f" or it took more than {seconds:.0f} s"
                ) from None
            # The runtime's message begins with places in its own code: its end says what failed.
            said = " ".join(str(error).split())[-160:]
            raise BundleError(
                f"the drafter's graph failed, with at most {_arena_limits[0] >> 20} MiB: {said}",
                hint="run `edge-client doctor`, or use another bundle",
            ) from None
        self.longest = max(self.longest, perf_counter() - start)
        if gives_back:
            give_back_free_memory()

    def end_steps(self) -> None:
        """Let the step that runs in another thread fail at its next operator."""
        if self._latest_options is not None:
            self._latest_options.terminate = True


def layer_rows(layers: Sequence[Heads], rows: int) -> list[Float]:
    """Zeros for so many rows: the keys and then the values of each layer, as arrays of `[1, heads,
    rows, width]`."""
    shapes = [(1, heads.count, rows, heads.width) for heads in layers]
    return [np.zeros(shape, np.float32) for shape in shapes for _ in ("keys", "values")]


class Call:
    """Calls with `tokens` tokens at a time, over fixed arrays: those of a text, or of one level of
    a tree.

    All arrays are bound once (IOBinding). Before a run the small inputs are filled in place; the
    next run overwrites the results.
    """

    def __init__(
        self,
        graph: StepGraph,
        tokens: int,
        *,
        cache: Sequence[Float],
        records: Mapping[str, Float],
        text: bool,
    ) -> None:
        """Make the arrays of a call over so many tokens, and bind them. `cache` (keys and values of
        each layer) and `records` (inputs by name) are read at every run. Guesses are computed after
        the last token of a `text`, or after each token of a level of a tree."""
        self._graph = graph
        self.cache = cache
        self.records = records
        self.masked_for = -1
        """Set by the caller: the version of its cache for which `mask` was made."""
        self.ids = np.zeros((1, tokens), np.int64)
        self.positions = np.zeros((1, tokens), np.int64)
        self.mask = np.full((1, 1, tokens, cache[0].shape[2] + tokens), MASKED, np.float32)
        """What each token sees: of the cache, as the caller says; of these tokens, those of a text
        see the ones before them and themselves, those of a tree's level only themselves."""
        among_tokens = np.tri(tokens, dtype=np.bool_) if text else np.eye(tokens, dtype=np.bool_)
        self.mask[0, 0, :, -tokens:] = additive(among_tokens)
        self.scale = np.ones(1, np.float32)
        self.feature_rows = np.full(tokens, -1, np.int64)
        """Of a drafter of states: where each token's feature lies in the cache, -1 for none."""
        first_query = tokens - 1 if text else 0
        queries = np.arange(first_query, tokens)
        self.top_logp = np.empty((1, queries.size, graph.top), np.float32)
        """Best first, for every query."""
        self.top_tokens = np.empty((1, queries.size, graph.top), np.int64)
        self.rows = layer_rows(graph.cache, tokens)
        """The new cache rows."""

        self._binding = self._bound(queries)
        if graph.states:
            self.carry(no_states(graph.states), no_states(graph.states))
        self._noise: Float | None = None
        """The noise that is bound."""

    def _bound(self, queries: NDArray[np.int64]) -> Any:
        """Returns a binding of the graph's inputs and outputs to the arrays of this call. `queries`
        are the tokens after which guesses are computed."""
        graph = self._graph
        inputs: dict[str, Array] = {
            "ids": self.ids,
            "positions": self.positions,
            "mask": self.mask,
            "scale": self.scale,
            "queries": queries,
        }
        inputs.update(zip(graph.cache_inputs, self.cache, strict=True))
        inputs.update(self.records)
        if graph.features:
            inputs["feature_rows"] = self.feature_rows
        binding = graph.session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        outputs: list[Array] = [self.top_logp, self.top_tokens, *self.rows]
        for name, out in zip(graph.outputs, outputs, strict=True):
            binding.bind_output(name, "cpu", 0, out.dtype.type, out.shape, out.ctypes.data)
        return binding

    def carry(self, before: Sequence[Float], after: Sequence[Float]) -> None:
        """Let the next runs begin from the running states `before`, and write the states after
        their last token into the arrays `after`. No array may be in both: a run reads one while it
        writes the other."""
        for name, state in zip(self._graph.state_inputs, before, strict=True):
            self._binding.bind_cpu_input(name, state)
        for name, out in zip(self._graph.state_outputs, after, strict=True):
            self._binding.bind_output(name, "cpu", 0, out.dtype.type, out.shape, out.ctypes.data)
        self._carried = before, after  # the binding holds addresses alone

    def run(self, noise: Float) -> float:
        """Run the graph over the arrays of this call, and return the seconds that it took. `noise`
        is added to the logits before guesses are sorted: zeros `[1, 1, 1]` for none."""
        graph = self._graph
        start = perf_counter()
        if noise is not self._noise:
            self._binding.bind_cpu_input("noise", noise)
            self._noise = noise
        graph.run(self._binding)
        if noise.size > 1:
            # The binding keeps it until another is bound: of 152,000 words that of 16 tokens takes
            # 10 MB.
            self._binding.bind_cpu_input("noise", _NO_NOISE)
            self._noise = None
        return perf_counter() - start


def no_states(shapes: Sequence[tuple[int, ...]]) -> list[Float]:
    """Running states before any text."""
    return [np.zeros(shape, np.float32) for shape in shapes]


def memory_limit(model: Path) -> int:
    """Bytes of memory for the graphs of a process whose first one is this."""
    size = sum(file.stat().st_size for file in model.parent.iterdir() if file.is_file())
    return _STEP_BYTES + _UNPACKED * size


def _bound_memory(model: Path) -> None:
    """Bound what all graphs of this process may allocate, before the first one, `model`, does."""
    if _arena_limits:
        return  # a process has one arena, which its first graph has made
    limit = memory_limit(model)
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu",
        onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR,
        0,
        onnxruntime.OrtMemType.DEFAULT,
    )
    arena = onnxruntime.OrtArenaCfg({"max_mem": limit})
    onnxruntime.create_and_register_allocator(memory, arena)
    _arena_limits.append(limit)


def _check_inputs(names: Collection[str], model: Path) -> None:
    """Raise a `BundleError` if a graph lacks an input that every drafter's step has."""
    for name in _REQUIRED_INPUTS:
        if name not in names:
            raise BundleError(f"{model} is not a drafter step graph: input {name} is missing")


def _guesses(session: Any, model: Path) -> int:
    """Returns how many guesses a graph makes after each token; a `BundleError` if that is not
    fixed."""
    count = session.get_outputs()[0].shape[-1]
    if not isinstance(count, int):
        raise BundleError(
            f"{model} is not a drafter step graph: the number of guesses is not fixed"
        )
    return count


def _states(shapes: Mapping[str, Sequence[int | str]], model: Path) -> list[tuple[int, ...]]:
    """The shapes of the running states among a graph's inputs, in order; a `BundleError` where one
    is not fixed, or where all of them would take too much memory."""
    count = sum(name.startswith("past_state_") for name in shapes)
    found: list[tuple[int, ...]] = []
    numbers = 0
    for place in range(count):
        shape = shapes.get(f"past_state_{place}", ())
        sizes = tuple(size for size in shape if isinstance(size, int) and size > 0)
        numbers += math.prod(sizes)
        if not shape or len(sizes) < len(shape) or 4 * numbers > _MOST_STATE_BYTES:
            raise BundleError(f"{model} keeps running states of an impossible size: {list(shape)}")
        found.append(sizes)
    return found


def _heads(shape: Sequence[int | str]) -> Heads:
    """The number and width of the heads of an input `[1, heads, rows, width]`; a `BundleError` if
    they are not fixed. In place of a size that varies a shape has a name."""
    count = shape[1]
    width = shape[3]
    if not isinstance(count, int) or not isinstance(width, int):
        raise BundleError(
            f"a cache of shape {list(shape)} has no fixed heads: the bundle is damaged"
        )
    return Heads(count, width)
