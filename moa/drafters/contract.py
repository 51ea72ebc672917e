"""What a drafter is, to everything that is no drafter.

A drafter predicts the target's next tokens. It shares the target's embedding and head, or has its
own, and lives in three places: beside the target (records, and the server's own drafts), in a graph
on the device, and in training. `Drafter` is the module in memory, `Drafting` the module at work with
a memory of its own, `DrafterKind` what is known of a kind before any of its weights are read.

docs/extending.md adds one, step by step.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from moa.config import TargetFacts
from moa.drafters.graph import GraphSizes, GraphSpec
from moa.errors import UsageError
from moa.grammar.matcher import TextMask
from moa.model.borrowed import SharedWeights
from moa.records import RecordLayout
from moa.sampling import SamplingSettings
from moa.target.identity import weights_id
from moa.target.torch_target import Committed
from moa.tree import DraftTree, TreeShape

if TYPE_CHECKING:
    from moa.target.cuda.graphs import Graphs
    from moa.target.loading import LoadedModel
    from moa.training.config import TrainingConfig
    from moa.training.losses import TeacherLike, TeacherObjective

RecordPair = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Keys and values of activation records, `[tokens, count, width]` of a `RecordLayout` each."""


def no_graph(kind: str) -> UsageError:
    """The error of a kind that says it runs on devices, and has not all that an export needs."""
    return UsageError(
        f"a drafter of kind {kind} has no graph, so no bundle can be made of it",
        hint="write `sizes` of its kind and `graph_spec` and `graph_module` of its module, or say"
        " on_device = False and give it to the verifier as --server-drafter",
    )


class DrafterConfig(Protocol):
    """A drafter's `config.json`: its shape, and what it needs of the target."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose inputs it reads, counted from 0; the number behind the last
        layer is the final state. None for a drafter that reads no states."""

    @property
    def borrowed_layers(self) -> int:
        """How many of the target's last layers are a part of it."""

    def write(self, folder: Path) -> None:
        """Write `config.json`."""


