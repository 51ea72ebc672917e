"""The forms for NPUs: fixed shapes, only operators that NPU compilers support, embedding and top-k on the host
(`StaticRunner`, in numpy).

    x [1,T,H]  cos, sin [1,T,D]  mask [1,1,T,P+T]  past_k, past_v [1,Hs,P,D] by layer
    record_k, record_v [1,Hc,R,D]  record_mask [1,1,1,R]  has_records [1,1,1]      ──►  logits, new_k, new_v by layer

`sin` includes the sign of the rotation's first half. Masks are 0 or -30, because a larger number would use up the range
of 16-bit activations. Unused past rows, records and tokens are masked, and their outputs ignored.
"""

from __future__ import annotations

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
from moa.drafters.attention.model import AttentionDrafter
from moa.errors import ConfigError, MoaError
from moa.graph.step import open_session
from moa.model.blocks import Attention, Block

STATIC_MASKED = -30.0
EMBEDDING = "embedding.npy"
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
        """`rest`: past keys and values by layer, then the four record inputs. Logits of all tokens,
        and new rows."""
        past = rest[:-4]
        records = rest[-4:]
        rows: list[Tensor] = []
        blocks: list[Block] = list(self.layers)  # type: ignore[arg-type]
        for block, keys, values in zip(blocks, past[0::2], past[1::2], strict=True):
            attention = block.self_attn
            normed = self._norm(block.input_layernorm, x)
            key = _turn(attention.key(normed), cos, sin)
            value = attention.value(normed)
            rows += [key, value]
            query = _turn(attention.query(normed), cos, sin)
            seen = _attend(
                attention, query, torch.cat([keys, key], 2), torch.cat([values, value], 2), mask
            )
            x = self._feed_forward(block, x + seen)
        x = self._cross(x, cos, sin, *records)
        hidden = x if self.final_norm is None else self._norm(self.final_norm, x)
        logits = self.head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits, *rows

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
        block = self.crossing
        query = _turn(block.self_attn.query(self._norm(block.input_layernorm, x)), cos, sin)
        told = self._feed_forward(block, x + _attend(block.self_attn, query, key, value, mask))
        return x + (told - x) * has_records

    def _feed_forward(self, block: Block, x: Tensor) -> Tensor:
        mlp = block.mlp
        normed = self._norm(block.post_attention_layernorm, x)
        gate = mlp.gate_proj(normed)
        return x + mlp.down_proj(gate * torch.sigmoid(gate) * mlp.up_proj(normed))

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        if self.native_norm:
            normed: Tensor = norm(x)
            return normed
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * norm.weight


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat([high, low], dim=-1) * sin.unsqueeze(1)


def _attend(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    """Query heads that share a key head become rows of one product, so that no operator has to
    repeat keys."""
    group = attention.heads // attention.kv_heads
    tokens = query.shape[2]
    query = (
        query.reshape(1, attention.kv_heads, group * tokens, attention.head_dim)
        * attention.head_dim**-0.5
    )
    if mask.shape[2] != 1:
        mask = torch.cat([mask] * group, dim=2)
    seen = torch.softmax(query @ key.transpose(2, 3) + mask, dim=-1) @ value
    seen = seen.reshape(1, attention.heads, tokens, attention.head_dim).transpose(1, 2)
    out: Tensor = attention.o_proj(seen.reshape(1, tokens, attention.heads * attention.head_dim))
    return out


def export_static(
    shop: Workshop, shape: StaticShape, path: Path, *, opset: int, native_norm: bool
) -> None:
    """Write the float32 static graph, one file."""
    # The plan has refused all others.
    drafter = cast(AttentionDrafter, shop.source.module)
    config = drafter.config
    spec = shop.source.spec
    assert spec.records is not None
    t = shape.tokens
    p = shape.past
    r = shape.records
    d = config.head_dim
    args = (
        torch.randn(1, t, config.hidden_size),
        torch.randn(1, t, d),
        torch.randn(1, t, d),
        torch.zeros(1, 1, t, p + t),
        *(torch.randn(1, layer.kv_heads, p, d) for layer in spec.cache for _ in "kv"),
        *(torch.randn(1, spec.records.kv_heads, r, d) for _ in "kv"),
        torch.zeros(1, 1, 1, r),
        torch.ones(1, 1, 1),
    )
    inputs = ["x", "cos", "sin", "mask", *(name for name in spec.inputs if name.startswith("past"))]
    inputs += ["record_k", "record_v", "record_mask", "has_records"]
    outputs = ["logits", *spec.rows]
    module = StaticStep(drafter, shop.head_rows, native_norm=native_norm).eval()
    with torch.inference_mode(), quiet():
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            opset_version=opset,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=True)
    model = WeightedModel.take(onnx.load(path))
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    model.save_whole(path)


def write_embedding(shop: Workshop, folder: Path) -> Path:
    """The host's table of token embeddings, scaled, in half precision."""
    path = folder / EMBEDDING
    rows = shop.source.embedding() * shop.source.shared.embedding_scale
    np.save(path, rows.astype(np.float16), allow_pickle=False)
    return path


