"""The accelerator's decoder and runner on a CPU: reference kernels, and a recorder in place of
graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from moa.errors import NumericalError, UsageError
from moa.target.contract import ExpectedLoad
from moa.target.cuda import buffers, runner
from moa.target.cuda.buffers import MOST, Buffers, Tier, cut
from moa.target.cuda.graphs import Rerun
from moa.target.cuda.runner import Accelerator, usual_tiers
from moa.target.cuda.weights import DENSE_FAMILIES
from moa.target.pages import PAGE, PagePool
from moa.target.rows import Row, RowBatch
from moa.target.torch_target import Target
from testing.tiny import tiny
from tests.target.cuda.reference import ReferenceKernels
from tests.target.test_target import check_random_trees, prefill
from tests.target.trees import path_to, random_tree, reference

CLOSE = {"atol": 5e-5, "rtol": 1e-5}


def accelerated(
    family: str = "llama", *, kernels: Any = None, recorder: Any = None, layers: int = 4, **how: Any
) -> Target:
    """What is captured runs on the same memory, as a graph does, and only the function itself
    again."""
    with_kernels = Accelerator(kernels or ReferenceKernels(), recorder or (lambda run: run))
    return Target.from_model(
        tiny(family, num_hidden_layers=layers), accelerator=with_kernels, **how
    )


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_random_trees_score_as_plain_forwards_do_and_commits_continue_exactly(family: str) -> None:
    target = accelerated(family, slots=4, capacity=96)
    for _ in check_random_trees(target, reference(family), 3, **CLOSE):
        target.prepare_more()


def test_the_kernels_run_a_whole_target_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes for Linux on x86-64 alone")
    from moa.target.cuda.kernels import TritonKernels

    target = accelerated(
        "qwen3", kernels=TritonKernels(torch.device("cpu")), layers=2, slots=1, capacity=32
    )
    other = accelerated("qwen3", layers=2, slots=1, capacity=32)
    tree = random_tree(np.random.default_rng(3), 7)
    steps = [one.forward([Row(one.cache.acquire(), *tree)]) for one in (target, other)]
    torch.testing.assert_close(steps[0].hidden(0), steps[1].hidden(0), **CLOSE)
    assert steps[0].argmax(0).tolist() == steps[1].argmax(0).tolist()
    torch.testing.assert_close(steps[0].logits(0, [2, 4]), steps[1].logits(0, [2, 4]), **CLOSE)


def test_a_batch_of_more_than_the_largest_tier_is_several_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(5)
    chain = rng.integers(4, 128, 80).tolist()
    tree = random_tree(rng, 9)
    results = []
    for most in (MOST, 32):
        monkeypatch.setattr(buffers, "MOST", most)
        monkeypatch.setattr(runner, "cut", lambda batch, most=most: cut(batch, most))
        target = accelerated(slots=3, capacity=128)
        slots = [target.cache.acquire() for _ in range(3)]
        rows = [
            Row(slots[0], *tree),
            Row.chain(slots[1], chain, judged="all"),
            Row(slots[2], *tree, judged="none"),
        ]
        step = target.forward(rows)
        results.append(
            (
                torch.cat([step.hidden(b) for b in range(3)]),
                [step.argmax(b).tolist() for b in range(3)],
            )
        )
    torch.testing.assert_close(results[0][0], results[1][0], **CLOSE)
    assert results[0][1] == results[1][1]
    assert results[0][1][2] == [-1] * 9


def test_inputs_of_tapped_layers_are_those_of_the_other_decoders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(6)
    chain = rng.integers(4, 128, 40).tolist()
    tree = random_tree(rng, 9)
    monkeypatch.setattr(buffers, "MOST", 32)
    monkeypatch.setattr(runner, "cut", lambda batch: cut(batch, 32))
    packed, library = (
        Target.from_model(tiny("llama"), slots=2, capacity=64, packed=packed)
        for packed in (True, False)
    )
    found = []
    for target in (accelerated(slots=2, capacity=64), packed, library):
        target.tap((3, 0, 3))
        for _ in range(2):  # on an accelerator the first has no graph yet
            slots = [target.cache.acquire(), target.cache.acquire()]
            step = target.forward([Row(slots[0], *tree), Row.chain(slots[1], chain)])
            found.append(torch.cat([step.tapped(0, [0, 4]), step.tapped(1, range(40))]))
            for slot in slots:
                target.cache.release(slot)
            if target.graphs is not None:
                target.prepare_more()
    assert found[0].shape == (42, 3 * 64)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, **CLOSE)
    with pytest.raises(UsageError, match="taps no layer"):
        (other := accelerated()).forward([Row.chain(other.cache.acquire(), [5])]).tapped(0, [0])


def test_wrong_rows_change_nothing_and_logits_that_are_no_numbers_raise() -> None:
    target = accelerated(slots=1, capacity=128)
    slot = target.cache.acquire()
    with pytest.raises(UsageError, match="64 nodes at most"):
        target.forward([Row(slot, [5] * 65, [-1, 0, 0, *range(2, 64)])])
    assert target.cache.pages_held[slot] == 0
    with torch.no_grad():
        target.model.get_output_embeddings().weight[9] = torch.nan
    with pytest.raises(NumericalError):
        target.forward([Row.chain(slot, [5])]).argmax(0)


class Ordered(TorchDispatchMode):
    """Raises where a forward reads memory on the host, or allocates some, unless it may."""

    waits = ("_local_scalar_dense", "nonzero", "equal")

    def __init__(self, *, allocates: bool = False) -> None:
        super().__init__()
        self.allocates = allocates
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen[name] += 1
        if name in self.waits:
            raise AssertionError(f"{name} waits between filling the buffers and reading the result")
        results = func(*args, **(kwargs or {}))
        given = {one.data_ptr() for one in _tensors([*args, *(kwargs or {}).values()])}
        if (
            not self.allocates
            and not func.is_view
            and not {one.data_ptr() for one in _tensors(results)} <= given
        ):
            raise AssertionError(
                f"{name} allocates between filling the buffers and reading the result"
            )
        return results


def _tensors(results: Any) -> list[torch.Tensor]:
    many = results if isinstance(results, tuple | list) else [results]
    return [one for one in many if isinstance(one, torch.Tensor)]


class Opaque:
    """Kernels whose inside is the device's business."""

    def __init__(self) -> None:
        self._kernels = ReferenceKernels()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def kernel(*args: Any) -> None:
            self.calls[name] += 1
            with _disable_current_modes():
                getattr(self._kernels, name)(*args)

        return kernel


