"""A model that is no family of ours runs by the library if it is plain: if all that its layers keep of
a text are keys and values, which they attend over as they are told.

That is decided by its modules, not by its name, and then shown: before it serves anything, a text in
pieces with a branching draft must say what the library says of each text as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from moa.errors import UnsupportedModelError, first_line
from moa.target.contract import Node, Target
from moa.target.library import ATTENTION, takes_cache
from moa.target.rows import Row

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_TEXT = 10
"""Tokens of the text that is compared."""
_PARENTS = (-1, 0, 1, 0, 3)
"""The parent of each token of the draft behind it, which branches after its first token."""
_FLOAT32_ERROR = 1e-3
"""How far the two may be apart in float32, as a part of the spread (standard deviation) of logits."""
_LOW_PRECISION_ERROR = 0.1
"""The same in bfloat16 and float16."""


def refuse_unless_plain(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModelError`, with the reason, for a model that must be a family of ours to
    be run."""
    if reason := _why_not(config):
        raise UnsupportedModelError(
            f"{config.model_type} is no family that is known here, and not plain: {reason}",
            hint="docs/real-models.md lists the families; llama.cpp may run a GGUF file of it",
        )


def _why_not(config: PretrainedConfig) -> str:
    """Why a model of this config is not plain, in words; empty if it is. Plain is a model whose
    layers keep only keys and values of a text, and attend over all of them as they are told. The
    model is made without memory for its weights, and its modules are looked at."""
    kinds = {*(getattr(config, "layer_types", None) or ()), "full_attention"}
    if len(kinds) > 1 or getattr(config, "sliding_window", None):
        return "its layers differ, or look through a window"
    for name in _SIZES:
        if type(getattr(config, name, None)) is not int:
            return f"its config does not say {name}"
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        backbone = model.get_decoder()
        layers = list(backbone.layers)
    except (ValueError, AttributeError, TypeError, KeyError, ImportError) as error:
        return f"the library makes no decoder of layers of it ({first_line(error)[:120]})"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        return "its head has a bias"
    for number, layer in enumerate(layers):
        if reason := _why_layer_is_not(layer):
            return f"layer {number} {reason}"
    return ""


def _why_layer_is_not(layer: nn.Module) -> str:
    """Why a layer is not plain, as the end of a sentence; empty if it is."""
    # Exactly one part may take the cache, and it must be attention.
    keeping = [part for part in layer.modules() if part is not layer and takes_cache(part)]
    if len(keeping) != 1 or not all(hasattr(keeping[0], name) for name in _PROJECTIONS):
        return "keeps something else than keys and values"
    if any(isinstance(part, nn.modules.conv._ConvNd) for part in layer.modules()):
        return "has a convolution"
    return ""


def refuse_unless_shown(target: Target, model: Any) -> None:
    """Compare what this target computes with what the library's own `model` does, and raise an
    `UnsupportedModelError` if they differ. The target is given a random text, and then a branching
    draft behind it; the model is given each path of the draft behind the text as a whole."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, target.facts.vocab_size, _TEXT).tolist()
    draft = rng.integers(0, target.facts.vocab_size, len(_PARENTS)).tolist()
    for node, found in enumerate(_logits_in_pieces(target, ids, draft)):
        whole = torch.tensor([[*ids, *_path_to(node, draft)]], device=model.device)
        with torch.inference_mode():
            wanted = model(whole, use_cache=False).logits[0, -1].float().cpu().numpy()
        share = _FLOAT32_ERROR if model.dtype == torch.float32 else _LOW_PRECISION_ERROR
        allowed = share * max(1.0, float(wanted.std()))
        difference = np.abs(found[: len(wanted)] - wanted).max()
        if not difference <= allowed:  # so written, NaN is refused, too
            raise UnsupportedModelError(
                f"{target.facts.family} cannot be a target: in pieces it says something else than"
                " as a whole",
                hint="it is no family that is known here; llama.cpp may run a GGUF file of it",
            )


def _logits_in_pieces(
    target: Target, ids: Sequence[int], draft: Sequence[int]
) -> NDArray[np.float32]:
    """Run a text, and then a branching draft behind it. Returns the logits after each node of the
    draft, `[nodes, vocabulary]`."""
    slot = target.cache.acquire()
    try:
        step = target.forward([Row.chain(slot, ids)])
        target.commit(step, 0, range(len(ids)))
        row = Row(slot, draft, list(_PARENTS), "all")
        return target.forward([row]).host_logits([Node(0, node) for node in range(len(draft))])
    finally:
        target.cache.release(slot)


def _path_to(node: int, draft: Sequence[int]) -> list[int]:
    """The tokens of the draft from its first one down to a node."""
    path: list[int] = []
    while node >= 0:
        path.append(draft[node])
        node = _PARENTS[node]
    path.reverse()
    return path
