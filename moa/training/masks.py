"""Attention masks for training: documents in a packed row, and the paper's masks that simulate late
activations.

A drafter runs several tokens ahead of its target, so it is trained like that. The paper does it
with masks only: in every sequence some positions are *anchors*, and a query sees activations only
up to its latest anchor. So one forward pass trains all lags at once ("T-step bounded").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moa.errors import ConfigError, UsageError
from moa.training.data import Batch

_Device = torch.device | str


def same_document(segments: Tensor) -> Tensor:
    """`[B, L, L]`: both tokens belong to the same document. Padding counts as a document, so that
    every row attends to something."""
    return segments.unsqueeze(2) == segments.unsqueeze(1)


def causal(segments: Tensor) -> Tensor:
    """`[B, L, L]`: a token sees itself and those before it in its document."""
    index = torch.arange(segments.shape[1], device=segments.device)
    return same_document(segments) & (index.view(1, 1, -1) <= index.view(1, -1, 1))


@dataclass(frozen=True)
class Spacing:
    """Anchors every `low`..`high` tokens, drawn per document, in this share of the documents."""

    low: int
    high: int
    share: float


@dataclass(frozen=True)
class AnchorRule:
    """How anchors are placed. Documents outside every share keep only their prompt's activations,
    as if offline."""

    spacings: tuple[Spacing, ...] = (Spacing(6, 14, 1.0),)
    strict: bool = True
    """A query never sees its own activation, as in drafting. The public code lets an anchor see
    itself."""
    cold: float = 0.0
    """Share of the documents that have no activation at all, not even their prompt's: as if asked
    offline."""

    def __post_init__(self) -> None:
        if any(not 1 <= s.low <= s.high or not 0 <= s.share <= 1 for s in self.spacings):
            raise ConfigError("an anchor spacing needs 1 <= low <= high and a share within 0..1")
        if not 0 <= self.cold <= 1:
            raise ConfigError(f"the share of cold documents must be within 0..1, not {self.cold}")
        if sum(s.share for s in self.spacings) + self.cold > 1 + 1e-6:
            raise ConfigError(
                "the shares of the anchor spacings and of cold documents add up to more than 1"
            )

    def latest(self, batch: Batch, seed: int, step: int) -> NDArray[np.int64]:
        """`[B, L]`: index of the latest anchor at or before each position in its document; -1 where
        there is none."""
        rows, length = batch.ids.shape
        out = np.empty((rows, length), dtype=np.int64)
        index = np.arange(length)
        for i in range(rows):
            rng = np.random.default_rng([seed, step, int(batch.rows[i])])
            documents = int(batch.segments[i].max()) + 1
            every, cold = (drawn[batch.segments[i]] for drawn in self._draw(rng, documents))
            phase = rng.integers(0, 1 << 30, documents)[batch.segments[i]]
            prompt = ~batch.wanted[i]
            anchor = prompt | ((batch.positions[i] + phase) % every == 0) & (every < length)
            anchor &= ~cold
            start = index - batch.positions[i]
            latest = np.maximum.accumulate(np.where(anchor, index, -1))
            out[i] = np.where(latest >= start, latest, -1)
        return out

    def _draw(
        self, rng: np.random.Generator, documents: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """An anchor distance per document, "never" for those outside every share; and which
        documents are cold."""
        never = 1 << 30
        drawn = np.full(documents, never, dtype=np.int64)
        luck = rng.random(documents)
        low = 0.0
        for spacing in self.spacings:
            chosen = (luck >= low) & (luck < low + spacing.share)
            drawn[chosen] = rng.integers(spacing.low, spacing.high + 1, int(chosen.sum()))
            low += spacing.share
        return drawn, luck >= 1 - self.cold


def record_mask(
    batch: Batch, latest: NDArray[np.int64], *, strict: bool, device: _Device = "cpu"
) -> Tensor:
    """`[B, L, L]`: query i sees the activations j of its document up to its latest anchor, not its
    own if strict."""
    segments = torch.from_numpy(batch.segments).to(device)
    index = torch.arange(segments.shape[1], device=device)
    visible = index.view(1, 1, -1) <= torch.from_numpy(latest).to(device).unsqueeze(2)
    if strict:
        visible &= index.view(1, 1, -1) < index.view(1, -1, 1)
    return visible & same_document(segments)


def token_mask(
    batch: Batch, latest: NDArray[np.int64] | None, *, device: _Device = "cpu"
) -> Tensor:
    """`[B, L, L]`: causal inside the document; with `latest` (the staircase) only tokens after the
    latest anchor, so that the past must come through the activations."""
    segments = torch.from_numpy(batch.segments).to(device)
    allowed = causal(segments)
    if latest is not None:
        index = torch.arange(segments.shape[1], device=device)
        recent = index.view(1, 1, -1) > torch.from_numpy(latest).to(device).unsqueeze(2)
        allowed &= recent | torch.eye(len(index), dtype=torch.bool, device=device)
    return allowed


def borrowed_mask(batch: Batch, seen: Tensor) -> Tensor:
    """`[B, L, 2L]` for borrowed layers: the target's own rows where its activations are visible,
    then the drafter's."""
    return torch.cat(
        [seen, causal(torch.from_numpy(batch.segments).to(seen.device)) & ~seen], dim=2
    )


def parse_spacings(text: str) -> AnchorRule:
    """`6-14:0.6,32-64:0.2,cold:0.1`; one number is both ends, and one share may be left out: it is
    the rest."""
    found: list[tuple[str, float | None]] = []
    for piece in text.split(","):
        span, colon, share = piece.partition(":")
        try:
            found.append((span, float(share) if colon else None))
        except ValueError:
            raise UsageError(f"--spacing {piece!r}: its share must be a number") from None
    left = 1.0 - sum(given for _, given in found if given is not None)
    if sum(given is None for _, given in found) > 1:
        raise UsageError(f"--spacing {text!r}: only one spacing may leave its share out")
    spacings = []
    cold = 0.0
    for span, given in found:
        part = left if given is None else given
        if span == "cold":
            cold += part
            continue
        low, _, high = span.partition("-")
        try:
            spacings.append(Spacing(int(low), int(high or low), part))
        except ValueError:
            raise UsageError(
                f"--spacing {span!r} is not LOW-HIGH or LOW-HIGH:SHARE, nor cold:SHARE"
            ) from None
    return AnchorRule(tuple(spacings), cold=cold)
