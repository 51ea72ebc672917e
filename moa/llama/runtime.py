"""One model and one context of llama.cpp: tokens go in by sequence, logits come out by row."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int8, c_int32
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from moa.errors import ConfigError, MoaError, UsageError
from moa.llama.library import CPU, Batch, Library, Override

KV_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
"""What keys and values can be kept in, as `--kv-type` names it, and llama.cpp's numbers for them."""
KV_BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
}
"""Bits of a number in them, scales included."""
_CELLS = 256
"""llama.cpp rounds a sequence's cells up to a multiple of this."""


EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Names of the tensors that hold a mixture's experts, as llama.cpp's own `--cpu-moe` has them."""
_STATES_ALONE = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: what cannot be cut at a position."""


class Run(NamedTuple):
    """Tokens of one sequence, one after another."""

    sequence: int
    start: int
    """Position of the first one."""
    tokens: Sequence[int]
    judged: Sequence[int]
    """Which of them get logits, in order."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a model is laid out in memory, and cut into forwards."""

    sequences: int
    capacity: int
    """Most tokens of a sequence, those of a draft and its padding included."""
    batch: int
    """Most tokens of a call."""
    kv_type: str
    gpu_layers: int
    """-1: all."""
    threads: int
    experts_on_host: bool = False
    """Whether a mixture's experts stay in the machine's memory, whatever layers are on a card."""
    repack: bool = True
    """Whether weights are laid out anew in memory for this processor's kernels."""


def check_kv_type(name: str) -> None:
    """Refuse what keys and values cannot be kept in."""
    if name not in KV_TYPES:
        raise ConfigError(f"unknown --kv-type {name!r}", hint=f"one of {', '.join(KV_TYPES)}")


