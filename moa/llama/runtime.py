"""One model in llama.cpp, and the contexts that hold its sequences: tokens go in by sequence, logits
come out by row.

llama.cpp takes the memory of all of a context's sequences when the context is made, whether they
are used or not. So there are several contexts of one model, each of `Shape.block_size` sequences,
which is made when its first sequence begins, and freed when nobody uses it any more. No sequence
moves. A call runs sequences of one context.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, c_int8, c_int32
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from moa.errors import ConfigError, FullError, MoaError, UsageError
from moa.llama.library import CPU, Batch, Library, Override
from moa.process.memory import available_bytes

KV_TYPES = {
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
_WHOLE_STATE = 0
_INTO_MEMORY = 0
_MAPPED = 1
"""LLAMA_LOAD_MODE_NONE and LLAMA_LOAD_MODE_MMAP. Weights that are laid out anew for the processor
are a copy: of a file that is mapped, too, most pages would be in memory twice."""


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
    """Most of them at once."""
    capacity: int
    """Most tokens of a sequence, those of a draft and its padding included."""
    batch: int
    """Most tokens of a call."""
    kv_type: str
    gpu_layers: int
    """-1: all."""
    threads: int
    value_type: str = ""
    """What values are kept in, where it is not what keys are."""
    experts_on_host: bool = False
    """Whether a mixture's experts stay in the machine's memory, whatever layers are on a card."""
    mapped: bool = False
    """Whether weights stay in the file, whose pages the system reads and drops as it can; else they
    are in memory, laid out for this processor's kernels."""
    block_size: int = 0
    """Sequences of a context; 0: one context holds all of them."""
    sequence_bytes: int = 0
    """Memory of a sequence's keys and values: what must be free before there are more."""

    def block(self, sequence: int) -> int:
        """Which of the contexts a sequence is in."""
        return sequence // self.block_size if self.block_size else 0

    @property
    def kept_values(self) -> str:
        """What values are kept in."""
        return self.value_type or self.kv_type

    @property
    def sequences_of_a_block(self) -> int:
        """Sequences of each context: llama.cpp copies them between contexts of one size only."""
        return self.block_size or self.sequences


def check_kv_type(name: str) -> None:
    """Refuse what keys and values cannot be kept in. In float32 they would be in vain: llama.cpp
    casts them to float16 for its attention, so that all logits are those of float16."""
    if name == "f32":
        raise ConfigError(
            "--kv-type f32 is no more exact than f16: llama.cpp's attention reads it as f16",
            hint="f16 takes half the memory for the same text",
        )
    if name not in KV_TYPES:
        raise ConfigError(f"unknown --kv-type {name!r}", hint=f"one of {', '.join(KV_TYPES)}")


@dataclass
class _Context:
    """One of llama.cpp's contexts."""

    handle: int
    memory: int
    """What llama.cpp calls the keys, values and states in it."""
    first: int
    """Its first sequence: llama.cpp counts a context's sequences from 0."""


