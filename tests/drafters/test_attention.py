"""The MoA drafter against its definition, written out step by step from the published checkpoint's
own keys."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import AttentionDrafter, load_attention, new_attention
from moa.errors import ConfigError, UsageError
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import save_drafter
from moa.target.torch_target import Row, Target
from moa.tree import MASKED
from testing.close import assert_rounded
from testing.tiny import tiny

HEADS = 4
KV = 2
EPS = 1e-5
THETA = 50_000.0


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(
        tiny("llama", rms_norm_eps=EPS, rope_theta=THETA), slots=16, capacity=16
    )


@pytest.fixture
def published(tmp_path: Path, target: Target) -> Path:
    """A scaled-down checkpoint with the keys and the config of the paper's."""
    facts = target.facts
    width = facts.hidden_size
    kv_width = 2 * facts.kv_heads * facts.head_dim
    torch.manual_seed(3)
    state: dict[str, Tensor] = {}
    for part, size, intermediate, kv in (
        ("self_attention", width, 96, KV),
        ("cross_attention", width, 80, KV),
        ("layer_self_attention", kv_width, 48, HEADS),
    ):
        narrow = (kv * (size // HEADS), size)
        shapes = {
            "self_attn.q_proj": (size, size),
            "self_attn.k_proj": narrow,
            "self_attn.v_proj": narrow,
            "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (intermediate, size),
            "mlp.up_proj": (intermediate, size),
            "mlp.down_proj": (size, intermediate),
        }
        for name, shape in shapes.items():
            state[f"{part}.{name}.weight"] = torch.randn(shape) / math.sqrt(shape[1])
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{part}.{name}.weight"] = 1 + 0.1 * torch.randn(size)
    state["Ekv2E.weight"], state["Ekv2E.bias"] = (
        torch.randn(width, kv_width) / 8,
        torch.randn(width),
    )
    save_file(state, tmp_path / "model.safetensors")
    config = {
        "architectures": ["MOASpec"],
        "model_type": "moa_spec",
        "hidden_size": width,
        "kv_hidden_size": kv_width,
        "num_attention_heads": HEADS,
        "vocab_size": facts.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "self_attention_num_key_value_heads": KV,
        "self_attention_intermediate_size": 96,
        "cross_attention_num_key_value_heads": KV,
        "cross_attention_intermediate_size": 80,
        "layer_self_attention_num_key_value_heads": HEADS,
        "layer_self_attention_intermediate_size": 48,
        "rope_theta": THETA,
        "rope_scaling": None,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


class Reference:
    """The paper's drafter, one token and one head at a time, from nothing but the checkpoint's
    tensors."""

    def __init__(self, state: dict[str, Tensor], embedding: Tensor, head: Tensor) -> None:
        self.state = state
        self.embedding = embedding
        self.head = head

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + EPS) * weight

    @staticmethod
    def rope(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angles = position * THETA ** (-torch.arange(half) / half)
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angles)
        return torch.cat([turned.real, turned.imag])

    def layer(
        self, name: str, x: Tensor, at: int, context: list[tuple[Tensor, int]], kv_heads: int
    ) -> Tensor:
        """One decoder layer for one token `x` at position `at`, attending to `context` of (input,
        position)."""
        size = len(x) // HEADS

        def w(key: str) -> Tensor:
            return self.state[f"{name}.{key}.weight"]

        def heads(kind: str, x: Tensor) -> tuple[Tensor, ...]:
            return (w(f"self_attn.{kind}_proj") @ self.norm(x, w("input_layernorm"))).split(size)

        seen = []
        for h, query in enumerate(heads("q", x)):
            g = h * kv_heads // HEADS
            keys = [self.rope(heads("k", other)[g], position) for other, position in context]
            scores = torch.stack(keys) @ self.rope(query, at) / math.sqrt(size)
            seen.append(
                scores.softmax(0) @ torch.stack([heads("v", other)[g] for other, _ in context])
            )
        x = x + w("self_attn.o_proj") @ torch.cat(seen)
        normed = self.norm(x, w("post_attention_layernorm"))
        gate = torch.nn.functional.silu(w("mlp.gate_proj") @ normed) * (w("mlp.up_proj") @ normed)
        return x + w("mlp.down_proj") @ gate

    def activation(self, keys: Tensor, values: Tensor) -> Tensor:
        """LSA over the layers of one token (`[layers, kv_heads, head_dim]` each), mean, Ekv2E."""
        rows = torch.cat([keys, values], -1).flatten(1)
        context = list(zip(rows, range(len(rows)), strict=True))
        out = [self.layer("layer_self_attention", row, i, context, HEADS) for row, i in context]
        return self.state["Ekv2E.weight"] @ torch.stack(out).mean(0) + self.state["Ekv2E.bias"]

    def logits(self, ids: list[int], activations: list[Tensor]) -> Tensor:
        """After the last of `ids`, with activations for the first positions only."""
        embedded = [(self.embedding[token], i) for i, token in enumerate(ids)]
        x = self.layer("self_attention", embedded[-1][0], len(ids) - 1, embedded, KV)
        known = list(zip(activations, range(len(activations)), strict=True))
        if not known:  # not in the paper; here the drafter then works as without cross-attention
            return self.head @ x
        return self.head @ self.layer("cross_attention", x, len(ids) - 1, known, KV)


def observed(target: Target, ids: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    done = target.commit(
        target.forward([Row.chain(target.cache.acquire(), ids)]), 0, range(len(ids))
    )
    return *done.kv, done.hidden, done.positions


def some_records(
    drafter: AttentionDrafter, target: Target, ids: list[int]
) -> tuple[Tensor, Tensor]:
    key, value = drafter.project(*observed(target, ids))
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


def run(
    drafter: AttentionDrafter, ids: list[int], record_k: Tensor, record_v: Tensor, known: int
) -> Tensor:
    """Logits after each of `ids`, drafted in one call with the first `known` records."""
    count = len(ids)
    mask = torch.full((count, count), MASKED).triu(1)[None, None]
    records = torch.where(torch.arange(record_k.shape[2]) < known, 0.0, MASKED)[None, None, None]
    inputs = (
        torch.tensor([ids]),
        torch.arange(count)[None],
        mask,
        drafter.empty_rows(torch.tensor([ids])),
    )
    return drafter.logits(drafter.features(*inputs, record_k, record_v, records)[0])[0]


@torch.no_grad()
def test_the_published_layout_is_the_paper_step_by_step(published: Path, target: Target) -> None:
    drafter = load_attention(published, target.model, target.facts)
    reference = Reference(
        load_file(published / "model.safetensors"), target.embedding_weight, target.head_weight
    )
    ids = [5, 9, 77, 30, 64, 8, 100]
    keys, values, *_ = observed(target, ids)
    record_k, record_v = some_records(drafter, target, ids)
    activations = [reference.activation(keys[:, i], values[:, i]) for i in range(len(ids))]
    for known in (0, 1, 4):
        got = run(drafter, ids, record_k, record_v, known)
        for at in range(known, len(ids)):
            wanted = reference.logits(ids[: at + 1], activations[:known])
            assert torch.allclose(got[at], wanted, atol=2e-4), (known, at)


DEEP = {"layers": 3, "final_norm": True}


@torch.no_grad()
@pytest.mark.parametrize("shape", [{}, {"final_state": True}, {"use_lsa": False}, DEEP])
def test_a_token_at_a_time_is_the_same_as_all_at_once(
    target: Target, shape: dict[str, Any]
) -> None:
    drafter = new_attention(AttentionConfig.for_target(target.facts, **shape), target.model).eval()
    ids = [5, 9, 77, 30, 64]
    record_k, record_v = some_records(drafter, target, ids)
    together = run(drafter, ids, record_k, record_v, 2)
    past = drafter.empty_rows(torch.tensor([ids]))
    for at, token in enumerate(ids):
        one = torch.tensor([[token]]), torch.tensor([[at]]), torch.zeros(1, 1, 1, at + 1), past
        records = (
            record_k,
            record_v,
            torch.where(torch.arange(5) < 2, 0.0, MASKED)[None, None, None],
        )
        hidden, rows = drafter.features(*one, *records)
        assert_rounded(drafter.logits(hidden)[0, 0], together[at])
        for ours, extended in zip(rows, drafter.extend(*one), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, extended, strict=True))
        past = [
            (torch.cat([k, a], 2), torch.cat([v, b], 2))
            for (k, v), (a, b) in zip(past, rows, strict=True)
        ]


@torch.no_grad()
@pytest.mark.parametrize("shape", [DEEP, {}])
def test_without_records_it_is_a_plain_language_model(
    target: Target, shape: dict[str, Any]
) -> None:
    config = AttentionConfig.for_target(target.facts, **shape)
    drafter = new_attention(config, target.model).eval()
    plain = new_attention(dataclasses.replace(config, use_ca=False), target.model).eval()
    plain.load_state_dict(
        {k: v for k, v in drafter.state_dict().items() if k in plain.state_dict()}
    )
    ids = [5, 9, 77, 30, 64]
    record_k, record_v = some_records(drafter, target, ids)
    masked = run(drafter, ids, record_k, record_v, known=0)
    causal = torch.full((5, 5), MASKED).triu(1)[None, None]
    inputs = (
        torch.tensor([ids]),
        torch.arange(5)[None],
        causal,
        plain.empty_rows(torch.tensor([ids])),
    )
    assert torch.equal(masked, plain.logits(plain.features(*inputs)[0])[0])
    assert torch.equal(masked, drafter.logits(drafter.features(*inputs)[0])[0])
    assert torch.equal(masked, run(drafter, ids, torch.randn_like(record_k), record_v, known=0))
    assert not torch.equal(masked, run(drafter, ids, record_k, record_v, known=1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 128}, "another target"),
        ({"model_type": "llama"}, "model_type"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"self_attention_intermediate_size": 64}, "shape"),
        ({"num_attention_heads": 7}, "divide"),
        ({"cross_attention_num_key_value_heads": 3}, "divide"),
        ({"final_state": True}, "lack final_state"),
        ({"tli": 9}, "tli"),
        ({"layers": 3, "cross_attention_after": [1]}, "cross_attention_after"),
        ({"layers": 2}, "lack more_self_attention"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    published: Path, target: Target, values: dict[str, object], message: str
) -> None:
    path = published / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ConfigError, match=message):
        load_attention(published, target.model, target.facts)


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", b"xx"), ("config.json", b"{"), ("config.json", None)],
)
def test_a_damaged_checkpoint_is_refused(
    published: Path, target: Target, file: str, content: bytes | None
) -> None:
    if content is None:
        (published / file).unlink()
    else:
        (published / file).write_bytes(content)
    with pytest.raises(UsageError):
        load_attention(published, target.model, target.facts)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_only_a_new_body_embeds_tokens_without_the_targets_scale(
    family: str, tmp_path: Path
) -> None:
    """Beside Gemma's scale a fresh body's layers count for nothing, and it predicts the current
    token again. A drafter saved before there was a choice reads embeddings as it was trained."""
    target = Target.from_model(tiny(family), slots=1, capacity=64)
    new = new_attention(AttentionConfig.for_target(target.facts), target.model)
    ids = torch.arange(5, 45)
    assert torch.equal(new.embed(ids), new.shared.embedding[ids])
    save_drafter(new, tmp_path)
    again = load_attention(tmp_path, target.model, target.facts)
    assert again.config == new.config
    for name, value in again.state_dict().items():
        assert torch.equal(value, new.state_dict()[name])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["scaled_embedding"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = load_attention(tmp_path, target.model, target.facts)
    assert torch.equal(old.embed(ids), SharedWeights.of(target.model).embed(ids))
    assert AttentionConfig.for_target(target.facts, tli=1).scaled_embedding, (
        "borrowed layers read what the target's read"
    )
