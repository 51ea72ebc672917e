"""What a target in llama.cpp takes of this machine's memory, from the head of its file. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moa.errors import UsageError
from moa.gguf.reader import GgufHead, read_head
from moa.llama.runtime import KV_BITS
from moa.process.memory import available_bytes
from moa.target.contract import LoadOptions

KV_TYPE = "f16"
"""What keys and values are kept in, unless another type is asked for."""
PADDING = 32
"""Cells behind a full sequence, for the tokens that fill a call up."""
MOST_SEQUENCES = 64
"""Sessions in llama.cpp's memory at once. It ends the process where they are more than a call may
have tokens with logits."""
_BLOCK = 2
"""Sessions whose memory is taken at once: a chat, and what is asked beside it. Calls of 16 tokens
take little more a token than larger ones."""
_BLOCK_OF_SINGLE_TOKENS = 4
"""The same where a session brings one token to a call, which is to read the weights for many."""
_SHARE = 0.5
"""Of the free memory, for weights, keys and values."""
_SHARE_BESIDE_A_FILE = 0.1
"""Of the free memory, for keys and values where the weights stay in the file: the rest holds those of
the file's pages that are read most."""
_RUNNING_STATES = re.compile(r"^blk\.([0-9]{1,6})\.(ssm_|shortconv|time_mix)")
"""Tensors of layers that keep a running state."""
_KEYS = re.compile(r"^blk\.([0-9]{1,6})\.attn_k\.")
"""Those of layers that keep keys."""
_STATE_NUMBER_BYTES = 4
"""llama.cpp keeps states in float32, whatever keys and values are kept in."""
_LIBRARIES = 750_000_000
"""Bytes beside them: Python, its libraries, the tokenizer, and a forward's work."""


@dataclass(frozen=True, kw_only=True)
class LlamaPlan:
    """Sizes in bytes, on a processor."""

    weights: int
    mapped: bool
    """Whether the weights stay in the file, because the free memory does not hold them."""
    sequence: int
    """Keys, values and states of a session."""
    block: int
    """Sessions whose memory is taken at once."""
    sequences: int
    """Most sessions at once."""
    asked: int
    """How many the settings ask for: more than `sequences` where the free memory holds fewer."""
    capacity: int
    """Most tokens of a session."""
    free: int
    """Available now; 0 where the system does not say."""
    drafter: int = 0
    """Weights of what drafts streams beside it."""
    drafter_token: int = 0
    """Keys and values of a session's token there."""

    @property
    def kv_tokens(self) -> int:
        """Tokens of all sessions, each a whole context."""
        return self.sequences * self.capacity

    @property
    def cut(self) -> str:
        """How much less than asked for there is room for, in words; empty where all is."""
        if self.sequences == self.asked:
            return ""
        return (
            f"{self.asked * self.capacity:,} tokens, {self.asked} sessions, and the free memory"
            f" holds {self.kv_tokens:,}, {self.sequences} of them"
        )

    @property
    def at_start(self) -> int:
        """Before any session."""
        weights = 0 if self.mapped else self.weights
        return weights + self.block * self.sequence + self.drafter + _LIBRARIES

    @property
    def at_most(self) -> int:
        """With as many sessions as there may be."""
        more = (self.sequences - self.block) * self.sequence
        return self.at_start + more + self.kv_tokens * self.drafter_token

    @property
    def figures(self) -> dict[str, int]:
        """All sizes by name, in megabytes but for the sessions and the tokens, for logs."""
        sizes = {
            "weights": self.weights,
            "session": self.sequence,
            "drafter": self.drafter,
            "libraries": _LIBRARIES,
            "at_start": self.at_start,
            "at_most": self.at_most,
            "free": self.free,
        }
        figures = {f"{name}_mb": round(size / 1e6) for name, size in sizes.items()}
        return figures | {"sessions": self.sequences, "kv_tokens": self.kv_tokens}

    def __str__(self) -> str:
        weights = "stay in the file" if self.mapped else _gb(self.weights)
        free = f"; {_gb(self.free)} are free" if self.free else ""
        drafter = f", drafter {_gb(self.drafter)}" if self.drafter else ""
        return (
            f"takes {_gb(self.at_start)} on a processor: weights {weights},"
            f" {self.block} sessions {_gb(self.block * self.sequence)}{drafter},"
            f" libraries {_gb(_LIBRARIES)};"
            f" up to {_gb(self.at_most)} with {self.sequences} sessions at once{free}"
        )


def plan_memory(path: Path, options: LoadOptions) -> LlamaPlan:
    """The plan of a file, of which only the head is read."""
    return plan_of(read_head(path), options)


