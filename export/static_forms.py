"""The forms for NPUs: fixed shapes, only operators that NPU compilers support, embedding and top-k on the host
(`StaticRunner`, in numpy).

    x [1,T,H]  cos, sin [1,T,D]  mask [1,1,T,P+T]  past_k, past_v [1,Hs,P,D] by layer
    record_k, record_v [1,Hc,R,D]  record_mask [1,1,1,R]  has_records [1,1,1]      ──►  logits, new_k, new_v by layer

`sin` includes the sign of the rotation's first half. Masks are 0 or -30, because a larger number would use up the range
of 16-bit activations. Unused past rows, records and tokens are masked, and their outputs ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import (
    get_qnn_qdq_config,
    qnn_preprocess_model,
)
from onnxruntime.tools.mobile_helpers import usability_checker
from torch import Tensor, nn

from export.forms import Workshop
from export.runner import Float, StepInput, StepOutput
from export.storage import WeightedModel, quiet
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import AttentionDrafter
from moa.drafters.graph import GraphSpec
from moa.errors import ConfigError, MoaError
from moa.graph.step import open_session
from moa.model.blocks import Attention, Block

STATIC_MASKED = -30.0
"""What an additive mask holds where a token may not look."""
EMBEDDING = "embedding.npy"
"""The file with the host's embedding."""
Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class StaticShape:
    """Tokens in a step, past rows, and records."""

    tokens: int = 8
    past: int = 512
    records: int = 512

    def __post_init__(self) -> None:
        if min(self.tokens, self.past, self.records) < 1:
            raise ConfigError(
                "--npu-shape must be three positive numbers: tokens, past rows, records"
            )


