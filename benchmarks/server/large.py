"""Forwards of a random target with the shape of a large one, in bfloat16, in this machine's memory.

Its weights exist once: the model is made without memory, and filled layer by layer from one block of random numbers. So
an 8B target needs its 15 GiB, 2 for the head in float32, and little more; with less room than that and some for
everybody else, it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.kit.figures import listing
from benchmarks.kit.progress import say
from moa.errors import UsageError
from moa.model.target import Row, Target

SHAPES = {
    "8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
}
SIZES = (1, 8, 17)
LUCK = (0.6, 0.8, 0.9)
_CONTEXT = 100
_BLOCK = 2**24
_LEFT = 2 * 2**30
"""Bytes of memory that others keep."""


def filled(config: LlamaConfig) -> Any:
    """A model of this shape with random weights; a `UsageError` where they do not fit."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        model.to(torch.bfloat16)
    needs = _bytes(model) + 4 * config.vocab_size * config.hidden_size  # the head is held in float32, too
    if (free := psutil.virtual_memory().available) < needs + _LEFT:
        raise UsageError(
            f"weights and head take {needs / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free"
        )
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            for weight in module.parameters(recurse=False):
                _fill(weight.data, block)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval().requires_grad_(False)


def _bytes(model: Any) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def _fill(weight: Tensor, block: Tensor) -> None:
    if weight.dim() == 1:  # a norm
        weight.fill_(1.0)
        return
    flat = weight.view(-1)
    for start in range(0, len(flat), len(block)):
        part = flat[start : start + len(block)]
        part.copy_(block[: len(part)])


def measure(shape: str, seconds: float, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Median seconds of a verification of so many tokens, each size at least twice and for about so long."""
    model = filled(SHAPES[shape])
    weights = _bytes(model)
    target = Target.from_model(model, capacity=256, pack_weights=True)
    slot = target.pool.acquire()
    read = target.forward([Row.chain(slot, range(5, 5 + _CONTEXT))])
    read.argmax(0)  # widens the head, once
    target.commit(read, 0, range(_CONTEXT))
    found = []
    for size in sizes:
        say(f"{size} tokens")
        took: list[float] = []
        while len(took) < 2 or sum(took) < seconds:
            began = time.perf_counter()
            target.forward([Row.chain(slot, range(200, 200 + size), judged="all")]).argmax(0)
            took.append(time.perf_counter() - began)
        found.append({"tokens": size, "seconds": round(median(took), 3), "times": len(took)})
    return {"shape": shape, "bytes": weights, "sizes": found}


def tables(result: Mapping[str, Any]) -> str:
    """Seconds of a forward, and tokens a second if each drafted token is right with some probability."""
    columns: dict[str, Any] = {"tokens in a forward": "{tokens}", "seconds": "{seconds:.2f}"}
    for luck in LUCK:
        columns[f"tokens/s, {luck:.0%} right"] = partial(_speed, luck)
    shown = listing(result["sizes"], columns)
    title = f"**random, {result['shape']}, bfloat16: {result['bytes'] / 2**30:.1f} GiB**"
    return f"{title}\n\n{shown}\n\nOne session; drafting is not counted."


def _speed(luck: float, run: Any) -> str:
    return f"{(1 - luck ** run['tokens']) / (1 - luck) / run['seconds']:.2f}"
