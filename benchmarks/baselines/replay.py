"""A drafter with a stated acceptance rate: for speed on targets without a trained drafter.

It does all the work of a MoA drafter with random weights, and then replaces the output: on the path of the known text
its best guess is the true token with the stated probability, and a wrong one otherwise. It shows the speed for an
assumed acceptance, and does not measure acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from moa.errors import ConfigError
from moa.model.drafter import Drafter
from moa.model.drafting import Level, MoaDrafting
from moa.model.target import Committed

_SURE, _UNLIKELY = math.log(0.9), math.log(0.05)


def guess(text: Sequence[int], at: int, right: float, vocabulary: int) -> int:
    """The guess of a drafter with this acceptance at this position: a fixed draw, so that all ways are right at the
    same positions."""
    lucky = np.random.default_rng([at, text[at]]).random() < right
    return text[at] if lucky else (text[at] + 1) % vocabulary


class ReplayDrafting(MoaDrafting):
    """Drafts known texts, prompts included, right with probability `right` at each token, by a fixed draw."""

    def __init__(
        self, drafter: Drafter, texts: Sequence[Sequence[int]], right: float, *, slots: int = 1, capacity: int = 2048
    ) -> None:
        if not 0 <= right <= 1:
            raise ConfigError(f"a probability is within 0..1, not {right}")
        super().__init__(drafter, slots=slots, capacity=capacity)
        self.texts, self.right = [list(text) for text in texts], right
        self._logs: dict[int, list[int]] = {}

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """As MoA does, remembering the tokens to know the place in the text."""
        super().observe(slot, tokens, committed)
        self._logs.setdefault(slot, []).extend(tokens)

    def close(self, slot: int) -> None:
        """Give a slot back."""
        super().close(slot)
        self._logs.pop(slot, None)

    def scores(self, level: Level, logits: Tensor) -> Tensor:
        """The drafter's own scores, with the stated luck on the path of the text."""
        scores = super().scores(level, logits)
        for row, (request, grower) in enumerate(zip(level.requests, level.growers, strict=True)):
            context = [*self._logs.get(request.slot, []), request.pending]
            text = next((t for t in self.texts if t[: len(context)] == context), None)
            if text is None:
                continue
            for column, node in enumerate(grower.frontier):
                path: list[int] = []
                while node > 0:
                    path.insert(0, grower.tokens[node])
                    node = grower.parents[node]
                at = len(context) + len(path)
                if at < len(text) and text[len(context) : at] == path:
                    guessed = guess(text, at, self.right, self.vocab_size)
                    scores[row, column].clamp_(max=_UNLIKELY)
                    scores[row, column, text[at]] = -math.inf
                    scores[row, column, guessed] = _SURE
        return scores


class ReplayLlama(LlamaForCausalLM):
    """The same luck for an assistant of Hugging Face's `generate`: a Llama's work, then the guess at the known text."""

    def __init__(self, config: LlamaConfig, texts: Sequence[Sequence[int]] = (), right: float = 0.0) -> None:
        super().__init__(config)
        self.texts, self.right = [list(text) for text in texts], right
        self._text: list[int] = []

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **how: Any) -> Any:
        """The model's own output, its logits replaced; a batch of one, as assisted generation has it."""
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        ids = input_ids[0].tolist()
        if start == 0:
            self._text = next((text for text in self.texts if text[: len(ids)] == ids), [])
        out = super().forward(input_ids=input_ids, past_key_values=past_key_values, **how)
        rows = out.logits.shape[1]
        for row, at in enumerate(range(start + len(ids) - rows + 1, start + len(ids) + 1)):
            if at < len(self._text):
                out.logits[0, row] = torch.zeros_like(out.logits[0, row])
                out.logits[0, row, guess(self._text, at, self.right, self.config.vocab_size)] = 100.0
        return out
