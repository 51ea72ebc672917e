"""Random trees of tokens, and a model's logits for each node without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from testing.tiny import tiny


def random_tree(
    rng: np.random.Generator, size: int, vocab: int = 128
) -> tuple[list[int], list[int]]:
    """Tokens and parents: node 0 continues the prefix, every other node has any earlier one as its
    parent."""
    tokens = rng.integers(4, vocab, size).tolist()
    return tokens, [-1, *(int(rng.integers(0, i)) for i in range(1, size))]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def reference(family: str, **overrides: Any) -> PreTrainedModel:
    """The same weights under the library's plainest attention, the only one that applies Gemma 2's
    soft cap."""
    model = tiny(family, **overrides)
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def plain_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Logits after the last of `ids`."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].float()


@torch.no_grad()
def tree_logits(
    model: PreTrainedModel, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> Tensor:
    """Logits after every node, each from its own plain forward over prefix and path."""
    paths = [path_to(parents, node) for node in range(len(tokens))]
    return torch.stack(
        [plain_logits(model, [*prefix, *(tokens[i] for i in path)]) for path in paths]
    )