class _Feeds(CalibrationDataReader):
    def __init__(self, feeds: list[Feeds]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feeds | None:
        return next(self._feeds, None)


def quantize_for_htp(model: Path, feeds: list[Feeds]) -> None:
    """Sixteen-bit activations and eight-bit weights as QDQ, with ranges calibrated on `feeds`; in
    place."""
    prepared = model.with_name("prepared.onnx")
    quantized = model.with_name("quantized.onnx")
    with quiet():
        changed = qnn_preprocess_model(model, prepared)
        config = get_qnn_qdq_config(
            prepared if changed else model,
            _Feeds(feeds),
            activation_type=QuantType.QUInt16,
            weight_type=QuantType.QUInt8,
        )
        quantize(prepared if changed else model, quantized, config)
    prepared.unlink(missing_ok=True)
    quantized.replace(model)


def partitions(model: Path, runtime: Literal["CoreML", "NNAPI"]) -> str:
    """Check the graph for a runtime that is not installed, with ONNX Runtime's usability checker;
    raises if it would be partitioned."""
    proto = onnx.shape_inference.infer_shapes(onnx.load(model))
    with quiet():
        if runtime == "CoreML":
            found = usability_checker.check_coreml_partitions(
                proto, True, "coreml_supported_mlprogram_ops.md"
            )
        else:
            found = usability_checker.check_nnapi_partitions(proto, True)
    if found.num_partitions != 1 or found.num_supported_nodes != found.num_nodes:
        raise MoaError(
            f"{runtime} would take {found.num_supported_nodes} of {found.num_nodes} nodes in {found.num_partitions}"
            f" partitions, not all in one: it lacks {', '.join(sorted(found.unsupported_ops)) or 'fixed shapes'}"
        )
    return f"onnxruntime's {runtime} checker: {found.num_nodes} of {found.num_nodes} nodes in one partition"


class StaticRunner:
    """`Runner` over a static form, on the CPU: longer inputs run in pieces; the oldest rows beyond
    its capacity are dropped."""

    def __init__(self, shop: Workshop, model: Path, shape: StaticShape) -> None:
        self.spec = shop.source.spec
        self.shape = shape
        self.session = open_session(model)
        self._embedding = np.load(model.parent / EMBEDDING, mmap_mode="r")
        self._top_k = shop.top_k
        self._map = shop.draft_to_target
        width = self.spec.cache[0].head_dim
        self._steps = shop.source.module.config.rope_theta ** (
            -np.arange(0, width, 2, dtype=np.float32) / width
        )

    def step(self, step: StepInput) -> StepOutput:
        """One step of any size."""
        past = list(step.past)
        logits = []
        before = past[0].shape[1]
        for start in range(0, len(step.ids), self.shape.tokens):
            part = slice(start, min(start + self.shape.tokens, len(step.ids)))
            out, *rows = self.session.run(None, self.feeds(step, part, past))
            used = part.stop - start
            logits.append(out[0, :used])
            past = [
                np.concatenate([old, new[0, :, :used]], axis=1)
                for old, new in zip(past, rows, strict=True)
            ]
        scores = np.concatenate(logits)[list(step.queries)]
        best = np.argsort(-scores, axis=-1, kind="stable")[:, : self._top_k]
        logp = np.take_along_axis(scores, best, -1) - np.logaddexp.reduce(
            scores, axis=-1, keepdims=True
        )
        tokens = best if self._map is None else self._map[best]
        new = [row[:, before:] for row in past]
        return StepOutput(logp.astype(np.float32), tokens.astype(np.int64), new)

    def feeds(self, step: StepInput, part: slice, past: list[Float]) -> Feeds:
        """The graph's inputs for some of a step's tokens; `past` holds the rows of all tokens
        before them."""
        shape, used, held = (
            self.shape,
            part.stop - part.start,
            min(past[0].shape[1], self.shape.past),
        )
        skipped = past[0].shape[1] - held
        ids = np.zeros(shape.tokens, np.int64)
        positions = np.zeros(shape.tokens, np.float32)
        ids[:used], positions[:used] = step.ids[part], step.positions[part]
        angles = np.tile(positions[:, None] * self._steps, 2)
        sign = np.repeat(np.array([-1.0, 1.0], np.float32), len(self._steps))
        mask = np.full((shape.tokens, shape.past + shape.tokens), STATIC_MASKED, np.float32)
        visible = step.mask[part, skipped : part.stop + step.past[0].shape[1]]
        mask[:used, :held][visible[:, :held]] = 0.0
        mask[:used, shape.past : shape.past + used][visible[:, held:]] = 0.0
        mask[range(used, shape.tokens), range(shape.past + used, shape.past + shape.tokens)] = 0.0
        feeds: Feeds = {
            "x": self._embedding[ids].astype(np.float32)[None],
            "cos": np.cos(angles).astype(np.float32)[None],
            "sin": (np.sin(angles) * sign).astype(np.float32)[None],
            "mask": mask[None, None],
        }
        for i, rows in enumerate(past):
            feeds[f"past_{'kv'[i % 2]}_{i // 2}"] = _padded(rows[:, skipped:], shape.past)
        return feeds | self._records(step)

    def _records(self, step: StepInput) -> Feeds:
        of = self.spec.records
        assert of is not None
        none = np.zeros((of.kv_heads, 0, of.head_dim), np.float32)
        key, value = (
            none if rows is None else rows[:, -self.shape.records :]
            for rows in (step.record_k, step.record_v)
        )
        mask = np.full((1, 1, 1, self.shape.records), STATIC_MASKED, np.float32)
        mask[..., : key.shape[1]] = 0.0
        return {
            "record_k": _padded(key, self.shape.records),
            "record_v": _padded(value, self.shape.records),
            "record_mask": mask,
            "has_records": np.full((1, 1, 1), float(key.shape[1] > 0), np.float32),
        }


def _padded(rows: Float, capacity: int) -> Float:
    out = np.zeros((1, rows.shape[0], capacity, rows.shape[2]), np.float32)
    out[0, :, : rows.shape[1]] = rows
    return out
