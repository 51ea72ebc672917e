"""A drafter that can be run and compared: the float32 module in torch, or a graph in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from export.source import Source
from moa.drafters.graph import GraphSpec
from moa.graph.step import open_session
from moa.manifest import KVHeads
from moa.tree import MASKED, additive, ancestors

Array = NDArray[Any]
Float = NDArray[np.float32]


@dataclass
class StepInput:
    """One step: `mask` is boolean `[T, P+T]`, records `[Hc, R, D]` or none, past k and v by
    layer."""

    ids: Sequence[int]
    queries: Sequence[int]
    positions: Sequence[int]
    mask: NDArray[np.bool_]
    past: list[Float]
    record_k: Float | None = None
    record_v: Float | None = None
    feature_rows: Sequence[int] = ()
    """In a drafter of states: for each token the row of the cache in which its feature lies, -1 for
    none."""
    states: Sequence[Float] = ()
    """Running states before the step; none for those before any text."""
    scale: float = 1.0
    """Of the logits: one by the temperature."""
    noise: Float | None = None
    """Of sampling `[N, V]`, over the drafter's own vocabulary; without it the likeliest tokens come
    out."""

    def feeds(self, spec: GraphSpec) -> dict[str, Array]:
        """Returns the step as the inputs of a graph of this spec: each array gets a batch of one in
        front."""
        feeds: dict[str, Array] = {
            "ids": np.array([self.ids], np.int64),
            "positions": np.array([self.positions], np.int64),
            "queries": np.array(self.queries, np.int64),
            "mask": additive(self.mask)[None, None],
            "scale": np.full(1, self.scale, np.float32),
            "noise": np.zeros((1, 1, 1), np.float32) if self.noise is None else self.noise[None],
        }
        if spec.records:
            feeds |= self._record_feeds(spec.records)
        past = self.past
        if spec.features:
            feeds["feature_rows"] = np.array(self.feature_rows, np.int64)
            is_empty = past[0].shape[1] == 0
            if is_empty:
                # One row that nobody sees: features are read from what is there.
                past = [np.zeros((len(rows), 1, rows.shape[2]), np.float32) for rows in past]
                one_column = ((0, 0), (0, 0), (0, 0), (1, 0))
                feeds["mask"] = np.pad(feeds["mask"], one_column, constant_values=MASKED)
        return feeds | _cache_feeds(past) | self._state_feeds(spec)

    def _state_feeds(self, spec: GraphSpec) -> dict[str, Array]:
        """Returns the inputs with running states; they are zeros before any text."""
        feeds = {}
        for number, shape in enumerate(spec.states):
            state = self.states[number] if self.states else np.zeros(shape, np.float32)
            feeds[f"past_state_{number}"] = state[None]
        return feeds

    def _record_feeds(self, heads: KVHeads) -> dict[str, Array]:
        """Returns the inputs with activation records. Without any there is one of zeros that is
        masked, because attention needs a column."""
        key = self.record_k
        value = self.record_v
        masked = 0.0
        if key is None or value is None or key.shape[1] == 0:
            key = np.zeros((heads.kv_heads, 1, heads.head_dim), np.float32)
            value = key
            masked = MASKED
        return {
            "record_k": key[None],
            "record_v": value[None],
            "record_mask": np.full((1, 1, 1, key.shape[1]), masked, np.float32),
        }


def _cache_feeds(past: Sequence[Array]) -> dict[str, Array]:
    """Returns the inputs with the cache, whose arrays `past` are keys, then values, of each
    layer."""
    feeds = {}
    for layer, (keys, values) in enumerate(zip(past[0::2], past[1::2], strict=True)):
        feeds[f"past_k_{layer}"] = keys[None]
        feeds[f"past_v_{layer}"] = values[None]
    return feeds


@dataclass
class StepOutput:
    """Best tokens `[N, K]` (target ids), their log-probabilities, and new cache rows `[H, T, D]`, k
    and v by layer."""

    top_logp: Float
    top_tokens: NDArray[np.int64]
    rows: list[Float]
    states: list[Float] = field(default_factory=list)
    """Running states after the step."""


@dataclass(frozen=True)
class StepParts:
    """Final states `[N, hidden]`, logits `[N, V]` of the whole vocabulary, new cache rows, and
    running states after the step."""

    hidden: Array
    logits: Array
    rows: list[Array]
    states: list[Array]

    def of_words(self, words: NDArray[np.int64]) -> StepParts:
        """The logits of these words alone."""
        return StepParts(self.hidden, self.logits[:, words], self.rows, self.states)


class Runner(Protocol):
    """Runs steps."""

    spec: GraphSpec

    def step(self, step: StepInput) -> StepOutput:
        """One step."""
        ...


class TorchRunner:
    """The float32 reference."""

    def __init__(self, source: Source, top_k: int) -> None:
        self.spec = source.spec
        self.source = source
        self._layers = source.module.graph_module()
        self._top_k = top_k

    def parts(self, step: StepInput) -> StepParts:
        """Returns all that a step computes, by torch in float32."""
        feeds = {
            name: torch.from_numpy(np.ascontiguousarray(value))
            for name, value in step.feeds(self.spec).items()
        }
        module = self.source.module
        with torch.inference_mode():
            feeds |= module.shared.inputs(feeds["ids"], module.weight.dtype)
            hidden, *new = self._layers(*(feeds[name] for name in self.spec.inputs))
            logits = module.shared.logits(hidden)[0, :, : self.source.vocabulary]
        rows, states = split_rows(self.spec, [value.numpy() for value in new])
        return StepParts(hidden[0].numpy(), logits.numpy(), rows, states)

    def logits(self, step: StepInput) -> tuple[torch.Tensor, list[Float]]:
        """Logits of the whole target vocabulary `[N, V]`, and the new cache rows."""
        parts = self.parts(step)
        return torch.from_numpy(parts.logits), parts.rows

    def step(self, step: StepInput) -> StepOutput:
        """One step."""
        parts = self.parts(step)
        logits = parts.logits * np.float32(step.scale)
        if step.noise is not None:
            logits = logits + step.noise
        top = torch.from_numpy(logits).log_softmax(-1).topk(self._top_k, dim=-1)
        return StepOutput(top.values.numpy(), top.indices.numpy(), parts.rows, parts.states)


def split_rows(spec: GraphSpec, new: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """The cache rows, and the running states, of what a step gives in the order of
    `GraphSpec.rows`, `[1, ...]` each."""
    values = [value[0] for value in new]
    cached = 2 * len(spec.cache)  # keys and values of each layer
    return values[:cached], values[cached:]


class OrtRunner:
    """A step graph."""

    def __init__(
        self,
        model: Path,
        spec: GraphSpec,
        *,
        threads: int = 1,
        extra_outputs: tuple[str, ...] = (),
        packs: bool = True,
    ) -> None:
        """Load a graph. Unless it `packs`, its weights stay in their file, and steps are slower."""
        self.spec = spec
        self.session = open_session(model, threads=threads, packs=packs)
        self._outputs = ["top_logp", "top_tokens", *spec.rows, *extra_outputs]

    def run(self, step: StepInput) -> list[Array]:
        """All outputs, as the graph gives them."""
        feeds = {name: np.ascontiguousarray(value) for name, value in step.feeds(self.spec).items()}
        results: list[Array] = self.session.run(self._outputs, feeds)
        return results

    def step(self, step: StepInput) -> StepOutput:
        """One step."""
        logp, tokens, *new = self.run(step)
        rows, states = split_rows(self.spec, new)
        return StepOutput(logp[0], tokens[0], rows, states)


class _StepSizes(NamedTuple):
    """How large a random step is."""

    tokens: int
    queries: int
    past: int
    """Rows in the cache."""
    records: int


# No past, no records, one of each, sizes that the trace did not see.
_SIZES = (
    _StepSizes(tokens=1, queries=1, past=0, records=0),
    _StepSizes(tokens=1, queries=1, past=5, records=0),
    _StepSizes(tokens=1, queries=1, past=64, records=100),
    _StepSizes(tokens=6, queries=6, past=0, records=1),
    _StepSizes(tokens=8, queries=8, past=33, records=17),
    _StepSizes(tokens=16, queries=1, past=0, records=9),
    _StepSizes(tokens=5, queries=3, past=7, records=4),
    _StepSizes(tokens=40, queries=12, past=3, records=1),
)


def random_steps(
    spec: GraphSpec,
    vocabulary: int,
    *,
    seed: int = 0,
    sizes: Sequence[tuple[int, int, int, int]] = _SIZES,
) -> Iterator[StepInput]:
    """Yield one step for each of these sizes (tokens, queries, past rows, records): a random tree
    over a random cache and random records."""
    rng = np.random.default_rng(seed)
    for of_step in sizes:
        yield _random_step(spec, vocabulary, rng, _StepSizes(*of_step))


def _random_step(
    spec: GraphSpec, vocabulary: int, rng: np.random.Generator, size: _StepSizes
) -> StepInput:
    """Returns a step of this size."""
    tokens = size.tokens
    parents = _random_parents(spec, rng, tokens)
    ids = rng.integers(0, vocabulary, tokens).tolist()
    queries = sorted(rng.choice(tokens, size.queries, replace=False).tolist())
    # Random ones, too: a graph must take whatever positions it is given.
    positions = (size.past + rng.integers(0, 4, tokens).cumsum()).tolist()
    sees_past = rng.random((tokens, size.past)) < 0.8
    cache: list[Float] = []
    for layer in spec.cache:
        cache += [_random_rows(layer, size.past, rng), _random_rows(layer, size.past, rng)]
    step = StepInput(
        ids=ids,
        queries=queries,
        positions=positions,
        mask=np.concatenate([sees_past, ancestors(np.array([parents]))[0]], axis=1),
        past=cache,
    )
    if spec.records is not None and size.records:
        step.record_k = _random_rows(spec.records, size.records, rng)
        step.record_v = _random_rows(spec.records, size.records, rng)
    if spec.features:
        step.feature_rows = rng.integers(-1, size.past, tokens).tolist()
    step.states = [rng.standard_normal(shape, np.float32) for shape in spec.states]
    return step


def _random_parents(spec: GraphSpec, rng: np.random.Generator, tokens: int) -> list[int]:
    """Returns the parent of each token of a random tree, -1 for none; of a chain where layers keep
    running states, which cannot branch."""
    parents = [-1]
    for node in range(1, tokens):
        parents.append(int(rng.integers(-1, node)))
    if spec.states:
        return list(range(-1, tokens - 1))
    return parents


def _random_rows(heads: KVHeads, count: int, rng: np.random.Generator) -> Float:
    """Returns random keys or values, `[heads, rows, width]`."""
    return rng.standard_normal((heads.kv_heads, count, heads.head_dim), np.float32)


def empty_cache(spec: GraphSpec) -> list[Float]:
    """A cache of no tokens: keys, then values, of each layer that keeps them."""
    rows: list[Float] = []
    for layer in spec.cache:
        empty = np.zeros((layer.kv_heads, 0, layer.head_dim), np.float32)
        rows += [empty, empty]
    return rows
