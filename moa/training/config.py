"""The configuration of a run of `moa-train`, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moa.errors import UsageError
from moa.training.loop import LoopSettings

PAPER_LOOP: Mapping[str, Any] = {"optimizer": "adam", "learning_rate": 6e-4}
"""The loop of the paper's public code."""
USEFUL_TOKENS = 5_000_000
"""Tokens that a run sees unless asked otherwise: several hundred steps, fewer make no drafter."""
MOST_EPOCHS = 20.0
"""Passes over the data that a run makes unless asked otherwise, at most."""
SMALL_VOCABULARY = 32_768
"""Tokens of a vocabulary up to which all are compared: their head costs no more than the rest of a
step."""
SAMPLED_WORDS = 8192
"""Tokens of a larger vocabulary that are compared in a step, beside those of its rows."""

TeacherMode = Literal["auto", "disk", "memory"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What to train, on what, and how. None: the default of whatever the field belongs to."""

    target: str
    """Folder or hub id."""
    data: tuple[str, ...]
    out: Path
    kind: str = "states"
    """The kind of drafter, by its name in the registry; `init` brings its own."""
    init: Path | None = None
    """A drafter to start from."""

    # ---- a Mixture of Attentions alone
    paper: bool = False
    """Losses, masks, optimizer and rate of the paper's public code."""
    body: str | None = None
    """A small model that is the body."""
    freeze_body: bool = False
    tli: int | None = None
    spacing: str | None = None
    """Spacings of anchors, as `moa.training.masks.parse_spacings` reads them."""
    gradient_checkpointing: bool = False

    shape: Mapping[str, Any] = field(default_factory=dict)
    """Dimensions that were given, by the names of `AttentionConfig`."""

    # ---- the target's own answers
    generate: bool = False
    generate_only: bool = False
    max_new_tokens: int = 256
    temperature: float = 0.0

    # ---- the run
    loop: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `LoopSettings` that were given."""
    epochs: float | None = None
    length: int = 512
    """Tokens of a row."""
    head_words: int | None = None
    """Words of the head that a step compares; 0: all; None: `SAMPLED_WORDS` of a vocabulary that is
    not a `SMALL_VOCABULARY`."""
    teacher: TeacherMode = "auto"
    """Where the target's results are kept: on disk, or nowhere, so that every step runs the target."""
    weights: str = "fp32"
    """Precision of the written file."""
    device: str | None = None
    dry_run: bool = False
    json: bool = False
    quiet: bool = False

    @property
    def seed(self) -> int:
        """The seed of everything that is drawn."""
        seed: int = self.loop.get("seed") or 0
        return seed

    def loop_settings(self, rows: int, world: int) -> LoopSettings:
        """The settings of the training loop. Where no number of steps is given, it follows from the
        epochs, passes over the `rows` of data, by `world` processes."""
        given = dict(self.loop)
        if self.paper:
            given = {**PAPER_LOOP, **given}
        if "steps" in given:
            return LoopSettings(**given)
        epochs = self.epochs
        if epochs is None:
            useful_epochs = USEFUL_TOKENS / (rows * self.length)
            epochs = min(max(1.0, useful_epochs), MOST_EPOCHS)
        if not 0 < epochs < float("inf"):
            raise UsageError(f"--epochs must be above 0, not {epochs}")
        settings = LoopSettings(**given, steps=1)  # for its defaults; the steps are not known yet
        rows_of_a_step = settings.batch * settings.accumulate * world
        steps = max(1, round(epochs * rows / rows_of_a_step))
        return LoopSettings(**given, steps=steps)

    def words_of_the_head(self, vocabulary: int) -> int:
        """How many of a vocabulary's tokens a step compares."""
        if self.head_words is None:
            return vocabulary if vocabulary <= SMALL_VOCABULARY else SAMPLED_WORDS
        if self.head_words == 0:
            return vocabulary
        return min(self.head_words, vocabulary)
