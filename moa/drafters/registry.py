"""Finds the kind of a drafter by the `model_type` of its `config.json`. To add a kind is a folder,
and a line here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from moa.config import TargetFacts, read_config
from moa.drafters.attention import AttentionKind
from moa.drafters.contract import Drafter, DrafterConfig, DrafterKind
from moa.drafters.eagle3 import Eagle3Kind
from moa.drafters.graph import GraphSizes
from moa.drafters.sibling import PREFIX as PREFIX
from moa.drafters.sibling import SiblingKind
from moa.drafters.states import StatesKind
from moa.errors import ConfigError
from moa.target.loading import locate

KINDS: dict[str, DrafterKind] = {
    kind.name: kind for kind in (StatesKind(), AttentionKind(), SiblingKind(), Eagle3Kind())
}
FILES = ("config.json", "model*.safetensors")
"""What is fetched of a drafter with a hub id."""


def register(kind: DrafterKind) -> None:
    """Add a kind, which is asked before the others."""
    KINDS[kind.name] = kind


@dataclass(frozen=True)
class StoredDrafter:
    """A drafter on disk: its kind, and its folder; a sibling may be a GGUF file."""

    kind: DrafterKind
    folder: Path

    def config(self, facts: TargetFacts) -> DrafterConfig:
        """Its shape, if it is of this target."""
        return self.kind.config(self.folder, facts)

    def load(
        self, target: PreTrainedModel | None, facts: TargetFacts, dtype: torch.dtype | None = None
    ) -> Drafter:
        """Its module beside its target."""
        return self.kind.load(self.folder, target, facts, dtype)

    def sizes(self, facts: TargetFacts, target: Path) -> GraphSizes:
        """The sizes of its graph beside the target in the folder `target`."""
        self.refuse_off_device()
        return self.kind.sizes(self.folder, facts, target)

    def weights_id(self, facts: TargetFacts) -> str:
        """The identity of its weights beside this target."""
        return self.kind.weights_id(self.folder, facts)

    def refuse_off_device(self) -> None:
        """Raise if it is for a server alone."""
        if not self.kind.on_device:
            raise ConfigError(
                f"{self.folder} holds a drafter of kind {self.kind.name}, which is for servers alone",
                hint="give it to the verifier as --server-drafter",
            )


_MADE_BY = "drafters are made by `moa-train`, or published for EAGLE-3"


def find(source: str | Path, *, hint: str = _MADE_BY) -> StoredDrafter:
    """Find the drafter that a user names: by its folder or hub id, or, for a language model that
    drafts as it is, by `independent:` and the model's. A `ConfigError` with `hint` where it is a
    model that is no drafter."""
    name = str(source)
    if name.startswith(PREFIX):
        model = name.removeprefix(PREFIX)
        path = Path(model).expanduser()
        return StoredDrafter(KINDS[SiblingKind.name], path if path.exists() else locate(model))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = locate(name, FILES)
    values = read_config(folder, "drafter")
    for kind in reversed(KINDS.values()):  # kinds that were registered last are asked first
        if kind.owns(values):
            return StoredDrafter(kind, folder)
    raise ConfigError(
        f"{folder / 'config.json'}: model_type {values.get('model_type')!r} is no drafter's:"
        f" known are those of {', '.join(KINDS)}",
        hint=hint,
    )
