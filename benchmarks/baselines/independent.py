"""An independent small language model as drafter: it never sees the target's state, only its tokens.

A Llama of one or more layers and a final norm, all trained by KL from the target. Its embedding and head are the
target's, frozen, as they are for every other drafter here: all of its trainable size goes into layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.baselines.config import BaselineConfig
from benchmarks.baselines.layers import BaselineModel, run_layer
from moa.errors import UnsupportedModelError
from moa.model.blocks import Block, RMSNorm
from moa.model.borrowed import Rows
from moa.model.drafting import Level, LevelDrafting, append
from moa.model.shared import SharedWeights
from moa.model.target import Committed
from moa.training.data import Batch
from moa.training.distill import Distillation, DistillSettings
from moa.training.masks import additive, token_mask
from moa.training.teacher import Lesson, Teacher


class Independent(BaselineModel):
    """Embedding -> layers -> norm -> head."""

    def __init__(self, config: BaselineConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        self.layers = nn.ModuleList(self.block() for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, past: Sequence[Rows]) -> tuple[Tensor, list[Rows]]:
        """Normed final states, and each layer's new cache rows."""
        cos, sin = self.rotary(positions)
        x, rows = self.embed(ids), []
        blocks: list[Block] = list(self.layers)  # type: ignore[arg-type]
        for block, before in zip(blocks, past, strict=True):
            x, new = run_layer(block, x, block.input_layernorm(x), cos, sin, mask, before)
            rows.append(new)
        return self.norm(x), rows


class IndependentDrafting(LevelDrafting):
    """Drafts from tokens alone."""

    def __init__(self, model: Independent, *, slots: int = 1, capacity: int = 2048, scratch: int = 256) -> None:
        super().__init__(model.config.vocab_size, model.weight.device)
        self.model = model.eval()
        self.pool = model.pool(slots, capacity + scratch)

    def open(self) -> int:
        """Take an empty slot."""
        return self.pool.acquire()

    @torch.inference_mode()
    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Read the tokens; what the target made of them is not asked for."""
        known, count = self.pool.lengths[slot], len(tokens)
        past = [(self.pool.k[i, slot : slot + 1, :, :known], self.pool.v[i, slot : slot + 1, :, :known])
                for i in range(self.model.config.layers)]  # fmt: skip
        causal = torch.ones(count, known + count, dtype=torch.bool).tril(known)
        mask = additive(causal).to(self.device)[None, None]
        ids = torch.tensor([list(tokens)], device=self.device)
        _, rows = self.model(ids, committed.positions.unsqueeze(0), mask, past)
        append(self.pool, slot, torch.cat([k for k, _ in rows]), torch.cat([v for _, v in rows]))

    def logits(self, level: Level) -> Tensor:
        """One step over the frontier of every tree."""
        hidden, rows = self.model(level.ids, level.positions, level.mask, level.past(self.pool))
        level.keep(self.pool, rows)
        logits: Tensor = self.model.logits(hidden)
        return logits


class IndependentTraining(Distillation):
    """Plain distillation: every position predicts the target's next token from tokens."""

    def __init__(self, model: Independent, teacher: Teacher, settings: DistillSettings, seed: int = 0) -> None:
        super().__init__(model, teacher, settings, seed)  # type: ignore[arg-type]
        self.model = model

    def _draft(self, batch: Batch, lesson: Lesson, step: int, progress: float) -> tuple[Tensor, Tensor]:
        device = lesson.hidden.device
        ids, positions = torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.positions).to(device)
        mask = additive(token_mask(batch, None)).unsqueeze(1).to(device)
        past = [self.model.empty_rows(ids)] * self.model.config.layers
        hidden, _ = self.model(ids, positions, mask, past)
        return hidden, torch.ones_like(ids)


def as_llama(model: Independent, max_positions: int, eos_ids: Sequence[int]) -> LlamaForCausalLM:
    """The same model as a plain Hugging Face one, to stand alone or to assist `generate`."""
    config, shared = model.config, model.shared
    if shared.embedding_scale != 1.0 or shared.logit_softcap is not None:
        raise UnsupportedModelError(
            "a Llama cannot scale its embeddings or cap its logits as this drafter's target does"
        )
    tied = shared.embedding.data_ptr() == shared.head.data_ptr()
    llama: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            max_position_embeddings=max_positions,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=list(eos_ids),
            pad_token_id=None,
        )
    )
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    state |= {"model.embed_tokens.weight": shared.embedding, "lm_head.weight": shared.head}
    llama.load_state_dict(state)
    llama.to(device=model.weight.device, dtype=model.weight.dtype).eval().requires_grad_(False)
    return llama
