"""A recurrent or hybrid model holds no tokens that could be taken back: drafts that are wrong, and
beginnings that are shared, go through copies of its state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moa.gguf.reader import read_head
from moa.llama.memory_plan import PADDING, kv_bytes_per_token, plan_of, state_bytes
from moa.llama.target import LlamaTarget
from moa.target.contract import LoadOptions, Node
from moa.target.registry import open_target
from moa.target.rows import Row
from testing import gguf_tiny


@pytest.fixture(params=gguf_tiny.RECURRENT)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LlamaTarget]:
    gguf_tiny.need_llama()
    file = gguf_tiny.save_family(request.param, tmp_path / "model.gguf")
    made = open_target(str(file), LoadOptions(slots=3, capacity=256, threads=1))
    assert isinstance(made, LlamaTarget)
    assert made.runtime.recurrent
    yield made
    made.close()


def plain(target: LlamaTarget, ids: list[int], count: int) -> list[int]:
    slot = target.cache.acquire()
    log = list(ids)
    waiting = log
    while len(log) < len(ids) + count:
        step = target.forward([Row.chain(slot, waiting)])
        target.commit(step, 0, range(len(waiting)))
        waiting = [int(step.argmax(0)[-1])]
        log = log + waiting
    target.cache.release(slot)
    return log[len(ids) :]


def test_wrong_drafts_leave_no_trace_in_its_state(target: LlamaTarget) -> None:
    assert not target.capabilities.batch_invariant
    rng = random.Random(0)
    ids = [int(token) for token in np.random.default_rng(1).integers(4, 120, size=30)]
    truth = plain(target, ids, 40)
    slot = target.cache.acquire()
    for start in range(0, len(ids) - 1, 7):
        piece = ids[start : min(start + 7, len(ids) - 1)]
        step = target.forward([Row.chain(slot, piece, "none")])
        target.commit(step, 0, range(len(piece)))
    out: list[int] = []
    pending = ids[-1]
    while len(out) < len(truth):
        draft = truth[len(out) : len(out) + 6]
        draft = [token if rng.random() < 0.7 else 5 for token in draft]
        step = target.forward([Row.chain(slot, [pending, *draft], "all")])
        best = step.argmax(0).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == best[accepted]:
            accepted += 1
        target.commit(step, 0, range(accepted + 1))
        out += best[: accepted + 1]
        pending = out[-1]
    assert out[: len(truth)] == truth


def test_a_shared_beginning_and_a_second_look_at_a_row(target: LlamaTarget) -> None:
    ids = [int(token) for token in np.random.default_rng(2).integers(4, 120, size=24)]
    truth = plain(target, [*ids[:10], 7, 8], 4)
    first = target.cache.acquire()
    step = target.forward([Row.chain(first, ids, "none")])
    target.commit(step, 0, range(len(ids)))
    second = target.cache.share(first, 10)
    step = target.forward([Row.chain(second, [7, 8], "none")])
    again = step.host_logits([Node(0, -1)])[0]
    assert int(again.argmax()) == truth[0]
    target.commit(step, 0, range(2))
    step = target.forward([Row.chain(second, truth[:1])])
    assert int(step.argmax(0)[0]) == truth[1]


def test_the_memory_of_a_session_is_its_state_beside_keys_and_values(target: LlamaTarget) -> None:
    slot = target.cache.acquire()
    target.commit(target.forward([Row.chain(slot, [5, 6, 7])]), 0, range(3))
    kept = len(target.runtime.save(target.cache.sequence(slot)))
    head = target._head
    assert state_bytes(head) <= kept <= state_bytes(head) + 256, "llama.cpp's, and some lengths"
    options = LoadOptions(slots=1, capacity=100, threads=1)
    more = replace(options, capacity=200)
    grown = plan_of(head, more).sequence - plan_of(head, options).sequence
    keys_and_values = {"mamba": 0, "lfm2": 2 * 2 * (16 + 16) * 2}[target.facts.family]
    assert grown == 100 * keys_and_values
    session = plan_of(head, options).sequence
    assert session == (100 + PADDING) * keys_and_values + 2 * state_bytes(head)


def test_a_layer_with_a_state_and_keys_keeps_both(tmp_path: Path) -> None:
    """Falcon-H1's layers do; of Qwen3-Next's every fourth has keys, which the file says by its
    tensors alone."""
    head = read_head(gguf_tiny.save_family("mamba", tmp_path / "model.gguf"))
    metadata = head.metadata | {"mamba.attention.head_count": 4, "mamba.ssm.group_count": 1}
    tensors = (*head.tensors, replace(head.tensors[0], name="blk.1.attn_k.weight"))
    both = replace(head, metadata=metadata, tensors=tensors)
    assert kv_bytes_per_token(both, "f16") == 4 * 2 * 16 * 2
    assert state_bytes(both) == 2 * (3 * (128 + 2 * 16) + 16 * 128) * 4
