"""The graph of a Mixture-of-Attentions drafter: body, cross-attention, borrowed layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig

from moa.config import TargetFacts
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.graph import GraphSizes, count_weights, layer_number
from moa.target.families import facts_of

_NO_LAYER = ("layer_self_attention.", "Ekv2E.", "final_state.", "body.embedding.", "body.head.")
"""Weights that stay on the server, or are counted as embedding and head."""


class AttentionGraph(nn.Module):
    """`AttentionDrafter.states`, with the arguments in the order of the graph's inputs."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.drafter = drafter
        self.borrowed = drafter.borrowed  # kept outside the drafter's module tree
        self.records = 3 if drafter.config.use_ca else 0

    def forward(
        self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one step of the drafter as the exported graph does: final states of the `queries`,
        then each layer's new keys and values.

        `rest` holds keys, values and mask of the records where the drafter reads any, then the past
        keys and values, which alternate, layer by layer.
        """
        records = rest[: self.records]
        past = rest[self.records :]
        pairs = list(zip(past[0::2], past[1::2], strict=True))
        x, rows = self.drafter.states(x, positions, mask, pairs, *records, queries=queries)
        return x, *(tensor for layer in rows for tensor in layer)


def sizes(folder: Path, config: AttentionConfig, facts: TargetFacts, target: Path) -> GraphSizes:
    """The sizes of a drafter's graph, from the headers of the files in its `folder` and in that of
    its `target`, some of whose last layers (`config.tli`) may be a part of it."""
    body = _body(config, facts)
    weights = count_weights(folder, lambda name: not name.startswith(_NO_LAYER))
    if config.tli:
        first = facts.layers - config.tli
        weights += count_weights(target, lambda name: layer_number(name) >= first)
    return GraphSizes(
        kind="moa" if config.use_ca else "independent",
        hidden_size=config.hidden_size,
        # Only tokens that both know can be drafted: a body's table may be padded differently.
        vocabulary=min(facts.vocab_size, body.vocab_size),
        tied=body.tie_embeddings,
        cache=(
            *[(body.kv_heads, body.head_dim)] * config.layers,
            *[(facts.kv_heads, facts.head_dim)] * config.tli,
        ),
        record_width=config.record_width,
        layer_weights=weights,
        no_static_form=_no_static_form(config),
    )


def _body(config: AttentionConfig, facts: TargetFacts) -> TargetFacts:
    """The facts of a drafter's body. The body is a language model of its own, or a few layers
    between the target's embedding and head, with the target's facts but for their KV heads."""
    if config.body is not None:
        return facts_of(AutoConfig.for_model(**config.body), None)
    return replace(
        facts, kv_heads=config.self_attention_num_key_value_heads, head_dim=config.head_dim
    )


def _no_static_form(config: AttentionConfig) -> str:
    """Why there is no form with fixed sizes; empty if there is one."""
    if config.tli:
        return f"this one borrows {config.tli}"
    if not config.use_ca:
        return "it has no CA"
    if config.body is not None:
        return "its body is a model of another family"
    return ""
