"""A body that starts as layers of its target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from demo.inherit import inherit
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.errors import ConfigError
from moa.target.loading import load_model
from moa.training.data import Document, PackedRows, pack
from moa.training.teacher import Teacher
from moa.tree import MASKED
from testing.tiny import save_tiny


def test_all_layers_and_units_of_the_target_are_the_target(tmp_path: Path) -> None:
    loaded = load_model(save_tiny("llama", tmp_path / "target"))
    pack([Document.text(list(range(4, 36)))], 32, tmp_path / "rows")
    batch = PackedRows(tmp_path / "rows").rows(np.array([0]))
    facts = loaded.facts
    shape = {
        "layers": facts.layers,
        "num_attention_heads": facts.heads,
        "final_norm": True,
        "scaled_embedding": True,
        "self_attention_num_key_value_heads": facts.kv_heads,
        "self_attention_intermediate_size": loaded.model.config.intermediate_size,
    }
    drafter = new_attention(AttentionConfig.for_target(facts, **shape), loaded.model)
    inherit(drafter, Teacher(loaded.model), range(facts.layers), batch)
    ids = torch.tensor([[7, 9, 30, 11]])
    causal = torch.full((4, 4), MASKED).triu(1)[None, None]
    with torch.no_grad():
        alone = drafter.logits(
            drafter.features(ids, torch.arange(4)[None], causal, drafter.empty_rows(ids))[0]
        )
        torch.testing.assert_close(alone, loaded.model(ids).logits, atol=1e-3, rtol=1e-3)
    with pytest.raises(ConfigError, match=r"each 0\.\.3"):
        inherit(drafter, Teacher(loaded.model), (0, 1, 2, 9), batch)
    other = new_attention(
        AttentionConfig.for_target(facts, **shape | {"num_attention_heads": 2}), loaded.model
    )
    with pytest.raises(ConfigError, match="another shape"):
        inherit(other, Teacher(loaded.model), range(facts.layers), batch)
