"""What a target will take of this machine's memory, known before it is loaded, and how much is left
for its KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from moa.errors import UsageError
from moa.process.memory import available_bytes
from moa.target.contract import LoadOptions
from moa.target.identity import repeated_weights, text_shapes
from moa.target.loading import read_facts
from moa.target.torch_target import pick_device, pick_dtype

_LIBRARIES = 900_000_000
"""Bytes that torch, its kernels and Python take beside the weights; 0.6 GB were measured."""
_KEPT_FREE = 0.1
"""Share of the free memory that is left to others: a cache that grows must not make a machine swap."""
_LEAST_TOKENS = 4096
"""Tokens of KV cache without which serving is of no use."""
_INT8_BYTES = 1
"""Bytes of a quantized weight."""


@dataclass(frozen=True, kw_only=True)
class DrafterMemory:
    """Bytes that a drafter takes in the target's process."""

    at_start: int = 0
    """Its weights."""
    per_token: int = 0
    """Its keys and values of a session's token, at most."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the CPU."""

    weights: int
    head: int
    """The LM head once more, in the layout and precision of its product."""
    kv_bytes_per_token: int
    kv_tokens: int
    """What the KV cache may grow to; it takes memory as it is used."""
    asked: int
    """What the settings ask for: more than `kv_tokens` where the free memory holds fewer."""
    free: int
    """Available now; 0 where the system does not say."""
    drafter: DrafterMemory = DrafterMemory()
    """Of the model that drafts streams here, which has a cache of its own for the same tokens."""
    smaller: str = ""
    """How to take less, if there is a way."""

    @property
    def bytes_per_token(self) -> int:
        """What a session's token takes, in the target's cache and in the drafter's."""
        return self.kv_bytes_per_token + self.drafter.per_token

    @property
    def cut(self) -> str:
        """How much less than asked for there is room for, in words; empty where all is."""
        if self.kv_tokens == self.asked:
            return ""
        return f"{self.asked:,} tokens, and the free memory holds {self.kv_tokens:,}"

    @property
    def kv_limit(self) -> int:
        """The KV caches at their largest."""
        return self.kv_tokens * self.bytes_per_token

    @property
    def at_start(self) -> int:
        """Before any session."""
        return self.weights + self.head + self.drafter.at_start + _LIBRARIES

    @property
    def figures(self) -> dict[str, int]:
        """All sizes by name, in megabytes but for the tokens, for logs."""
        sizes = {
            "weights": self.weights,
            "head": self.head,
            "drafter": self.drafter.at_start,
            "libraries": _LIBRARIES,
            "at_start": self.at_start,
            "kv_limit": self.kv_limit,
            "at_most": self.at_start + self.kv_limit,
            "free": self.free,
        }
        figures = {f"{name}_mb": round(size / 1e6) for name, size in sizes.items()}
        figures["kv_tokens"] = self.kv_tokens
        return figures

    def __str__(self) -> str:
        free = f"; {_gb(self.free)} are free" if self.free else ""
        caches = "the KV cache grows"
        if self.drafter.per_token:
            caches = "the KV caches of target and drafter grow"
        return (
            f"takes {_gb(self.at_start)}: {self.parts}; {caches} with use, up to"
            f" {_gb(self.kv_limit)} ({self.kv_tokens:,} tokens){free}"
        )

    @property
    def parts(self) -> str:
        """What is there at the start, in words."""
        drafter = f", drafter {_gb(self.drafter.at_start)}" if self.drafter.at_start else ""
        return (
            f"weights {_gb(self.weights)}, the head's copy {_gb(self.head)}{drafter},"
            f" libraries {_gb(_LIBRARIES)}"
        )


def plan_memory(
    source: str, options: LoadOptions, drafter: DrafterMemory | None = None
) -> MemoryPlan | None:
    """Return what a target in torch will take of the machine's memory together with the `drafter`
    beside it, before any weights are read, with as much KV cache as fits; a `UsageError` where it
    does not fit. None for a device other than a CPU, which has memory of its own."""
    device = pick_device(options.device)
    if device != "cpu":
        return None
    dtype = pick_dtype(options.dtype, device)
    facts, folder = read_facts(source, identify=False)
    all_numbers = sum(math.prod(shape) for shape in text_shapes(folder).values())
    if facts.tie_embeddings:
        all_numbers -= repeated_weights(folder)  # a head that is stored all the same is not loaded
    head_numbers = facts.vocab_size * facts.hidden_size
    # The embedding and the head are never quantized. Tied, they are one matrix.
    outer_numbers = head_numbers if facts.tie_embeddings else 2 * head_numbers
    layer_numbers = all_numbers - outer_numbers
    layer_itemsize = _INT8_BYTES if options.quantize else dtype.itemsize
    cached_numbers = (
        2 * facts.layers * facts.kv_heads * facts.head_dim
    )  # keys and values of a token
    tokens_if_full = options.slots * min(options.capacity, facts.max_positions)
    smaller = "" if dtype == torch.bfloat16 else "--dtype bfloat16 halves it"
    asked = min(options.kv_tokens or tokens_if_full, tokens_if_full)
    plan = MemoryPlan(
        weights=layer_numbers * layer_itemsize + outer_numbers * dtype.itemsize,
        head=head_numbers * torch.float32.itemsize,  # the copy that its product reads
        kv_bytes_per_token=cached_numbers * dtype.itemsize,
        kv_tokens=asked,
        asked=asked,
        free=available_bytes(),
        drafter=drafter or DrafterMemory(),
        smaller=smaller,
    )
    return _fitted(plan, source)


def _fitted(plan: MemoryPlan, source: str) -> MemoryPlan:
    """Return the plan with as many tokens of KV cache as fit beside the rest into the free memory;
    a `UsageError` where too few do."""
    if not plan.free:
        return plan  # the system does not say what is free
    usable = int(plan.free * (1 - _KEPT_FREE))
    left_for_cache = usable - plan.at_start
    tokens = min(plan.kv_tokens, left_for_cache // plan.bytes_per_token)
    fewest_tokens = min(plan.kv_tokens, _LEAST_TOKENS)
    if tokens < fewest_tokens:
        needed = plan.at_start + fewest_tokens * plan.bytes_per_token
        raise UsageError(
            f"{source} needs {_gb(needed)} of memory here ({plan.parts},"
            f" KV cache of {fewest_tokens:,} tokens), and of {_gb(plan.free)} free it may take {_gb(usable)}",
            hint=plan.smaller or "free some, or take a smaller target",
        )
    return replace(plan, kv_tokens=tokens)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
