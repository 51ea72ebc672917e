"""Whether an exported graph computes what torch does.

Both run the same steps over states that the model itself has computed: a text, then trees and single
tokens behind it. Torch runs them a second time in float64. The graph's error is then judged beside
float32's own in torch, output by output from the first layer to the last: how far errors grow is a
property of the model, and differs by orders of magnitude; that two ways to compute in float32 err
alike is a property of a right graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from export.progress import Counted, uncounted
from export.runner import OrtRunner, StepInput, StepParts, TorchRunner, empty_cache, split_rows
from export.source import Source
from moa.drafters.graph import GraphSpec
from moa.errors import MoaError
from moa.tree import ancestors

FACTOR = 32.0
"""How many times float32's own error in torch a graph's may be. Right graphs reach 5; the mildest
wrong one, with a bias left out, a thousand."""
_LEAST_ERROR = 4 * float(np.finfo(np.float32).eps)
"""Of a row's length: where torch's error is below this, that is luck."""
_ROWS_AT_ONCE = 2**14
"""Rows of a matrix that become float64 at a time: a head of 152k words would take a gigabyte."""
_PROMPT = 48
"""Tokens of the text that all steps continue."""
_SAMPLE = (
    "The harbour was quiet when Anna counted the boats: 17 in the morning, 25 at night. "
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2\n\n"
    "Why does the tide turn? Because the moon pulls, and the sea follows."
)
"""English, code and numbers."""


@dataclass(frozen=True)
class Case:
    """A step to compare: so many tokens and queries behind `past` tokens of the text, with
    records."""

    says: str
    tokens: int
    queries: int
    past: int
    records: int
    unused: int = 0
    """Rows of the cache behind these that nobody sees, as a cache that grows has them."""


_TEXT = Case("a text", _PROMPT, 1, 0, 1)
_CASES = (
    Case("one token alone", 1, 1, 0, 0),
    _TEXT,
    Case("a tree behind a text", 16, 12, 33, 17, unused=7),
    Case("one token behind a text", 1, 1, _PROMPT, 100),
    Case("a small tree without records", 5, 3, 7, 0),
)


STEPS_COMPARED = len(_CASES)


def compare(
    reference: TorchRunner,
    model: Path,
    draft_to_target: NDArray[np.int64] | None,
    counted: Counted = uncounted,
) -> float:
    """Compare an exported graph with torch, step by step; returns the graph's largest error, as a
    share of the length of an output's row. A `MoaError` names the first output that is wrong.
    `draft_to_target` are the target's ids of a smaller draft vocabulary, if there is one; `counted`
    is told of each step."""
    # A copy of the graph that also tells its final states and logits.
    beside = model.with_name("parity.onnx")
    proto = onnx.load(model, load_external_data=False)
    for name in ("hidden", "logits"):
        proto.graph.output.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        )
    onnx.save(proto, beside)
    try:
        # Beside torch's weights there is no room for a copy of the graph's, for a few steps.
        outputs = ("hidden", "logits")
        runner = OrtRunner(beside, reference.spec, extra_outputs=outputs, packs=False)
        errors = []
        for case, step in working_steps(reference):
            errors.append(_compared(reference, runner, case, step, draft_to_target))
            counted(1, f"step {len(errors)} of {STEPS_COMPARED}")
        return max(errors)
    finally:
        beside.unlink()


def working_steps(
    reference: TorchRunner, cases: Sequence[Case] = _CASES
) -> Iterator[tuple[Case, StepInput]]:
    """Yield each case with its step, as a device takes it: over a cache that the model itself has
    filled with a text."""
    source = reference.source
    spec = reference.spec
    rng = np.random.default_rng(0)
    text = _sample_ids(source, rng)
    records = _records(source, max(case.records for case in cases))
    cache = reference.parts(_beginning(text, _PROMPT, spec)).rows
    for case in cases:
        tokens = text if case is _TEXT else rng.choice(text, case.tokens).tolist()
        step = _step(case, tokens, cache, records, rng, spec)
        if spec.states and case.past:
            step.states = reference.parts(_beginning(text, case.past, spec)).states
        yield case, step


def _beginning(text: Sequence[int], count: int, spec: GraphSpec) -> StepInput:
    """Returns the step over a text's first `count` tokens, on an empty cache."""
    return StepInput(
        ids=text[:count],
        queries=[count - 1],
        positions=list(range(count)),
        mask=np.tri(count, dtype=np.bool_),
        past=empty_cache(spec),
        feature_rows=[-1] * count if spec.features else (),
    )


