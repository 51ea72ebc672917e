"""The drafters that the conformance suite holds to the contract. To add one is a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import AttentionDrafter, new_attention
from moa.drafters.contract import Drafter
from moa.drafters.eagle3.model import Eagle3Drafter
from moa.drafters.sibling.config import SiblingConfig
from moa.drafters.sibling.model import SiblingDrafter
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.model import StateDrafter
from moa.model.borrowed import SharedWeights, Sibling
from moa.target.loading import prepare
from moa.target.torch_target import Target
from testing.tiny import tiny
from tests.drafters.toy import ToyDrafter
from tests.model import published

ATTENTION: dict[str, dict[str, Any]] = {
    "published": {},
    "final state": {"final_state": True},
    "two borrowed layers": {"tli": 2},
    "four layers": {"layers": 4},
    "no records": {"use_ca": False},
    "a sibling": {"body": tiny("llama", num_hidden_layers=2).config.to_dict()},
}
"""Forms of the drafter with attention, by what its configuration says."""


def attention(target: Target, **how: Any) -> AttentionDrafter:
    """An untrained one."""
    body = Sibling(tiny("llama", num_hidden_layers=2, seed=1)) if "body" in how else None
    return new_attention(AttentionConfig.for_target(target.facts, **how), target.model, body)


def states(target: Target) -> StateDrafter:
    """An untrained one."""
    config = StateDrafterConfig.for_target(target.facts)
    return StateDrafter.new(config, SharedWeights.of(target.model))


def sibling(target: Target) -> SiblingDrafter:
    """A model of two layers."""
    loaded = tiny("llama", num_hidden_layers=2, seed=1)
    facts = prepare(loaded)
    body = Sibling(loaded)
    config = SiblingConfig.of(facts, body.memory)
    return SiblingDrafter(config, body, target.facts.vocab_size)


def eagle3(target: Target, folder: Path) -> Eagle3Drafter:
    """Over 40 words of its own."""
    published.write(folder, "specforge-3.1", tiny("llama"), list(range(3, 43)))
    return Eagle3Drafter.load(folder, target.facts, SharedWeights.of(target.model))


def drafter_of(kind: str, target: Target, folder: Path) -> Drafter:
    """A drafter of a torch kind with random weights; `folder` is for one that is loaded from files."""
    torch.manual_seed(0)
    drafter: Drafter
    if kind == "eagle3":
        return eagle3(target, folder)
    if kind == "states":
        drafter = states(target)
    elif kind == "sibling":
        drafter = sibling(target)
    else:
        drafter = attention(target, **ATTENTION[kind])
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return drafter.eval()


@dataclass(frozen=True)
class Subject:
    """A drafter, and what the suite must know of it."""

    name: str
    make: Callable[[Target, Path], Drafter]
    """Makes one beside a tiny Llama of 128 tokens; the folder is empty, for its files."""
    remembers: bool = False
    """Whether the texts of closed slots may help its drafts: else a slot that is used again drafts as
    a new one does."""

    def __str__(self) -> str:
        return self.name


def torch_subject(kind: str) -> Subject:
    """A drafter of one of our kinds."""
    return Subject(kind, lambda target, folder: drafter_of(kind, target, folder))


SUBJECTS: list[Subject] = [
    Subject("toy", lambda target, folder: ToyDrafter(), remembers=True),
    torch_subject("states"),
    torch_subject("eagle3"),
    torch_subject("sibling"),
    *(torch_subject(form) for form in ATTENTION),
]
