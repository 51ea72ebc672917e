"""The targets that the conformance suite holds to the contract. To add one is a line."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moa.target.contract import LoadOptions, Node, Target
from moa.target.cuda.runner import Accelerator
from moa.target.registry import open_target
from moa.target.rows import Row
from moa.target.torch_target import Target as TorchTarget
from testing import gguf_tiny
from testing.close import assert_rounded
from testing.tiny import MODERN_FAMILIES, available, tiny
from tests.target.cuda.reference import ReferenceKernels
from tests.target.toy import ToyModel, ToyTarget
from tests.target.trees import plain_logits, reference

Plain = Callable[[Sequence[int]], NDArray[np.float32]]


def assert_near(found: Any, wanted: Any) -> None:
    """For kernels that sum in an order of their own."""
    np.testing.assert_allclose(found, wanted, atol=5e-5, rtol=1e-5)


@dataclass(frozen=True)
class Subject:
    """A target, and what it is compared with."""

    name: str
    make: Callable[..., Target]
    """Takes `slots`, `capacity` and `kv_tokens`, as `LoadOptions` has them. Token ids up to 127 are
    valid; 16 tokens or more must fit behind 112."""
    plain: Plain
    """The logits after a text, by the simplest means: no cache, no batch, no tree."""
    assert_equal: Callable[[Any, Any], None] = assert_rounded
    """Logits against plain ones: equal but for rounding."""
    spare_tokens: int = 32
    """Memory for so many tokens more than asked for, at most."""
    poison: Callable[[Any], int] | None = None
    """Damages the model so that the logits after one token are no numbers: returns that token. None
    where a test cannot do that."""

    def __str__(self) -> str:
        return self.name


def torch_subject(family: str, *, name: str = "", **how: Any) -> Subject:
    """A tiny model of a family, in float32."""
    plain_model = reference(family)

    def make(**sizes: Any) -> Target:
        return TorchTarget.from_model(tiny(family), **sizes, **how)

    def plain(ids: Sequence[int]) -> NDArray[np.float32]:
        return plain_logits(plain_model, ids).numpy()

    return Subject(
        name=name or family,
        make=make,
        plain=plain,
        # A tied embedding is the head, too: its damage is in every row's logits.
        poison=None if plain_model.config.tie_word_embeddings else _poison_embedding,
        assert_equal=assert_near if "accelerator" in how else assert_rounded,
    )


def _poison_embedding(target: TorchTarget) -> int:
    with torch.no_grad():
        target.embedding_weight[77] = torch.nan
    return 77


def toy_subject() -> Subject:
    """The target of docs/extending.md."""

    def poison(target: ToyTarget) -> int:
        target.model.embedding[77] = np.nan
        return 77

    return Subject("toy", ToyTarget, ToyModel(0).plainly, poison=poison)


def captured() -> Accelerator:
    """CUDA's decoder on a CPU: reference kernels, and functions in place of graphs."""
    return Accelerator(ReferenceKernels(), lambda run: run)


def assert_near_in_halves(found: Any, wanted: Any) -> None:
    """For sums in another order, of keys and values in float16."""
    np.testing.assert_allclose(found, wanted, atol=2e-4 * float(np.abs(wanted).max()))


def gguf_subject(family: str) -> Subject:
    """A tiny model in a GGUF file, held to its own plain decoding: to the last bit, but for running
    states, which llama.cpp computes in other orders by how many tokens there are. That it computes
    what the library does is in tests/llama."""

    @cache
    def file() -> Path:
        folder = Path(tempfile.mkdtemp(prefix="gguf-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return gguf_tiny.save_family(family, folder / f"{family}.gguf")

    def make(**sizes: Any) -> Target:
        gguf_tiny.need_llama()
        return open_target(str(file()), LoadOptions(**sizes, threads=1))

    @cache
    def alone() -> Target:
        return make(slots=1, capacity=256)

    def plain(ids: Sequence[int]) -> NDArray[np.float32]:
        target = alone()
        slot = target.cache.acquire()
        found = target.forward([Row.chain(slot, ids)]).host_logits([Node(0, -1)])[0]
        target.cache.release(slot)
        return found

    return Subject(
        name=f"gguf {family}",
        make=make,
        plain=plain,
        assert_equal=(
            assert_near_in_halves
            if family in gguf_tiny.RECURRENT
            else np.testing.assert_array_equal
        ),
        spare_tokens=2 * 256,  # llama.cpp's cells come by 256, for each sequence
    )


SUBJECTS: list[Subject] = [
    toy_subject(),
    torch_subject("llama", name="packed"),
    torch_subject("llama", name="packed weights", pack_weights=True),
    torch_subject("gemma2", name="library"),
    torch_subject("llama", name="cuda", accelerator=captured()),
    *map(gguf_subject, ("llama", "qwen2", "qwen3", "gemma3", *gguf_tiny.RECURRENT)),
    *(torch_subject(family) for family in MODERN_FAMILIES if available(family)),
]