def _step(
    case: Case,
    ids: list[int],
    cache: list[NDArray[np.float32]],
    records: tuple[NDArray[np.float32], NDArray[np.float32]] | None,
    rng: np.random.Generator,
    spec: GraphSpec,
) -> StepInput:
    """Returns the step of a case over these tokens, behind the first rows of the cache. The tokens
    are a chain, or a random tree if there are several queries, the tokens whose predictions are
    wanted."""
    parents = _parents(case, rng, spec)
    queries = [case.tokens - 1]
    if case.queries > 1:
        queries = sorted(rng.choice(case.tokens, case.queries, replace=False).tolist())
    step = StepInput(
        ids=ids,
        queries=queries,
        positions=[case.past + depth for depth in _depths(parents)],
        mask=np.concatenate([_sees_past(case), ancestors(np.array([parents]))[0]], axis=1),
        past=[rows[:, : case.past + case.unused] for rows in cache],
    )
    if records is not None and case.records:
        keys, values = records
        step.record_k = keys[:, : case.records]
        step.record_v = values[:, : case.records]
    if spec.features:
        step.feature_rows = rng.integers(-1, case.past, case.tokens).tolist()
    return step


def _depths(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each node of a tree: 0 for one without a parent."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _sees_past(case: Case) -> NDArray[np.bool_]:
    """Returns which rows of the cache each token of a case sees, `(tokens, past + unused)`."""
    mask = np.zeros((case.tokens, case.past + case.unused), np.bool_)
    mask[:, : case.past] = True
    if case.unused:  # a rejected branch leaves a row that nobody sees, too
        mask[:, case.past // 2] = False
    return mask


def _parents(case: Case, rng: np.random.Generator, spec: GraphSpec) -> list[int]:
    """Returns the parent of each of a case's tokens, -1 for none: those of a chain, or of a random
    tree if there are several queries."""
    parents = [node - 1 for node in range(case.tokens)]
    if case.queries > 1 and not spec.states:  # running states cannot branch
        for node in range(1, case.tokens):
            parents[node] = int(rng.integers(-1, node))
    return parents


def _sample_ids(source: Source, rng: np.random.Generator) -> list[int]:
    """The first tokens of the sample text, and random ones behind them where the tokenizer makes
    fewer than `_PROMPT` of it."""
    tokenizer = Tokenizer.from_str(source.tokenizer.json.decode())
    ids = [] if source.facts.bos_id is None else [source.facts.bos_id]
    ids += tokenizer.encode(_SAMPLE, add_special_tokens=False).ids
    ids = [token for token in ids if token < source.vocabulary][:_PROMPT]
    random_ids: list[int] = rng.integers(0, source.vocabulary, _PROMPT - len(ids)).tolist()
    return ids + random_ids


def _records(source: Source, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Keys and values of `count` records of random activations, for cross-attention; None for a
    drafter without it."""
    records = source.module.example_records(count)
    if records is None:
        return None
    keys, values = records
    return keys.numpy(), values.numpy()


# ---- judging


@dataclass(frozen=True)
class _Part:
    """An output of a step, `[heads, rows, width]`, and what computes it."""

    says: str
    made_by: str
    take: Callable[[StepParts], NDArray[Any]]


def _parts(spec: GraphSpec) -> Iterator[_Part]:
    """Yield the outputs of a step in the order in which they are computed: the first that is wrong
    is where the graph is wrong."""
    layers = len(spec.cache)
    for layer in range(layers):
        above = f"layer {layer - 1}'s attention or MLP" if layer else "the embedding"
        both = f"{above}, or layer {layer}'s input norm"
        # The lambdas bind their index now, by a default: the loops go on.
        yield _Part(
            f"layer {layer}'s keys",
            f"their projection, bias, norm or rotation; if keys and values: {both}",
            lambda parts, index=2 * layer: parts.rows[index],  # type: ignore[misc]
        )
        yield _Part(
            f"layer {layer}'s values",
            f"their projection, bias; if keys and values: {both}",
            lambda parts, index=2 * layer + 1: parts.rows[index],  # type: ignore[misc]
        )
    for number in range(len(spec.states)):
        yield _Part(
            f"running state {number}",
            "the layer that keeps it, or those before it",
            lambda parts, index=number: _as_one_row(parts.states[index]),  # type: ignore[misc]
        )
    yield _Part(
        "the final states",
        f"layer {layers - 1}'s attention or MLP, records or the last norm",
        lambda parts: parts.hidden[None],
    )
    yield _Part("the logits", "the head", lambda parts: parts.logits[None])


def _as_one_row(state: NDArray[Any]) -> NDArray[Any]:
    """A running state as one row. Its own rows are single numbers after the first token, those of a
    channel or of a key times a vector: where such a number is nearly zero, its error is a large
    share of it in a right graph, too."""
    return state.reshape(1, -1)


def _compared(
    reference: TorchRunner,
    runner: OrtRunner,
    case: Case,
    step: StepInput,
    draft_to_target: NDArray[np.int64] | None,
) -> float:
    """Run one step by the graph, by torch in float32 and by torch in float64; returns the graph's
    largest error. A `MoaError` if that is far above torch's own error in float32."""
    in_float32 = reference.parts(step)
    with _InDouble():
        in_float64 = reference.parts(step)
    _, _, *new_rows, hidden, logits = runner.run(step)
    by_graph = StepParts(hidden[0], logits[0], *split_rows(reference.spec, new_rows))
    if draft_to_target is not None:
        in_float32 = in_float32.of_words(draft_to_target)
        in_float64 = in_float64.of_words(draft_to_target)
    largest = 0.0
    for part in _parts(reference.spec):
        truth = part.take(in_float64)
        own_error = max(_error(part.take(in_float32), truth), _LEAST_ERROR)
        error = _error(part.take(by_graph), truth)
        if not error <= FACTOR * own_error:  # so written, NaN is refused, too
            raise MoaError(
                f"the exported graph differs from torch in {part.says}, by {error:.1e} of their"
                f" length where float32 differs by {own_error:.1e} ({case.says})",
                hint=f"what computes them: {part.made_by}",
            )
        largest = max(largest, error)
    return largest


def _error(found: NDArray[Any], truth: NDArray[Any]) -> float:
    """The largest distance of a row from the truth, as a part of its own length."""
    if not truth.size:
        return 0.0
    distance = np.linalg.norm(found.astype(np.float64) - truth, axis=-1)
    length = np.linalg.norm(truth.astype(np.float64), axis=-1)
    return float((distance / np.maximum(length, np.finfo(np.float32).tiny)).max())


class _InDouble(TorchFunctionMode):
    """Torch computes in float64 what it is asked to compute in float32, weights included, each at
    its turn: a second copy of the model would take twice its memory."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call one of torch's functions, `func`, with float32 arguments turned into float64; torch
        calls this in place of each of them."""
        named = kwargs or {}
        if func is _DTYPE:  # so that code that asks for it goes on in float64
            return _wide(func(*args, **named))
        if getattr(func, "__name__", "") == "__get__":  # another attribute, such as a shape
            return func(*args, **named)
        if func is Tensor.detach:  # a whole table, of which others then read a part at a time
            return func(*args, **named)
        if func is functional.embedding:  # the rows that are read, and not the whole table
            return _wide(func(*args, **named))
        if func is functional.linear:
            return _linear(*args, **named)
        if func is Tensor.float:
            func = Tensor.double
        args, named = tree_map(_wide, (args, named))
        return func(*args, **named)


_DTYPE: Any = Tensor.dtype.__get__  # type: ignore[attr-defined]


def _wide(value: Any) -> Any:
    """A float32 tensor in float64, or the dtype itself; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.double()
    if value is torch.float32:
        return torch.float64
    return value


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in float64, with a part of its weight converted at a time."""
    parts = [functional.linear(_wide(x), _wide(rows)) for rows in weight.split(_ROWS_AT_ONCE)]
    result = torch.cat(parts, -1)
    if bias is None:
        return result
    return result + _wide(bias)