class Drafter(nn.Module):
    """A drafter in memory."""

    name: ClassVar[str]
    """The name of its kind, in messages, metrics and reports."""
    config: Any
    """A `DrafterConfig` of its kind's own class."""
    shared: SharedWeights
    """Embedding and head, the target's or its own. No module: they are not trained."""
    vocab_size: int
    """Tokens that it and the target know: their tables may be padded differently."""
    record_lag: ClassVar[int] = 0
    """How many of the latest tokens may lack records: a drafter that has learnt to do without the
    newest is drafted with before these are made."""

    @property
    def weight(self) -> Tensor:
        """A weight, to read dtype and device from."""
        return next(self.parameters())

    # ---- beside the target

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's states that it reads; a target must be told to keep them."""
        taps: tuple[int, ...] = self.config.taps
        return taps

    @property
    def record_layout(self) -> RecordLayout | None:
        """The layout of an activation record; None if it reads none."""
        return None

    def records(self, pieces: Sequence[Committed]) -> RecordPair:
        """Make the activation records of tokens that the target has run, as they travel to the
        device. For a drafter with taps, each piece should know the states before it
        (`Committed.before`)."""
        raise NotImplementedError(f"{self.name} reads no records")

    def drafting(
        self, *, slots: int, capacity: int, scratch: int = 256, graphs: Graphs | None = None
    ) -> Drafting:
        """The drafter at work in torch, with memory for `slots` texts of `capacity` tokens and
        `scratch` drafted ones each. On an accelerator chains run as captured `graphs`."""
        raise NotImplementedError(f"{self.name} is not drafted with in torch")

    # ---- on the device

    @property
    def bundle_kind(self) -> Any:
        """What a bundle's manifest calls it: one of `moa.manifest.BundleKind`."""
        return self.name

    @property
    def graph_spec(self) -> GraphSpec:
        """Inputs and outputs of its graph."""
        raise no_graph(self.name)

    def example_records(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values `[heads, count, width]` that cross-attention could meet, for a comparison
        of its graph with torch; None where there is no cross-attention."""
        return None

    def graph_module(self) -> nn.Module:
        """Its layers as a module with the graph's inputs, in their order, and outputs."""
        raise no_graph(self.name)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for a tree after a sequence's `pending` token."""

    slot: int
    pending: int
    shape: TreeShape
    sampling: SamplingSettings
    grammar: TextMask | None = None
    """What may follow the text up to and including the pending token."""


class Drafting(Protocol):
    """A drafter at work, with a slot of memory for each text."""

    @property
    def free(self) -> bool:
        """Whether there is an empty slot."""

    def open(self) -> int:
        """Take an empty slot."""

    def close(self, slot: int) -> None:
        """Give a slot back."""

    def known(self, slot: int) -> int:
        """How many tokens of its text a slot has read."""

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Read `tokens`, which the target has run, in order, with these keys, values and states."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each request, all drafted together."""


class StateReader(Drafting, Protocol):
    """A `Drafting` that takes the target's states from every forward."""

    def take(self, slot: int, tokens: Sequence[int], states: Tensor) -> None:
        """Read `tokens`, which the target has run, with these states `[n, *]`."""

    def copy(self, source: int, tokens: int) -> int:
        """A new slot with the first tokens of another."""


class RecordReader(Drafting, Protocol):
    """A `Drafting` that can read a text later, from its tokens and activation records, and so needs
    not follow every forward."""

    reads_records: bool
    """Whether there are records for it at all."""
    record_lag: int
    """Records of so many of the latest tokens may be missing when it drafts."""

    def missing(self, slot: int, start: int, stop: int) -> tuple[int, int] | None:
        """The newest range within start..stop whose records it still wants."""

    def give(self, slot: int, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Store records of positions from `start` on."""

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Read more tokens of its text; their records, if any, are there."""


class StatesBefore:
    """Adds to consecutive pieces of one text the states before each, for records that are made of
    states."""

    def __init__(self) -> None:
        self._newest: Tensor | None = None
        """The state of the last token so far."""

    def of(self, piece: Committed) -> Committed:
        """Return the next piece of the text with the state `[1, width]` of the token before it, and
        remember its own last state for the piece after it."""
        before = self._newest
        self._newest = piece.states[-1:].clone()
        return replace(piece, before=before)


def to_numpy(rows: Tensor) -> NDArray[np.float32]:
    """A tensor as a float32 array on the host."""
    array: NDArray[np.float32] = rows.float().cpu().numpy()
    return array


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """Give the trainable linear layers of a module their first weights: small random ones, as usual
    for transformers, and biases of zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.weight.requires_grad:
            nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


@dataclass(frozen=True)
class Trainee:
    """A drafter to be trained, and how."""

    drafter: Drafter
    objective: TeacherObjective
    start: str
    """What training starts from: a digest of weights, or least squares; empty for random ones."""


def digest(module: nn.Module) -> str:
    """A hash of all weights of a module by their names and values: it says what a training run
    started from."""
    hashed = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        hashed.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return hashed.hexdigest()


class DrafterKind(ABC):
    """What is known of a kind of drafter. Its methods import what they need: to ask for a name
    costs nothing."""

    name: ClassVar[str]
    on_device: ClassVar[bool] = True
    """Whether it can be exported, and records can be made for it: then it is given to the server as
    `--drafter`, which drafts streams, too. Else it is given as `--server-drafter`."""
    shares_weights: ClassVar[bool] = True
    """Whether it has weights of the target, such as its embedding: else none are loaded for it, and
    without taps it drafts behind any target, also one that is not torch."""

    @abstractmethod
    def owns(self, config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is of this kind."""

    @abstractmethod
    def config(self, folder: Path, facts: TargetFacts) -> DrafterConfig:
        """Read `config.json`, and refuse a drafter of another target."""

    @abstractmethod
    def load(
        self,
        folder: Path,
        target: PreTrainedModel | None,
        facts: TargetFacts,
        dtype: torch.dtype | None = None,
    ) -> Drafter:
        """Load a trained drafter from its folder, beside its target, in the target's precision
        unless `dtype` says another. `target` is the torch model in memory; for a kind that shares
        no weights with it, it may be None."""

    reads_caches: ClassVar[bool] = False
    """Whether it learns from the target's keys and values."""

    def trainee(self, config: TrainingConfig, target: LoadedModel, teacher: TeacherLike) -> Trainee:
        """A drafter to be trained by this configuration: a new one, or that of `config.init`."""
        raise UsageError(
            f"moa-train trains no drafter of kind {self.name}",
            hint="a sibling drafts as it is; others are trained by whoever publishes them",
        )

    def weights_id(self, folder: Path, facts: TargetFacts) -> str:
        """The identity of its weights beside this target."""
        return weights_id(folder, facts)

    def sizes(self, folder: Path, facts: TargetFacts, target: Path) -> GraphSizes:
        """The sizes of its graph beside the target in the folder `target`."""
        raise no_graph(self.name)