def test_nothing_is_allocated_and_nothing_waits_inside_of_a_forward() -> None:
    kernels = Opaque()
    ordered: list[Ordered] = []

    def capture(run: Rerun) -> Rerun:
        def replay() -> None:
            with Ordered() as mode:
                run()
            ordered.append(mode)

        return replay

    target = accelerated(kernels=kernels, recorder=capture, slots=3, capacity=64)
    slots = [target.cache.acquire() for _ in range(3)]
    rows = [Row(slot, *random_tree(np.random.default_rng(2), 5)) for slot in slots]
    target.forward(rows)
    target.prepare_more()
    assert not target.unprepared
    kernels.calls.clear()
    assert target.forward(rows).path == "graph 4x16"
    assert len(ordered) == 1
    assert ordered[0].seen["index_select"] == 2
    assert kernels.calls == {
        "add_norm": 9,
        "product": 17,
        "rotate_and_store": 4,
        "attend": 4,
        "gate": 4,
    }
    one = torch.ones(3)
    for wrong in (lambda: one + 1, lambda: one.sum().item(), lambda: one.to("cpu", torch.float64)):
        with pytest.raises(AssertionError, match="between"), Ordered():
            wrong()


def test_a_tier_is_captured_between_rounds_and_gives_the_same_bits() -> None:
    recorder = Mock(side_effect=lambda run: run)
    target = accelerated(recorder=recorder, slots=2, capacity=64)
    slot = prefill(target, [5, 6, 7, 8], chunk=4)
    row = Row.chain(slot, [9, 10, 11], judged="all")
    step = target.forward([row])
    assert step.path == "eager 1x8"
    assert recorder.call_count == 0
    while target.unprepared:
        target.prepare_more()
    assert recorder.call_count == 1  # the prompt's forward had the same size
    again = target.forward([row])
    assert again.path == "graph 1x8"
    assert torch.equal(step.hidden(0), again.hidden(0))
    assert step.argmax(0).tolist() == again.argmax(0).tolist()
    load = ExpectedLoad(rows=4, tokens=512, draft_tokens=8, prompt_tokens=256)
    assert {tier.name for tier in usual_tiers(load)} == {
        "1x256 prompt",
        "1x8",
        "2x8",
        "2x16",
        "4x8",
        "4x32",
    }


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    lengths=st.lists(st.integers(0, 200), min_size=12, max_size=12),
    seed=st.integers(0, 2**32),
    group=st.integers(1, 8),
)
def test_buffers_describe_the_batch_and_padding_touches_only_the_spare_page(
    sizes: list[int], lengths: list[int], seed: int, group: int
) -> None:
    rng = np.random.default_rng(seed)
    pool = PagePool(layers=1, slots=12, kv_heads=1, capacity=300, head_dim=2, spare=1)
    slots = [pool.acquire() for _ in range(12)]
    for slot, length in zip(slots, lengths, strict=True):
        pool.begin([slot], [length])
        pool.commit(slot, range(length))
    order = rng.permutation(12)[: len(sizes)].tolist()
    rows = [
        Row(slots[at], *random_tree(rng, size))
        if size <= 64 and rng.random() < 0.5
        else Row.chain(slots[at], [5] * size)
        for at, size in zip(order, sizes, strict=True)
    ]
    batch = RowBatch.of(rows, 128)
    pool.begin(batch.slots, batch.sizes)
    static = Buffers(pool, group)
    seen = []
    for pieces in cut(batch):
        tokens = sum(stop - start for _, start, stop in pieces)
        tier = Tier.of(len(pieces), tokens, True)
        assert tokens <= tier.tokens <= MOST
        assert tier.tokens < 2 * max(tokens, 8, len(pieces))
        static.fill(tier, batch, pieces, np.arange(tokens))
        forward = static.views(tier)
        at = 0
        blocks = []
        for place, (row, start, stop) in enumerate(pieces):
            size = stop - start
            slot = batch.slots[row]
            mine = slice(at, at + size)
            length = pool.lengths[slot] + start
            assert (int(forward.starts[place]), int(forward.starts[place + 1])) == (at, at + size)
            assert int(forward.lengths[place]) == length
            assert forward.token_row[mine].tolist() == [place] * size
            assert forward.ids[mine].tolist() == list(rows[row].tokens)[start:stop]
            everything = np.arange(length + size)
            assert (
                forward.columns[mine].tolist() == pool.columns(slot, everything[length:]).tolist()
            )
            pages = pool.columns(slot, everything) // PAGE
            np.testing.assert_array_equal(forward.table[place].numpy()[everything // PAGE], pages)
            for node in range(size):
                path = path_to(rows[row].parents, start + node)
                assert int(forward.positions[at + node]) == pool.lengths[slot] + len(path) - 1
                if size <= 64:
                    bits = int(forward.masks[at + node]) & (2**64 - 1)
                    assert [j for j in range(64) if bits >> j & 1] == [
                        one - start for one in path if one >= start
                    ]
            blocks += [(place, first) for first in range(0, size, buffers.query_block(group))]
            seen += [(row, node) for node in range(start, stop)]
            at += size
        found = list(zip(forward.block_row.tolist(), forward.block_first.tolist(), strict=True))
        assert found[: len(blocks)] == blocks
        assert {row for row, _ in found[len(blocks) :]} <= {-1}
        assert set(forward.token_row[at:].tolist()) <= {-1}
        assert set(forward.columns[at:].tolist()) <= {pool.pages * PAGE}
        assert int(forward.masks[at:].abs().sum()) == 0
    assert seen == [(row, node) for row, size in enumerate(sizes) for node in range(size)]
