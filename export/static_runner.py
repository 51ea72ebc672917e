"""The host's part of a static form, in numpy: padding, rotation, embedding and top-k. Also the reference for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.body import BodySpec
from export.runner import Float, StepInput, StepOutput, open_session
from export.static_forms import STATIC_MASKED, StaticShape

Feeds = dict[str, NDArray[Any]]


class StaticRunner:
    """`Runner` over a static form: longer inputs run in pieces; the oldest rows beyond its capacity are dropped."""

    def __init__(
        self,
        run: Callable[[Feeds], list[NDArray[Any]]],
        embedding: NDArray[np.floating[Any]],
        spec: BodySpec,
        shape: StaticShape,
        *,
        rope_theta: float,
        top_k: int,
        draft_to_target: NDArray[np.int64] | None = None,
    ) -> None:
        self.spec, self.shape = spec, shape
        self._run, self._embedding, self._top_k, self._map = run, embedding, top_k, draft_to_target
        width = spec.cache[0].head_dim
        self._steps = rope_theta ** (-np.arange(0, width, 2, dtype=np.float32) / width)

    def step(self, step: StepInput) -> StepOutput:
        """One step of any size."""
        past, logits = list(step.past), []
        before = past[0].shape[1]
        for start in range(0, len(step.ids), self.shape.tokens):
            part = slice(start, min(start + self.shape.tokens, len(step.ids)))
            out, *rows = self._run(self.feeds(step, part, past))
            used = part.stop - start
            logits.append(out[0, :used])
            past = [np.concatenate([old, new[0, :, :used]], axis=1) for old, new in zip(past, rows, strict=True)]
        scores = np.concatenate(logits)[step.queries]
        best = np.argsort(-scores, axis=-1, kind="stable")[:, : self._top_k]
        logp = np.take_along_axis(scores, best, -1) - np.logaddexp.reduce(scores, axis=-1, keepdims=True)
        tokens = best if self._map is None else self._map[best]
        new = [row[:, before:] for row in past]
        return StepOutput(logp.astype(np.float32), tokens.astype(np.int64), new)

    def feeds(self, step: StepInput, part: slice, past: list[Float]) -> Feeds:
        """The graph's inputs for some of a step's tokens; `past` holds the rows of all tokens before them."""
        shape, used, held = self.shape, part.stop - part.start, min(past[0].shape[1], self.shape.past)
        skipped = past[0].shape[1] - held
        ids, positions = np.zeros(shape.tokens, np.int64), np.zeros(shape.tokens, np.float32)
        ids[:used], positions[:used] = step.ids[part], step.positions[part]
        angles = np.tile(positions[:, None] * self._steps, 2)
        sign = np.repeat(np.array([-1.0, 1.0], np.float32), len(self._steps))
        mask = np.full((shape.tokens, shape.past + shape.tokens), STATIC_MASKED, np.float32)
        visible = step.mask[part, skipped : part.stop + step.past[0].shape[1]]
        mask[:used, :held][visible[:, :held]] = 0.0
        mask[:used, shape.past : shape.past + used][visible[:, held:]] = 0.0
        mask[range(used, shape.tokens), range(shape.past + used, shape.past + shape.tokens)] = 0.0
        feeds: Feeds = {
            "x": self._embedding[ids].astype(np.float32)[None],
            "cos": np.cos(angles).astype(np.float32)[None],
            "sin": (np.sin(angles) * sign).astype(np.float32)[None],
            "mask": mask[None, None],
        }
        for i, rows in enumerate(past):
            feeds[f"past_{'kv'[i % 2]}_{i // 2}"] = _padded(rows[:, skipped:], shape.past)
        return feeds | self._records(step)

    def _records(self, step: StepInput) -> Feeds:
        of = self.spec.records
        assert of is not None
        none = np.zeros((of.kv_heads, 0, of.head_dim), np.float32)
        key, value = (
            none if rows is None else rows[:, -self.shape.records :] for rows in (step.record_k, step.record_v)
        )
        mask = np.full((1, 1, 1, self.shape.records), STATIC_MASKED, np.float32)
        mask[..., : key.shape[1]] = 0.0
        return {
            "record_k": _padded(key, self.shape.records),
            "record_v": _padded(value, self.shape.records),
            "record_mask": mask,
            "has_records": np.full((1, 1, 1), float(key.shape[1] > 0), np.float32),
        }


def session_of(model: Path) -> Callable[[Feeds], list[NDArray[Any]]]:
    """Run a static form on the CPU."""
    session = open_session(model)
    return lambda feeds: session.run(None, feeds)


def _padded(rows: Float, capacity: int) -> Float:
    out = np.zeros((1, rows.shape[0], capacity, rows.shape[2]), np.float32)
    out[0, :, : rows.shape[1]] = rows
    return out
