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
_NEVER = 1 << 30
"""A distance between anchors that no document reaches."""


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
        """Raise a `ConfigError` for distances or shares that are out of range."""
        for spacing in self.spacings:
            if not 1 <= spacing.low <= spacing.high or not 0 <= spacing.share <= 1:
                raise ConfigError(
                    "an anchor spacing needs 1 <= low <= high and a share within 0..1"
                )
        if not 0 <= self.cold <= 1:
            raise ConfigError(f"the share of cold documents must be within 0..1, not {self.cold}")
        if sum(spacing.share for spacing in self.spacings) + self.cold > 1 + 1e-6:
            raise ConfigError(
                "the shares of the anchor spacings and of cold documents add up to more than 1"
            )

    def latest(self, batch: Batch, seed: int, step: int) -> NDArray[np.int64]:
        """The index in its row, `[B, L]`, of the latest anchor at or before each token in its
        document; -1 where there is none. Anchors are the tokens up to which a drafter knows the
        target's activations: all of a prompt's, and in the answer one at each spacing, which is
        drawn anew for each document and step."""
        result = np.empty(batch.ids.shape, dtype=np.int64)
        for row in range(len(result)):
            random = np.random.default_rng([seed, step, int(batch.rows[row])])
            is_anchor = self._anchors(batch, row, random)
            index = np.arange(len(is_anchor))
            latest = np.maximum.accumulate(np.where(is_anchor, index, -1))
            document_start = index - batch.positions[row]
            # An anchor before it is of another document.
            result[row] = np.where(latest >= document_start, latest, -1)
        return result

    def _anchors(self, batch: Batch, row: int, random: np.random.Generator) -> NDArray[np.bool_]:
        """Draw the anchors of one row of a batch: a flag for each of its tokens."""
        segments = batch.segments[row]
        # By document; indexed with `segments` these arrays are by token.
        documents = int(segments.max()) + 1
        spacings, cold_documents = self._draw(random, documents)
        phases = random.integers(0, _NEVER, documents)  # where the first anchor is
        spacing = spacings[segments]
        is_spaced = (batch.positions[row] + phases[segments]) % spacing == 0
        is_prompt = ~batch.wanted[row]
        is_anchor = is_prompt | (is_spaced & (spacing < len(segments)))
        return is_anchor & ~cold_documents[segments]

    def _draw(
        self, random: np.random.Generator, documents: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draw for each document of a row the distance between its anchors, `_NEVER` for those
        outside every share; and which documents are cold, those without any activation."""
        distances = np.full(documents, _NEVER, dtype=np.int64)
        place = random.random(documents)  # among the shares, which lie side by side from 0 on
        low = 0.0
        for spacing in self.spacings:
            is_inside = (place >= low) & (place < low + spacing.share)
            distances[is_inside] = random.integers(
                spacing.low, spacing.high + 1, int(is_inside.sum())
            )
            low += spacing.share
        return distances, place >= 1 - self.cold


def record_mask(
    batch: Batch, latest: NDArray[np.int64], *, strict: bool, device: _Device = "cpu"
) -> Tensor:
    """Which activations of the target each token of the drafter may read, `[B, L, L]`: those of its
    document up to its latest anchor (`latest`), the newest that it is to know; not its own if
    strict."""
    segments = torch.from_numpy(batch.segments).to(device)
    index = torch.arange(segments.shape[1], device=device)
    query = index.view(1, -1, 1)
    key = index.view(1, 1, -1)
    visible = key <= torch.from_numpy(latest).to(device).unsqueeze(2)
    if strict:
        visible &= key < query
    return visible & same_document(segments)


def token_mask(
    batch: Batch, latest: NDArray[np.int64] | None, *, device: _Device = "cpu"
) -> Tensor:
    """Which tokens each token of the drafter may attend to, `[B, L, L]`: itself and those before it
    in its document; with `latest` (the staircase) only those after its latest anchor, so that the
    past must come through the target's activations."""
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
    before = causal(torch.from_numpy(batch.segments).to(seen.device))
    return torch.cat([seen, before & ~seen], dim=2)


def parse_spacings(text: str) -> AnchorRule:
    """Parse the flag `--spacing`, for example `6-14:0.6,32-64:0.2,cold:0.1`: ranges of distances
    between anchors, each with its share of the documents, and the share of documents without any
    activation. One number is both ends of a range, and one share may be left out: it is the
    rest."""
    parts: list[tuple[str, float | None]] = []
    for piece in text.split(","):
        span, colon, share_text = piece.partition(":")
        try:
            parts.append((span, float(share_text) if colon else None))
        except ValueError:
            raise UsageError(f"--spacing {piece!r}: its share must be a number") from None
    given_shares = [share for _, share in parts if share is not None]
    if len(given_shares) < len(parts) - 1:
        raise UsageError(f"--spacing {text!r}: only one spacing may leave its share out")
    rest = 1.0 - sum(given_shares)
    spacings = []
    cold = 0.0
    for span, given_share in parts:
        share = rest if given_share is None else given_share
        if span == "cold":
            cold += share
            continue
        low, _, high = span.partition("-")
        try:
            spacings.append(Spacing(int(low), int(high or low), share))
        except ValueError:
            raise UsageError(
                f"--spacing {span!r} is not LOW-HIGH or LOW-HIGH:SHARE, nor cold:SHARE"
            ) from None
    return AnchorRule(tuple(spacings), cold=cold)