class Runtime:
    """Owns the model. Not thread-safe; `close` frees what it holds."""

    def __init__(self, library: Library, path: Path, shape: Shape) -> None:
        """Load the model in a GGUF file, and make the memory of its first sequences. Errors are one
        clear line."""
        self.shape = shape
        self._library = library
        self._c = library.c
        self._model = self._load(path)
        self._vocabulary = self._c.llama_model_get_vocab(self._model)
        self.vocab_size = int(self._c.llama_vocab_n_tokens(self._vocabulary))
        self._pool, self._free_pool = library.thread_pool(shape.threads)
        self._contexts: dict[int, _Context] = {}
        """By block."""
        try:
            self._begin(0)
        except BaseException:
            self.close()
            raise
        # A sequence's id is handed over by a pointer for each token: one array serves all of them.
        self._ids: list[Any] = [(c_int32 * 1)(each) for each in range(shape.sequences_of_a_block)]
        self._ones = (c_int32 * shape.batch)(*[1] * shape.batch)

    def _load(self, path: Path) -> int:
        """Load the model, and return llama.cpp's handle of it; a `UsageError` for a file that it
        cannot load, or that holds no decoder."""
        parameters = self._c.llama_model_default_params()
        parameters.n_gpu_layers = self.shape.gpu_layers
        parameters.use_extra_bufts = not self.shape.mapped
        if self.on_cpu:
            parameters.load_mode = _MAPPED if self.shape.mapped else _INTO_MEMORY
        if self.shape.experts_on_host:
            host = self._c.ggml_backend_cpu_buffer_type()
            # llama.cpp reads the list up to an entry without a pattern, while it loads.
            overrides = (Override * 2)(Override(EXPERTS.encode(), host), Override())
            parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        model = self._library.load_model(path, parameters)
        if not model:
            raise UsageError(f"llama.cpp cannot load {path}: {self._first_complaint()}")
        reason = self._why_no_target(model)
        if reason:
            self._c.llama_model_free(model)
            raise UsageError(f"{path} cannot be a target: {reason}")
        return model

    def _why_no_target(self, model: int) -> str:
        """Why a model does not write text from left to right; empty if it does."""
        if not self._c.llama_model_has_decoder(model):
            return "it has no decoder"
        if self._c.llama_model_has_encoder(model):
            return "it has an encoder"
        if self._c.llama_model_is_diffusion(model):
            return "it is a diffusion model"
        return ""

    @property
    def cells(self) -> int:
        """Tokens that a sequence has memory for: its capacity, rounded up as llama.cpp does."""
        return math.ceil(self.shape.capacity / _CELLS) * _CELLS

    def reserve(self, sequence: int) -> None:
        """Make the memory of a sequence, if it is not there: that of the whole context of several
        sequences to which it belongs. A `FullError` where the machine has no memory left for it."""
        block = self.shape.block(sequence)
        if block in self._contexts:
            return
        needed = self.shape.sequences_of_a_block * self.shape.sequence_bytes
        free = available_bytes()
        if 0 < free < needed:
            raise FullError(
                f"more sessions need {needed / 1e9:.1f} GB for keys and values, and "
                f"{free / 1e9:.1f} GB are free"
            )
        self._begin(block)

    def give_back(self, used: Sequence[int]) -> None:
        """Free contexts, the memory of several sequences each, from the last one on, in which
        nobody uses a sequence; `used` are those that somebody does. A context is kept while more
        than half of the sequences before it are in use: sessions that come and go would have it
        made and freed all the time."""
        in_use = {self.shape.block(sequence) for sequence in used}
        for block in sorted(self._contexts, reverse=True):
            before = block * self.shape.sequences_of_a_block
            if block == 0 or block in in_use or 2 * len(used) > before:
                return
            self._free(self._contexts.pop(block))

    def _begin(self, block: int) -> None:
        """Make the context with this number (`block`): llama.cpp's memory for the keys and values
        of some sequences. Where there is none left it is an error: a `UsageError` for the first
        context, without which nothing can run, a `FullError` for further ones."""
        count = self.shape.sequences_of_a_block
        self._library.complaints.clear()
        handle = self._c.llama_init_from_model(self._model, self._context_parameters())
        if not handle:
            what = f"{count} sessions of {self.shape.capacity} tokens: {self._first_complaint()}"
            if self._contexts:
                raise FullError(f"llama.cpp cannot hold {what}")
            raise UsageError(
                f"llama.cpp cannot hold {what}",
                hint="lower --slots or --max-context-tokens",
            )
        context = _Context(handle, self._c.llama_get_memory(handle), block * count)
        found = self._c.llama_n_seq_max(handle), self._c.llama_n_ubatch(handle)
        if found != (count, self.shape.batch):
            self._free(context)
            # Its parameters lie elsewhere than we think.
            raise MoaError(f"llama.cpp made a context of {found}: its library is not understood")
        if self._pool:
            self._c.llama_attach_threadpool(handle, self._pool, self._pool)
        self._contexts[block] = context

    def _context_parameters(self) -> Any:
        """What llama.cpp is to make each context of."""
        shape = self.shape
        parameters = self._c.llama_context_default_params()
        parameters.n_ctx = self.cells * shape.sequences_of_a_block
        parameters.n_seq_max = shape.sequences_of_a_block
        parameters.n_batch = shape.batch
        parameters.n_ubatch = shape.batch
        parameters.n_outputs_max = shape.batch
        parameters.n_outputs_max_per_seq = shape.batch
        parameters.n_threads = shape.threads
        parameters.n_threads_batch = shape.threads
        parameters.type_k = KV_TYPES[shape.kv_type]
        parameters.type_v = KV_TYPES[shape.kept_values]
        # Each sequence has cells of its own, in the order of its tokens: among cells that all
        # share, a token's place would depend on the others, and so would the order of sums.
        parameters.kv_unified = False
        parameters.swa_full = True  # a window's cells are kept: a draft can be taken back
        parameters.no_perf = True
        return parameters

    def _free(self, context: _Context) -> None:
        """Free a context and the memory of its sequences."""
        self._c.llama_free(context.handle)

    def _of(self, sequence: int) -> tuple[_Context, int]:
        """The context of a sequence, and its number there."""
        context = self._contexts[self.shape.block(sequence)]
        return context, sequence - context.first

    @property
    def sequences_in_memory(self) -> int:
        """Sequences whose memory is taken."""
        return len(self._contexts) * self.shape.sequences_of_a_block

    def close(self) -> None:
        """Free all memory. The object is of no use afterwards."""
        for context in self._contexts.values():
            self._free(context)
        self._contexts.clear()
        if self._model:
            self._c.llama_model_free(self._model)
            self._model = 0
            if self._pool and self._free_pool is not None:
                self._free_pool(self._pool)

    # ---- forwards

    def run(self, runs: Sequence[Run], *, unit: int = 1) -> list[NDArray[np.float32]]:
        """Run these tokens, of sequences of one context, in one forward; returns the logits
        `[len(judged), vocab]` of each run.

        llama.cpp computes its last layer and the head for tokens with logits alone, and adds in
        another order for another number of them. So others get logits, too, until their number is a
        multiple of `unit`, where there are enough tokens.
        """
        context, _ = self._of(runs[0].sequence)
        batch = self._batch_of(context, runs)
        outputs = sum(len(run.judged) for run in runs)
        if outputs > 0:
            _ask_for_more(batch, -outputs % unit)  # up to the next multiple
        code = self._c.llama_decode(context.handle, batch)
        if code:
            raise MoaError(f"llama.cpp could not run a forward ({code}): {self._first_complaint()}")
        self._c.llama_synchronize(context.handle)
        return self._logits(context, runs)

    def _batch_of(self, context: _Context, runs: Sequence[Run]) -> Batch:
        """The tokens of these runs as llama.cpp takes them, with logits after those that are
        judged."""
        total = sum(len(run.tokens) for run in runs)
        tokens = (c_int32 * total)()
        positions = (c_int32 * total)()
        sequences = (POINTER(c_int32) * total)()
        has_logits = (c_int8 * total)()
        start = 0
        for run in runs:
            end = start + len(run.tokens)
            tokens[start:end] = list(map(int, run.tokens))
            positions[start:end] = list(range(run.start, run.start + len(run.tokens)))
            sequences[start:end] = [self._ids[run.sequence - context.first]] * len(run.tokens)
            for place in run.judged:
                has_logits[start + place] = 1
            start = end
        return Batch(total, tokens, None, positions, self._ones, sequences, has_logits)

    def _logits(self, context: _Context, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        """Copy the logits `[len(judged), vocab]` of each run out of llama.cpp's memory, which the next
        forward writes over."""
        logits_of_runs = []
        start = 0  # of the run among all tokens of the forward
        for run in runs:
            logits = np.empty((len(run.judged), self.vocab_size), dtype=np.float32)
            for row, place in enumerate(run.judged):
                pointer = self._c.llama_get_logits_ith(context.handle, start + place)
                if not pointer:
                    raise MoaError(f"llama.cpp has no logits of token {start + place}")
                memory = (ctypes.c_float * self.vocab_size).from_address(pointer)
                logits[row] = np.ctypeslib.as_array(memory)
            start += len(run.tokens)
            logits_of_runs.append(logits)
        return logits_of_runs

    # ---- sequences

    def cut(self, sequence: int, length: int) -> bool:
        """Forget the tokens from position `length` on. False where the model cannot: its state is
        all that it keeps of them."""
        context, number = self._of(sequence)
        return bool(self._c.llama_memory_seq_rm(context.memory, number, length, -1))

    def clear(self, sequence: int) -> None:
        """Forget a whole sequence."""
        context, number = self._of(sequence)
        self._c.llama_memory_seq_rm(context.memory, number, -1, -1)

    def copy(self, source: int, into: int) -> bool:
        """Copy all that a sequence holds into another one. False where llama.cpp cannot: then that
        one holds nothing. From context to context it copies, of a layer with a sliding window, only
        what the next token sees; but whoever shares a beginning of the sequence may need more."""
        self.clear(into)
        context, number = self._of(source)
        other, other_number = self._of(into)
        if other is context:
            self._c.llama_memory_seq_cp(context.memory, number, other_number, -1, -1)
            return True
        if self._c.llama_model_n_swa(self._model) > 0:
            return False
        return self._restore(into, self._save(source, _WHOLE_STATE), _WHOLE_STATE)

    def save(self, sequence: int) -> bytes:
        """The recurrent state of a sequence; its keys and values are left out."""
        return bytes(self._save(sequence, _STATES_ALONE))

    def restore(self, sequence: int, state: bytes) -> bool:
        """Give a sequence a state that it had. False where llama.cpp cannot."""
        return self._restore(sequence, bytearray(state), _STATES_ALONE)

    def _save(self, sequence: int, parts: int) -> bytearray:
        """What llama.cpp holds of a sequence, as bytes: all of it (`_WHOLE_STATE`), or only
        recurrent states (`_STATES_ALONE`)."""
        context, number = self._of(sequence)
        size = self._c.llama_state_seq_get_size_ext(context.handle, number, parts)
        data = bytearray(size)
        memory = (ctypes.c_char * size).from_buffer(data)
        written = self._c.llama_state_seq_get_data_ext(context.handle, memory, size, number, parts)
        del memory  # while it is there, the bytearray cannot be made shorter
        del data[written:]
        return data

    def _restore(self, sequence: int, state: bytearray, parts: int) -> bool:
        """Give a sequence what `_save` returned. False where llama.cpp cannot."""
        context, number = self._of(sequence)
        memory = (ctypes.c_char * len(state)).from_buffer(state)
        read = self._c.llama_state_seq_set_data_ext(
            context.handle, memory, len(state), number, parts
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
    def on_cpu(self) -> bool:
        """Whether nothing but the processor computes."""
        return self.shape.gpu_layers == 0 or not self._library.has_card

    @property
    def adds_by(self) -> dict[str, Any]:
        """All that decides in which order llama.cpp adds sums, and so the last digits of a logit:
        two targets that are alike in this compute the same numbers."""
        return {
            "build": self._library.build,
            "instructions": self._library.instructions,
            "devices": self.devices(),
            "gpu_layers": 0 if self.on_cpu else self.shape.gpu_layers,
            "kv_type": self.shape.kv_type,
            "value_type": self.shape.kept_values,
            "batch": self.shape.batch,
            "repack": not self.shape.mapped,
            "experts_on_host": self.shape.experts_on_host and not self.on_cpu,
        }

    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer: all after which llama.cpp itself would stop."""
        is_end = self._c.llama_vocab_is_eog
        return tuple(t for t in range(self.vocab_size) if is_end(self._vocabulary, t))

    def devices(self) -> list[str]:
        """The names of the devices that compute: the processor, and cards if any layer is on one."""
        names = []
        for kind, handle in self._library.devices():
            if kind == CPU or self.shape.gpu_layers != 0:
                name = self._c.ggml_backend_dev_description(handle) or b""
                names.append(name.decode(errors="replace"))
        return names

    def _first_complaint(self) -> str:
        """What llama.cpp has said of an error; its first line is the cause."""
        complaints = self._library.complaints
        return complaints[0] if complaints else "it does not say why"


def _ask_for_more(batch: Batch, count: int) -> None:
    """Ask for logits after so many more tokens of a batch, or after all of them."""
    if count == 0:
        return
    others = [place for place in range(batch.n_tokens) if not batch.logits[place]]
    for place in others[:count]:
        batch.logits[place] = 1


class Vocabulary:
    """A file's vocabulary alone, as llama.cpp reads it."""

    def __init__(self, library: Library, path: Path) -> None:
        """Have llama.cpp load the vocabulary of a GGUF file, and not its weights."""
        self._c = library.c
        parameters = self._c.llama_model_default_params()
        parameters.vocab_only = True
        self._model = library.load_model(path, parameters)
        if not self._model:
            said = (library.complaints or ["it does not say why"])[0]
            raise UsageError(f"llama.cpp cannot load the vocabulary of {path}: {said}")
        self._vocabulary = self._c.llama_model_get_vocab(self._model)

    def tokenize(self, text: str) -> list[int]:
        """llama.cpp's own tokens of a text, special ones recognised."""
        data = text.encode()
        room = len(data) + 8  # a token has a byte at least, but for a few special ones
        found = (c_int32 * room)()
        count = self._c.llama_tokenize(self._vocabulary, data, len(data), found, room, True, True)
        if count < 0:
            raise UsageError("llama.cpp cannot tokenize this text")
        return list(found[:count])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._c.llama_model_free(self._model)