class Runtime:
    """Owns the model. Not thread-safe; `close` frees what it holds."""

    def __init__(self, library: Library, path: Path, shape: Shape) -> None:
        """Load; errors are one clear line."""
        self.shape = shape
        self._library = library
        self._c = library.c
        self._model = self._load(path)
        self._vocabulary = self._c.llama_model_get_vocab(self._model)
        self.vocab_size = int(self._c.llama_vocab_n_tokens(self._vocabulary))
        self._context = self._begin()
        self._memory = self._c.llama_get_memory(self._context)
        self._pool, self._free_pool = library.thread_pool(shape.threads)
        if self._pool:
            self._c.llama_attach_threadpool(self._context, self._pool, self._pool)
        # A sequence's id is handed over by a pointer for each token: one array serves all of them.
        self._ids: list[Any] = [(c_int32 * 1)(each) for each in range(shape.sequences)]
        self._ones = (c_int32 * shape.batch)(*[1] * shape.batch)

    def _load(self, path: Path) -> int:
        parameters = self._c.llama_model_default_params()
        parameters.n_gpu_layers = self.shape.gpu_layers
        parameters.use_extra_bufts = self.shape.repack
        if self.shape.experts_on_host:
            host = self._c.ggml_backend_cpu_buffer_type()
            # llama.cpp reads the list up to an entry without a pattern, while it loads.
            overrides = (Override * 2)(Override(EXPERTS.encode(), host), Override())
            parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        self._library.complaints.clear()
        model = self._c.llama_model_load_from_file(str(path).encode(), parameters)
        if not model:
            raise UsageError(f"llama.cpp cannot load {path}: {self._said()}")
        for wrong, why in (
            (not self._c.llama_model_has_decoder(model), "it has no decoder"),
            (self._c.llama_model_has_encoder(model), "it has an encoder"),
            (self._c.llama_model_is_diffusion(model), "it is a diffusion model"),
        ):
            if wrong:
                self._c.llama_model_free(model)
                raise UsageError(f"{path} cannot be a target: {why}")
        return int(model)

    @property
    def cells(self) -> int:
        """Tokens that a sequence has memory for."""
        return -(-self.shape.capacity // _CELLS) * _CELLS

    def _begin(self) -> int:
        shape = self.shape
        parameters = self._c.llama_context_default_params()
        parameters.n_ctx = self.cells * shape.sequences
        parameters.n_seq_max = shape.sequences
        parameters.n_batch = shape.batch
        parameters.n_ubatch = shape.batch
        parameters.n_outputs_max = shape.batch
        parameters.n_outputs_max_per_seq = shape.batch
        parameters.n_threads = shape.threads
        parameters.n_threads_batch = shape.threads
        parameters.type_k = KV_TYPES[shape.kv_type]
        parameters.type_v = KV_TYPES[shape.kv_type]
        # Each sequence has cells of its own, in the order of its tokens: among cells that all
        # share, a token's place would depend on the others, and so would the order of sums.
        parameters.kv_unified = False
        parameters.swa_full = True  # a window's cells are kept: a draft can be taken back
        parameters.no_perf = True
        self._library.complaints.clear()
        context = self._c.llama_init_from_model(self._model, parameters)
        if not context:
            self._c.llama_model_free(self._model)
            raise UsageError(
                f"llama.cpp cannot hold {shape.sequences} sessions of {shape.capacity} "
                f"tokens: {self._said()}",
                hint="lower --slots or --max-context-tokens",
            )
        found = self._c.llama_n_seq_max(context), self._c.llama_n_ubatch(context)
        if found != (shape.sequences, shape.batch):
            raise MoaError(f"llama.cpp made a context of {found}: its library is not understood")
        return int(context)

    def close(self) -> None:
        """Free all memory. The object is of no use afterwards."""
        if self._context:
            self._c.llama_free(self._context)
            self._c.llama_model_free(self._model)
            if self._pool and self._free_pool is not None:
                self._free_pool(self._pool)
            self._context = 0

    # ---- forwards

    def run(self, runs: Sequence[Run], *, unit: int = 1) -> list[NDArray[np.float32]]:
        """Run these tokens in one forward. Logits `[len(judged), vocab]` of each run. The head and
        a part of the last layer run for tokens with logits alone: so many as are a multiple of
        `unit`, where there are enough tokens."""
        total = sum(len(run.tokens) for run in runs)
        tokens = (c_int32 * total)()
        positions = (c_int32 * total)()
        sequences = (POINTER(c_int32) * total)()
        flags = (c_int8 * total)()
        at = 0
        outputs = 0
        for run in runs:
            end = at + len(run.tokens)
            tokens[at:end] = list(map(int, run.tokens))
            positions[at:end] = list(range(run.start, run.start + len(run.tokens)))
            sequences[at:end] = [self._ids[run.sequence]] * len(run.tokens)
            for node in run.judged:
                flags[at + node] = 1
            outputs += len(run.judged)
            at = end
        if outputs:
            others = (place for place in range(total) if not flags[place])
            for place in islice(others, -outputs % unit):
                flags[place] = 1
        batch = Batch(total, tokens, None, positions, self._ones, sequences, flags)
        code = self._c.llama_decode(self._context, batch)
        if code:
            raise MoaError(f"llama.cpp could not run a forward ({code}): {self._said()}")
        self._c.llama_synchronize(self._context)
        return self._logits(runs)

    def _logits(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        found = []
        at = 0
        empty = np.empty((0, self.vocab_size), dtype=np.float32)
        for run in runs:
            rows = []
            for node in run.judged:
                pointer = self._c.llama_get_logits_ith(self._context, at + node)
                if not pointer:
                    raise MoaError(f"llama.cpp has no logits of token {at + node}")
                memory = (ctypes.c_float * self.vocab_size).from_address(pointer)
                rows.append(np.ctypeslib.as_array(memory))
            at += len(run.tokens)
            found.append(np.stack(rows) if rows else empty)
        return found

    # ---- sequences

    def cut(self, sequence: int, length: int) -> bool:
        """Forget the tokens from position `length` on. False where the model cannot: its state is
        all that it keeps of them."""
        return bool(self._c.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def clear(self, sequence: int) -> None:
        """Forget a whole sequence."""
        self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def copy(self, source: int, into: int) -> None:
        """Give a sequence what another one holds."""
        self.clear(into)
        self._c.llama_memory_seq_cp(self._memory, source, into, -1, -1)

    def save(self, sequence: int) -> bytes:
        """The recurrent state of a sequence; its keys and values are left out."""
        size = self._c.llama_state_seq_get_size_ext(self._context, sequence, _STATES_ALONE)
        data = ctypes.create_string_buffer(size)
        written = self._c.llama_state_seq_get_data_ext(
            self._context, data, size, sequence, _STATES_ALONE
        )
        return data.raw[:written]

    def restore(self, sequence: int, state: bytes) -> bool:
        """Give a sequence a state that it had. False where llama.cpp cannot."""
        read = self._c.llama_state_seq_set_data_ext(
            self._context, state, len(state), sequence, _STATES_ALONE
        )
        return bool(read)

    # ---- facts

    @property
    def recurrent(self) -> bool:
        """Whether a part of what it keeps is a state, which holds no tokens one could take back."""
        return bool(
            self._c.llama_model_is_recurrent(self._model)
            or self._c.llama_model_is_hybrid(self._model)
        )

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights."""
        return int(self._c.llama_model_size(self._model))

    @property
    def on_cpu(self) -> bool:
        """Whether nothing but the processor computes."""
        return self.shape.gpu_layers == 0 or not self._library.has_card

    @property
    def adds_by(self) -> dict[str, Any]:
        """All that decides in which order sums are added, and so the last digits of a logit."""
        return {
            "build": self._library.build,
            "instructions": self._library.instructions,
            "devices": self.devices(),
            "gpu_layers": 0 if self.on_cpu else self.shape.gpu_layers,
            "kv_type": self.shape.kv_type,
            "batch": self.shape.batch,
            "repack": self.shape.repack,
            "experts_on_host": self.shape.experts_on_host and not self.on_cpu,
        }

    def ends(self) -> tuple[int, ...]:
        """All tokens after which llama.cpp itself would stop."""
        return tuple(
            token
            for token in range(self.vocab_size)
            if self._c.llama_vocab_is_eog(self._vocabulary, token)
        )

    def devices(self) -> list[str]:
        """What its backends call the devices that it can use."""
        found = []
        for kind, handle in self._library.devices():
            if kind == CPU or self.shape.gpu_layers != 0:
                name = self._c.ggml_backend_dev_description(handle) or b""
                found.append(name.decode(errors="replace"))
        return found

    def _said(self) -> str:
        found = self._library.complaints
        return found[0] if found else "it does not say why"


class Vocabulary:
    """A file's vocabulary alone, as llama.cpp reads it."""

    def __init__(self, library: Library, path: Path) -> None:
        self._c = library.c
        library.complaints.clear()
        parameters = self._c.llama_model_default_params()
        parameters.vocab_only = True
        self._model = self._c.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            said = (library.complaints or ["it does not say why"])[0]
            raise UsageError(f"llama.cpp cannot load the vocabulary of {path}: {said}")
        self._vocabulary = self._c.llama_model_get_vocab(self._model)

    def tokenize(self, text: str) -> list[int]:
        """llama.cpp's own tokens of a text, special ones recognised."""
        data = text.encode()
        room = len(data) + 8
        found = (c_int32 * room)()
        count = self._c.llama_tokenize(self._vocabulary, data, len(data), found, room, True, True)
        if count < 0:
            raise UsageError("llama.cpp cannot tokenize this text")
        return list(found[:count])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._c.llama_model_free(self._model)
