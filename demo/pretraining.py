"""Next-token training of a plain causal language model: how the demo's target was made."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from moa.model.blocks import additive
from moa.training.data import Batch
from moa.training.loop import Loss
from moa.training.masks import same_document


class Pretraining:
    """Cross-entropy on the wanted tokens of packed rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.module = model

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """Only wanted tokens go through the head: the prompts of the exercises are noise that
        cannot be learned."""
        device = self.module.device
        ids, segments = (
            torch.from_numpy(batch.ids).to(device),
            torch.from_numpy(batch.segments).to(device),
        )
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=device).tril()
        kind = device.type
        dtype = (
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.module.dtype
        )
        hidden: Tensor = self.module.model(
            input_ids=ids,
            position_ids=torch.from_numpy(batch.positions).to(device),
            attention_mask=additive(same_document(segments) & causal, dtype).unsqueeze(1),
            use_cache=False,
        ).last_hidden_state
        wanted = torch.from_numpy(batch.wanted).to(device)[:, 1:] & (
            segments[:, 1:] == segments[:, :-1]
        )
        logits = self.module.lm_head(hidden[:, :-1][wanted]).float()
        answer = ids[:, 1:][wanted]
        right = (logits.argmax(-1) == answer).sum()
        weight = torch.tensor(float(len(answer)), device=device)
        return Loss(F.cross_entropy(logits, answer, reduction="sum"), weight, {"accuracy": right})
