"""Rotary frequencies that depend on the longest text are settled once, by the capacity of a slot."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def settle_rope(backbone: Any, *, longest: int) -> None:
    """Fix the frequencies of a model that has two sets of them (longrope), for texts of up to
    `longest` tokens.

    The library chooses by the longest row of each forward, and computes a text anew when it grows
    beyond the shorter limit. A slot's keys stay: so texts that may become long have the long
    frequencies from their first token on, as other servers have it.
    """
    # Versions of the library name the settings differently; other rotations need nothing.
    rotary: Any = getattr(backbone, "rotary_emb", None)
    config: Any = getattr(rotary, "config", None)
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not settings or "longrope" not in (settings.get("rope_type"), settings.get("type")):
        return
    short_limit = settings.get("original_max_position_embeddings")
    if not short_limit:
        short_limit = config.original_max_position_embeddings
    # The library returns the long frequencies when it is asked for any length beyond the limit.
    length = short_limit + 1 if longest > short_limit else short_limit
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, rotary.inv_freq.device, seq_len=length)
    rotary.inv_freq = frequencies
    rotary.rope_type = "default"  # nothing is recomputed from now on
