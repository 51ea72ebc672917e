"""A whole drafter in a page, by docs/extending.md: it guesses that a text goes on as it did for another
reader. It has no weights, and reads nothing of the target but its text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from moa.config import TargetFacts
from moa.drafters.contract import Drafter, DrafterKind, DraftRequest
from moa.target.torch_target import Committed
from moa.tree import DraftTree


@dataclass(frozen=True)
class ToyConfig:
    """It has no shape."""

    taps: tuple[int, ...] = ()
    borrowed_layers: int = 0

    def write(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": "toy"}), encoding="utf-8")


class ToyDrafter(Drafter):
    """The module, which has nothing in it."""

    name = "toy"
    config = ToyConfig()

    def drafting(self, **memory: Any) -> ToyDrafting:
        return ToyDrafting()


class ToyDrafting:
    """It reads texts whenever it is asked to: a `RecordReader` that reads no records."""

    reads_records = False
    record_lag = 0
    free = True

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._earlier: list[list[int]] = []

    def open(self) -> int:
        slot = next(number for number in count() if number not in self._texts)
        self._texts[slot] = []
        return slot

    def close(self, slot: int) -> None:
        self._earlier.append(self._texts.pop(slot))

    def known(self, slot: int) -> int:
        return len(self._texts[slot])

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        self.read(slot, tokens)

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        self._texts[slot] += tokens

    def missing(self, slot: int, start: int, stop: int) -> tuple[int, int] | None:
        return None

    def give(self, slot: int, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        raise AssertionError("it asks for no records")

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> DraftTree:
        text = [*self._texts[request.slot], request.pending]
        size = len(text)
        known = [*self._earlier, *self._texts.values()]
        longest = max((one for one in known if one[:size] == text), key=len, default=text)
        guesses = min(request.shape.depth, request.shape.nodes)
        chain = longest[size - 1 : size + guesses]
        return DraftTree(chain, list(range(-1, len(chain) - 1)), [0.0] * len(chain))


class ToyKind(DrafterKind):
    """Known by the `model_type` of its `config.json`."""

    name = "toy"
    on_device = False  # it has no graph
    shares_weights = False  # it can be used with any target

    def owns(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "toy"

    def config(self, folder: Path, facts: TargetFacts) -> ToyConfig:
        return ToyConfig()

    def load(
        self,
        folder: Path,
        target: PreTrainedModel | None,
        facts: TargetFacts,
        dtype: torch.dtype | None = None,
    ) -> ToyDrafter:
        return ToyDrafter()

    def weights_id(self, folder: Path, facts: TargetFacts) -> str:
        return "toy"