class StaticStep(nn.Module):
    """The drafter's step in elementary operators. `native_norm` keeps RMSNorm as one operator,
    which is much more accurate on HTP."""

    def __init__(
        self, drafter: AttentionDrafter, head: NDArray[np.float32], *, native_norm: bool
    ) -> None:
        """Take the layers of `drafter`; `head` has a row for each token that can be drafted."""
        super().__init__()
        self.layers = nn.ModuleList(drafter.body_blocks)
        self.crossing = drafter.cross_attention
        self.final_norm = drafter.norm if drafter.config.final_norm else None
        self.softcap = drafter.shared.logit_softcap
        self.logit_scale = drafter.shared.logit_scale
        self.native_norm = native_norm
        self.head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.head.weight = nn.Parameter(torch.from_numpy(head), requires_grad=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute one step; returns the logits of all tokens, then new keys and values by layer.
        `rest` has the past keys and values by layer, then the four inputs of activation records."""
        past = rest[:-4]
        records = rest[-4:]
        rows: list[Tensor] = []
        blocks: list[Block] = list(self.layers)  # type: ignore[arg-type]
        for block, past_keys, past_values in zip(blocks, past[0::2], past[1::2], strict=True):
            x, key, value = self._layer(block, x, cos, sin, mask, past_keys, past_values)
            rows += [key, value]
        x = self._cross(x, cos, sin, *records)
        return self._logits(x), *rows

    def _layer(
        self,
        block: Block,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one layer; returns the states after it, and the tokens' keys and values."""
        attention = block.self_attn
        normed = self._norm(block.input_layernorm, x)
        key = _rotated(attention.key(normed), cos, sin)
        value = attention.value(normed)
        query = _rotated(attention.query(normed), cos, sin)
        all_keys = torch.cat([past_keys, key], 2)
        all_values = torch.cat([past_values, value], 2)
        attended = _attend(attention, query, all_keys, all_values, mask)
        return self._feed_forward(block, x + attended), key, value

    def _logits(self, x: Tensor) -> Tensor:
        """Returns the logits of all tokens that can be drafted, from the last layer's states."""
        hidden = x if self.final_norm is None else self._norm(self.final_norm, x)
        logits: Tensor = self.head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def _cross(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        has_records: Tensor,
    ) -> Tensor:
        """Returns the states after cross-attention over the activation records; without records,
        where `has_records` is 0, they stay as they are."""
        block = self.crossing
        normed = self._norm(block.input_layernorm, x)
        query = _rotated(block.self_attn.query(normed), cos, sin)
        attended = _attend(block.self_attn, query, key, value, mask)
        with_records = self._feed_forward(block, x + attended)
        return x + (with_records - x) * has_records  # a choice without a branch in the graph

    def _feed_forward(self, block: Block, x: Tensor) -> Tensor:
        """The second half of a layer, with its residual: SwiGLU in elementary operators."""
        mlp = block.mlp
        normed = self._norm(block.post_attention_layernorm, x)
        gate = mlp.gate_proj(normed)
        return x + mlp.down_proj(gate * torch.sigmoid(gate) * mlp.up_proj(normed))

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        """RMSNorm, as one operator or in elementary ones."""
        if self.native_norm:
            normed: Tensor = norm(x)
            return normed
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * norm.weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads rotated by their positions; `sin` includes the sign of the first half."""
    low, high = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat([high, low], dim=-1) * sin.unsqueeze(1)


def _attend(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    """Returns the output of grouped-query attention. Query heads that share a key head become rows
    of one product, so that no operator has to repeat keys."""
    heads = attention.heads
    width = attention.head_dim
    sharing = heads // attention.kv_heads
    tokens = query.shape[2]
    query = query.reshape(1, attention.kv_heads, sharing * tokens, width) * width**-0.5
    if mask.shape[2] != 1:
        mask = torch.cat([mask] * sharing, dim=2)
    result = torch.softmax(query @ key.transpose(2, 3) + mask, dim=-1) @ value
    result = result.reshape(1, heads, tokens, width).transpose(1, 2)
    projected: Tensor = attention.o_proj(result.reshape(1, tokens, heads * width))
    return projected


def export_static(
    shop: Workshop, shape: StaticShape, path: Path, *, opset: int, native_norm: bool
) -> None:
    """Write the drafter's step as a float32 graph of fixed sizes, in one file. `native_norm` keeps
    RMSNorm as one operator."""
    # The plan has refused all others.
    drafter = cast(AttentionDrafter, shop.source.module)
    spec = shop.source.spec
    examples = _example_inputs(spec, drafter.config, shape)
    module = StaticStep(drafter, shop.head_rows, native_norm=native_norm).eval()
    with torch.inference_mode(), quiet():
        program = torch.onnx.export(
            module,
            tuple(examples.values()),
            dynamo=True,
            opset_version=opset,
            input_names=list(examples),
            output_names=["logits", *spec.rows],
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=True)
    WeightedModel.read(path).save_whole(path)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)


def _example_inputs(
    spec: GraphSpec, config: AttentionConfig, shape: StaticShape
) -> dict[str, Tensor]:
    """Returns an example of each of the graph's inputs, by its name, in the order of
    `StaticStep.forward`."""
    assert spec.records is not None
    width = config.head_dim
    examples = {
        "x": torch.randn(1, shape.tokens, config.hidden_size),
        "cos": torch.randn(1, shape.tokens, width),
        "sin": torch.randn(1, shape.tokens, width),
        "mask": torch.zeros(1, 1, shape.tokens, shape.past + shape.tokens),
    }
    for number, layer in enumerate(spec.cache):
        for part in "kv":
            examples[f"past_{part}_{number}"] = torch.randn(1, layer.kv_heads, shape.past, width)
    record_heads = spec.records.kv_heads
    examples |= {
        "record_k": torch.randn(1, record_heads, shape.records, width),
        "record_v": torch.randn(1, record_heads, shape.records, width),
        "record_mask": torch.zeros(1, 1, 1, shape.records),
        "has_records": torch.ones(1, 1, 1),
    }
    return examples


def write_embedding(shop: Workshop, folder: Path) -> Path:
    """The host's table of token embeddings, scaled, in half precision."""
    path = folder / EMBEDDING
    rows = shop.source.embedding() * shop.source.shared.embedding_scale
    np.save(path, rows.astype(np.float16), allow_pickle=False)
    return path


class _Feeds(CalibrationDataReader):
    """Calibration inputs, one after another."""

    def __init__(self, feeds: list[Feeds]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feeds | None:
        return next(self._feeds, None)


def quantize_for_htp(model: Path, feeds: list[Feeds]) -> None:
    """Quantize a graph in place for Qualcomm's HTP: 16-bit activations, with ranges found by
    running `feeds`, and 8-bit weights."""
    prepared = model.with_name("prepared.onnx")
    quantized = model.with_name("quantized.onnx")
    with quiet():
        was_changed = qnn_preprocess_model(model, prepared)
        source = prepared if was_changed else model
        config = get_qnn_qdq_config(
            source,
            _Feeds(feeds),
            activation_type=QuantType.QUInt16,
            weight_type=QuantType.QUInt8,
        )
        quantize(source, quantized, config)
    prepared.unlink(missing_ok=True)
    quantized.replace(model)


def partitions(model: Path, runtime: Literal["CoreML", "NNAPI"]) -> str:
    """Check with ONNX Runtime's usability checker whether a runtime that is not installed would
    take the whole graph; returns what the checker says, and raises if it would take only parts."""
    proto = onnx.shape_inference.infer_shapes(onnx.load(model))
    with quiet():
        if runtime == "CoreML":
            checked = usability_checker.check_coreml_partitions(
                proto, True, "coreml_supported_mlprogram_ops.md"
            )
        else:
            checked = usability_checker.check_nnapi_partitions(proto, True)
    nodes = checked.num_nodes
    if checked.num_partitions != 1 or checked.num_supported_nodes != nodes:
        lacking = ", ".join(sorted(checked.unsupported_ops)) or "fixed shapes"
        raise MoaError(
            f"{runtime} would take {checked.num_supported_nodes} of {nodes} nodes in {checked.num_partitions}"
            f" partitions, not all in one: it lacks {lacking}"
        )
    return f"onnxruntime's {runtime} checker: {nodes} of {nodes} nodes in one partition"


class StaticRunner:
    """`Runner` over a static form, on the CPU: longer inputs run in pieces; the oldest rows beyond
    its capacity are dropped."""

    def __init__(self, shop: Workshop, model: Path, shape: StaticShape) -> None:
        """Load the graph and the table of embeddings beside it."""
        self.spec = shop.source.spec
        self.shape = shape
        self.session = open_session(model)
        self._embedding = np.load(model.parent / EMBEDDING, mmap_mode="r")
        self._top_k = shop.top_k
        self._draft_to_target = shop.draft_to_target
        width = self.spec.cache[0].head_dim
        even = np.arange(0, width, 2, dtype=np.float32)
        self._frequencies = shop.source.module.config.rope_theta ** (-even / width)

    def step(self, step: StepInput) -> StepOutput:
        """Run one step of any size, in pieces of as many tokens as the graph takes."""
        rows = list(step.past)  # of the cache, `[heads, tokens, width]` each
        logits = []  # `[tokens, vocabulary]` of each piece
        for start in range(0, len(step.ids), self.shape.tokens):
            piece = slice(start, min(start + self.shape.tokens, len(step.ids)))
            piece_logits, new_rows = self._run_piece(step, piece, rows)
            logits.append(piece_logits)
            rows = [np.concatenate(pair, axis=1) for pair in zip(rows, new_rows, strict=True)]
        logp, tokens = self._best(np.concatenate(logits)[list(step.queries)])
        past_count = step.past[0].shape[1]
        return StepOutput(logp, tokens, [row[:, past_count:] for row in rows])

    def _run_piece(
        self, step: StepInput, piece: slice, past: list[Float]
    ) -> tuple[Float, list[Float]]:
        """Run the graph once, for some of a step's tokens behind the cache rows `past`. Returns
        their logits, `[tokens, vocabulary]`, and their cache rows, `[heads, tokens, width]`."""
        logits, *rows = self.session.run(None, self.feeds(step, piece, past))
        used = piece.stop - piece.start  # the graph's other tokens are padding
        return logits[0, :used], [new[0, :, :used] for new in rows]

    def _best(self, logits: Float) -> tuple[Float, NDArray[np.int64]]:
        """Returns the log-probabilities of each query's likeliest tokens, best first, and these
        tokens as the target numbers them."""
        best = np.argsort(-logits, axis=-1, kind="stable")[:, : self._top_k]
        # A log-probability is the logit without the logarithm of all tokens' sum of exponentials.
        log_of_sum = np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        logp = np.take_along_axis(logits, best, -1) - log_of_sum
        tokens = best if self._draft_to_target is None else self._draft_to_target[best]
        return logp.astype(np.float32), tokens.astype(np.int64)

    def feeds(self, step: StepInput, part: slice, past: list[Float]) -> Feeds:
        """Returns the graph's inputs for some of a step's tokens; `past` has the cache rows of all
        tokens before them. What the graph has no room for is left out, the oldest rows first."""
        shape = self.shape
        used = part.stop - part.start
        past_count = past[0].shape[1]
        kept = min(past_count, shape.past)  # past rows that there is room for
        skipped = past_count - kept
        ids = np.zeros(shape.tokens, np.int64)
        ids[:used] = step.ids[part]
        cos, sin = self._rotation(step.positions[part])
        columns = slice(skipped, part.stop + step.past[0].shape[1])
        mask = self._mask(step.mask[part, columns], kept)
        feeds: Feeds = {
            "x": self._embedding[ids].astype(np.float32)[None],
            "cos": cos[None],
            "sin": sin[None],
            "mask": mask[None, None],
        }
        for number, (keys, values) in enumerate(zip(past[0::2], past[1::2], strict=True)):
            feeds[f"past_k_{number}"] = _padded(keys[:, skipped:], shape.past)
            feeds[f"past_v_{number}"] = _padded(values[:, skipped:], shape.past)
        return feeds | self._records(step)

    def _rotation(self, positions: Sequence[int]) -> tuple[Float, Float]:
        """Returns cosine and sine of the angles by which heads are turned at these positions,
        `(tokens, head_dim)` each, with padding behind them. The sine includes the sign of the
        rotation's first half."""
        padded = np.zeros(self.shape.tokens, np.float32)
        padded[: len(positions)] = positions
        # The angle of each pair of numbers, for both halves of a head.
        angles = np.tile(padded[:, None] * self._frequencies, 2)
        sign = np.repeat(np.array([-1.0, 1.0], np.float32), len(self._frequencies))
        return np.cos(angles).astype(np.float32), (np.sin(angles) * sign).astype(np.float32)

    def _mask(self, visible: NDArray[np.bool_], held: int) -> Float:
        """Returns the graph's attention mask, `(tokens, past + tokens)`, which is added to scores: 0
        where a token may look. `visible` says that for the step's tokens, with columns for the
        `held` past rows and then for these tokens."""
        shape = self.shape
        used = len(visible)
        # Columns are the past rows, with room for `shape.past`, then the tokens.
        mask = np.full((shape.tokens, shape.past + shape.tokens), STATIC_MASKED, np.float32)
        mask[:used, :held][visible[:, :held]] = 0.0
        mask[:used, shape.past : shape.past + used][visible[:, held:]] = 0.0
        padding = np.arange(used, shape.tokens)
        mask[padding, shape.past + padding] = 0.0  # sees itself: a row may not be all masked
        return mask

    def _records(self, step: StepInput) -> Feeds:
        """Returns the graph's inputs with activation records: the newest that there is room for."""
        heads = self.spec.records
        assert heads is not None
        key = np.zeros((heads.kv_heads, 0, heads.head_dim), np.float32)
        value = key
        if step.record_k is not None and step.record_v is not None:
            key = step.record_k[:, -self.shape.records :]
            value = step.record_v[:, -self.shape.records :]
        mask = np.full((1, 1, 1, self.shape.records), STATIC_MASKED, np.float32)
        mask[..., : key.shape[1]] = 0.0
        return {
            "record_k": _padded(key, self.shape.records),
            "record_v": _padded(value, self.shape.records),
            "record_mask": mask,
            "has_records": np.full((1, 1, 1), float(key.shape[1] > 0), np.float32),
        }


def _padded(rows: Float, capacity: int) -> Float:
    """Rows `[heads, n, width]` with zeros behind them: `[1, heads, capacity, width]`."""
    padded = np.zeros((1, rows.shape[0], capacity, rows.shape[2]), np.float32)
    padded[0, :, : rows.shape[1]] = rows
    return padded
