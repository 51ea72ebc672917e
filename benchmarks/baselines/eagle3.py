"""EAGLE-3.1 trained here: the class that serves published ones, begun anew and written in
SpecForge's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig

from moa.config import TargetFacts
from moa.drafters.eagle3.config import NORMS, Eagle3Config
from moa.drafters.eagle3.model import LAYER, Eagle3Drafter
from moa.drafters.taps import authors_taps
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import WEIGHTS


def eagle3_config(
    facts: TargetFacts, *, intermediate_size: int, heads: int, kv_heads: int
) -> Eagle3Config:
    """An EAGLE-3.1 of the target's width, with the authors' layers and norms."""
    # As a keyword of both transformers 4 and 5, which keeps it elsewhere.
    rotation: dict[str, Any] = {"rope_theta": facts.rope_theta}
    layer = LlamaConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=1,
        vocab_size=facts.vocab_size,
        rms_norm_eps=facts.rms_norm_eps,
        **rotation,
    )
    return Eagle3Config(
        layer=layer,
        taps=authors_taps(facts.layers),
        target_hidden_size=facts.hidden_size,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=True,
        norm_output=True,
    )


def new_eagle3(config: Eagle3Config, shared: SharedWeights) -> Eagle3Drafter:
    """An untrained drafter with the target's embedding and head."""
    model = Eagle3Drafter(
        config, None, len(shared.head), SharedWeights(shared.embedding, shared.head)
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    return model.to(device=shared.head.device)


def save_eagle3(model: Eagle3Drafter, folder: Path) -> None:
    """Write config and weights, with the target's embedding and head left out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    values = config.layer.to_diff_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.layer.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps]},
        **{name: getattr(config, name) for name in NORMS},
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    state = {
        _theirs(name): value.detach().contiguous() for name, value in model.state_dict().items()
    }
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def _theirs(name: str) -> str:
    if name.startswith("hidden_norm."):
        return LAYER[0] + name
    return name.replace("layer.", LAYER[0]) if name.startswith("layer.") else name