def plan_of(head: GgufHead, options: LoadOptions) -> LlamaPlan:
    """What a model takes of the machine's memory, planned from the head of its file: as many
    sessions at once as the settings allow and the free memory's share holds, one at least."""
    weights = head.path.stat().st_size
    capacity = capacity_of(head, options)
    sequence = session_bytes(head, options.kv_type or KV_TYPE, capacity + PADDING)
    free = available_bytes()
    sequences = asked = most_sequences(options, capacity)
    mapped = 0 < free < weights
    if free:
        for_sessions = free * _SHARE_BESIDE_A_FILE if mapped else free * _SHARE - weights
        affordable = int(for_sessions) // max(1, sequence)
        sequences = max(1, min(sequences, affordable))
    # Memory is taken for several sessions at once (a block).
    together = _BLOCK if options.exact and not is_mixture(head) else _BLOCK_OF_SINGLE_TOKENS
    return LlamaPlan(
        weights=weights,
        mapped=mapped,
        sequence=sequence,
        block=min(sequences, together),
        sequences=sequences,
        asked=asked,
        capacity=capacity,
        free=free,
    )


def capacity_of(head: GgufHead, options: LoadOptions) -> int:
    """Most tokens of a session: what is asked for, within the model's context."""
    return min(options.capacity, max(1, head.number("{arch}.context_length")))


def most_sequences(options: LoadOptions, capacity: int) -> int:
    """Sessions at once that the settings allow, whatever the memory. A `UsageError` where that is
    none: a session holds a whole context from its start."""
    if 0 < options.kv_tokens < capacity:
        raise UsageError(
            f"--kv-tokens {options.kv_tokens} holds no session: with a GGUF file each takes a whole"
            f" context, {capacity:,} tokens here",
            hint=f"give --kv-tokens {capacity} at least, or lower --max-context-tokens",
        )
    full = options.slots * capacity
    return min(-(-min(options.kv_tokens or full, full) // capacity), MOST_SEQUENCES)


def is_mixture(head: GgufHead) -> bool:
    """Whether its layers have experts, of which a token sees a few."""
    return head.number("{arch}.expert_count", 0) > 0


def layers_with_states(head: GgufHead) -> set[int]:
    """The layers that keep a running state, instead of keys and values or beside them, by the names
    of their tensors: llama.cpp itself says it only of a model that is loaded."""
    return _layers_of(head, _RUNNING_STATES)


def _layers_of(head: GgufHead, names: re.Pattern[str]) -> set[int]:
    """The layers that have a tensor of such a name."""
    found = (names.search(tensor.name) for tensor in head.tensors)
    return {int(match[1]) for match in found if match}


def session_bytes(head: GgufHead, kv_type: str, tokens: int) -> int:
    """Bytes of a session with memory for so many tokens: their keys and values, and the states of
    its recurrent layers, which do not grow, twice: a copy is kept to go back to."""
    return kv_bytes_per_token(head, kv_type) * tokens + 2 * state_bytes(head)


def state_bytes(head: GgufHead) -> int:
    """Bytes of the running states of a text, by the head of a model's file, as llama.cpp computes
    them; 0 of a model that has none."""
    layers = len(layers_with_states(head))
    width = head.number("{arch}.embedding_length")
    if (size := head.number("{arch}.wkv.head_size", 0)) > 0:  # RWKV
        numbers = width * (head.number("{arch}.token_shift_count", 2) + size)
    elif (length := head.number("{arch}.shortconv.l_cache", 0)) > 0:  # LFM2
        numbers = width * (length - 1)
    elif (size := head.number("{arch}.kda.head_dim", 0)) > 0:  # Kimi
        inner = head.number("{arch}.attention.head_count", 1) * size
        numbers = 3 * (head.number("{arch}.ssm.conv_kernel", 4) - 1) * inner + size * inner
    else:
        inner = head.number("{arch}.ssm.inner_size", 0)
        state = head.number("{arch}.ssm.state_size", 0)
        convolved = inner + 2 * head.number("{arch}.ssm.group_count", 0) * state
        numbers = max(0, head.number("{arch}.ssm.conv_kernel", 0) - 1) * convolved + inner * state
    return layers * numbers * _STATE_NUMBER_BYTES


def kv_bytes_per_token(head: GgufHead, kv_type: str) -> int:
    """Bytes that a token's keys and values take in all layers, by the head of a model's file, where
    numbers are kept as `kv_type`. Recurrent layers keep none: their number of KV heads is 0, or they
    have no keys."""
    heads = head.number("{arch}.attention.head_count", 1) or 1
    by_layer = head.metadata.get(f"{head.architecture}.attention.head_count_kv", heads)
    if not isinstance(by_layer, list):
        recurrent = layers_with_states(head) - _layers_of(head, _KEYS)
        layers = range(head.number("{arch}.block_count"))
        by_layer = [0 if layer in recurrent else by_layer for layer in layers]
    width = head.number(
        "{arch}.attention.key_length", head.number("{arch}.embedding_length") // heads
    )
    value_width = head.number("{arch}.attention.value_length", width)
    numbers = sum(by_layer) * (width + value_width)
    return int(numbers * KV_BITS[kv_type] / 8)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
