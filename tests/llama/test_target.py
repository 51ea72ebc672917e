"""A target in a GGUF file: its numbers, and that they are the same bits whatever else is in a
forward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa.errors import CapacityError, FullError, UsageError
from moa.llama.library import find
from moa.llama.memory_plan import plan_memory
from moa.llama.target import LlamaTarget, _values_of, layers_that_fit
from moa.target.contract import LoadOptions, Node
from moa.target.registry import open_target
from moa.target.rows import Row
from testing import gguf_tiny
from testing.tiny import tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma3": {"query_pre_attn_scalar": 16},
}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
}
"""Rows of K-quants are of 256 weights."""
MIXTURE = {"norm_topk_prob": True}
OPTIONS = LoadOptions(slots=4, capacity=256, threads=1)


@pytest.fixture(autouse=True)
def llama_is_installed() -> None:
    gguf_tiny.need_llama()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """Makes targets, and frees them."""
    made: list[LlamaTarget] = []

    def open_one(
        family: str = "llama", kind: str = "F32", options: LoadOptions = OPTIONS
    ) -> LlamaTarget:
        file = tmp_path / f"{family}-{kind}.gguf"
        if not file.exists():
            name = family.removeprefix("wide ")
            shape = FAMILIES.get(name, MIXTURE) | (WIDE if name != family else {})
            gguf_tiny.save(tiny(name, **shape), file, kind=kind)
        target = open_target(str(file), options)
        assert isinstance(target, LlamaTarget)
        made.append(target)
        return target

    yield open_one
    for target in made:
        target.close()


def text(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(4, 120, size=length)]


def plain(target: LlamaTarget, ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """The target's own text, a token at a time, and its logits."""
    slot = target.cache.acquire()
    step = target.forward([Row.chain(slot, ids)])
    target.commit(step, 0, range(len(ids)))
    logits = [step.host_logits([Node(0, -1)])[0]]
    tokens = [int(step.argmax(0)[-1])]
    while len(tokens) < count:
        step = target.forward([Row.chain(slot, [tokens[-1]])])
        target.commit(step, 0, [0])
        logits.append(step.host_logits([Node(0, 0)])[0])
        tokens.append(int(step.argmax(0)[0]))
    target.cache.release(slot)
    return tokens, np.array(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_the_library(family: str, opened: Any) -> None:
    target = opened(family)
    ids = text(0, 40)
    model = tiny(family, **FAMILIES[family])
    with torch.inference_mode():
        truth = model(torch.tensor([ids])).logits[0].numpy()
    slot = target.cache.acquire()
    step = target.forward([Row.chain(slot, ids, "all")])
    found = step.host_logits([Node(0, node) for node in range(len(ids))])
    # Keys and values are kept in float16: three digits, beside logits that are spread over 20.
    assert np.abs(found - truth).max() < 0.2
    assert np.mean(found.argmax(-1) == truth.argmax(-1)) > 0.9


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "F32"),
        ("llama", "Q8_0"),
        ("qwen3", "Q4_0"),
        ("gemma3", "F16"),
        ("qwen2", "BF16"),
        ("wide qwen2", "Q4_K_M"),
        ("wide llama", "Q6_K"),
    ],
)
def test_numbers_are_the_same_bits_in_drafts_in_crowds_and_in_pieces(
    family: str, kind: str, opened: Any
) -> None:
    """Plain decoding, beside drafts of random lengths that are often wrong, in sessions that come
    and go, whose prompts ran in unlike pieces."""
    target = opened(family, kind)
    assert target.capabilities.batch_invariant
    rng = random.Random(1)
    truths = {}
    for seed in range(4):
        truths[seed] = plain(target, text(seed, 20 + 30 * seed), 24)
    sessions: dict[int, tuple[int, list[int]]] = {}
    waiting = list(truths)
    finished = 0
    while waiting or sessions:
        while waiting and target.cache.free and rng.random() < 0.5:
            seed = waiting.pop(0)
            slot = target.cache.acquire()
            ids = text(seed, 20 + 30 * seed)
            while ids[:-1]:
                size = min(len(ids) - 1, rng.randrange(1, 40))
                step = target.forward([Row.chain(slot, ids[:size], "none")])
                target.commit(step, 0, range(size))
                ids = ids[size:]
            sessions[slot] = seed, [ids[-1]]
        if not sessions:
            continue
        some = rng.sample(sorted(sessions), rng.randrange(1, len(sessions) + 1))
        rows = []
        for slot in some:
            seed, said = sessions[slot]
            tokens = truths[seed][0]
            draft = tokens[len(said) - 1 : len(said) - 1 + rng.randrange(0, 20)]
            draft = [token if rng.random() < 0.9 else 5 for token in draft]
            rows.append(Row.chain(slot, [said[-1], *draft], "all"))
        step = target.forward(rows)
        for b, slot in enumerate(some):
            seed, said = sessions[slot]
            tokens, logits = truths[seed]
            best = step.argmax(b).tolist()
            path = [0]
            while path[-1] + 1 < len(best) and rows[b].tokens[path[-1] + 1] == best[path[-1]]:
                path.append(path[-1] + 1)
            rest = len(tokens) - (len(said) - 1)
            path = path[:rest]
            found = step.host_logits([Node(b, node) for node in path])
            at = len(said) - 1
            assert np.array_equal(found, logits[at : at + len(path)])
            said += [best[node] for node in path]
            target.commit(step, b, path)
            if len(said) > len(tokens):
                assert said[1:] == tokens
                target.cache.release(slot)
                del sessions[slot]
                finished += 1
    assert finished == len(truths)


def test_a_slot_that_shares_a_beginning_goes_on_alone(opened: Any) -> None:
    target = opened()
    ids = text(3, 30)
    ours, _ = plain(target, ids, 8)
    other = [*ids[:20], *text(4, 6)]
    theirs, _ = plain(target, other, 8)
    first = target.cache.acquire()
    step = target.forward([Row.chain(first, ids)])
    target.commit(step, 0, range(30))
    second = target.cache.share(first, 20)
    assert target.cache.lengths[second] == 20
    step = target.forward([Row.chain(second, other[20:]), Row.chain(first, ours[:1])])
    assert step.argmax(0)[-1] == theirs[0]
    assert step.argmax(1)[-1] == ours[1]
    target.cache.release(first)
    third = target.cache.acquire()
    assert target.cache.lengths[third] == 0
    step = target.forward([Row.chain(third, ids)])
    assert step.argmax(0)[-1] == ours[0], "it finds nothing of who was here before"


def test_what_cannot_be_run_is_refused_before_anything_has_changed(opened: Any) -> None:
    target = opened()
    slot = target.cache.acquire()
    step = target.forward([Row.chain(slot, text(0, 10))])
    target.commit(step, 0, range(10))
    with pytest.raises(UsageError, match="chains only"):
        target.forward([Row(slot, [5, 6, 7], [-1, 0, 0])])
    with pytest.raises(CapacityError, match="capacity is 256"):
        target.forward([Row.chain(slot, text(0, 247))])
    with pytest.raises(UsageError, match="token ids"):
        target.forward([Row.chain(slot, [128])])
    with pytest.raises(UsageError, match="moved on"):
        target.commit(step, 0, range(10))
    other = target.forward([Row.chain(slot, [5, 6, 7], "all")])
    for path in ([1], [0, 2], [0, 1, 2, 3]):
        with pytest.raises(UsageError, match="no chain"):
            target.commit(other, 0, path)
    target.commit(other, 0, [0])
    assert target.cache.lengths[slot] == 11
    for _ in range(3):
        target.cache.acquire()
    with pytest.raises(FullError, match="all 4 slots"):
        target.cache.acquire()


def test_a_full_slot_runs_to_its_last_token(opened: Any) -> None:
    target = opened()
    slot = target.cache.acquire()
    for start in range(0, 256, 100):
        ids = text(start, min(100, 256 - start))
        step = target.forward([Row.chain(slot, ids, "all")])
        target.commit(step, 0, range(len(ids)))
    assert target.cache.lengths[slot] == 256


def test_logits_of_rows_that_were_not_judged_are_those_of_rows_that_were(opened: Any) -> None:
    target = opened()
    slot = target.cache.acquire()
    ids = text(0, 12)
    judged = target.forward([Row.chain(slot, ids, "all")]).host_logits([Node(0, 5), Node(0, -1)])
    step = target.forward([Row.chain(slot, ids, "none")])
    assert (step.argmax(0) == -1).all()
    assert np.array_equal(step.host_logits([Node(0, 5), Node(0, -1)]), judged)
    target.commit(step, 0, range(12))


def test_settings_that_it_does_not_know_are_refused(tmp_path: Path) -> None:
    file = gguf_tiny.save(tiny("llama"), tmp_path / "a.gguf")
    with pytest.raises(UsageError, match=r"--dtype does not go with .*gguf"):
        open_target(str(file), LoadOptions(dtype="bfloat16"))
    with pytest.raises(UsageError, match="--kv-type does not go with"):
        open_target(str(tmp_path), LoadOptions(kv_type="q8_0"))
    with pytest.raises(UsageError, match="unknown --kv-type"):
        open_target(str(file), LoadOptions(kv_type="q9"))
    with pytest.raises(UsageError, match="no library at"):
        open_target(str(file), LoadOptions(library=str(tmp_path / "libllama.so")))


def test_replicas_that_may_add_in_another_order_have_another_identity(
    opened: Any, tmp_path: Path
) -> None:
    plainly = opened().computes
    assert plainly == opened().computes
    assert opened(options=replace(OPTIONS, threads=2)).computes == plainly, (
        "same bits: the tests above"
    )
    assert opened(options=replace(OPTIONS, slots=2)).computes == plainly
    library = tmp_path / find().name
    library.write_bytes(find().read_bytes() + b"\0")  # another build, as far as its bytes say
    others = {
        "kv type": replace(OPTIONS, kv_type="bf16"),
        "own kernels": replace(OPTIONS, exact=False),
        "own kernels, other threads": replace(OPTIONS, exact=False, threads=2),
        "build": replace(OPTIONS, library=str(library)),
    }
    found = {name: opened(options=options).computes for name, options in others.items()}
    found["weights"] = opened(kind="Q8_0").computes
    assert len({plainly, *found.values()}) == 1 + len(found), found


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "F16"])
def test_numbers_do_not_depend_on_the_threads(kind: str, opened: Any) -> None:
    """A replica on a machine with more cores goes on with the same text, also where the attention
    of a single token is cut by threads: over 512 cells, of which llama.cpp takes 256 at a time."""
    ids = text(5, 270)
    options = replace(OPTIONS, capacity=512)
    one, two = (opened("wide qwen2", kind, replace(options, threads=n)) for n in (1, 2))
    tokens, logits = plain(one, ids, 16)
    other_tokens, other_logits = plain(two, ids, 16)
    assert tokens == other_tokens
    assert np.array_equal(logits, other_logits)
    # A draft of right tokens, too.
    slot = two.cache.acquire()
    two.commit(two.forward([Row.chain(slot, ids[:-1], "none")]), 0, range(269))
    step = two.forward([Row.chain(slot, [ids[-1], *tokens[:-1]], "all")])
    assert np.array_equal(step.host_logits([Node(0, node) for node in range(16)]), logits)


def test_where_keys_and_values_are_one_cache_they_have_one_type(opened: Any) -> None:
    head = opened()._head
    assert _values_of(head) == "bf16"
    latent = replace(head, metadata={**head.metadata, "llama.attention.kv_lora_rank": 512})
    assert _values_of(latent) == "f16"


def test_plain_decoding_of_a_file_of_k_quants_fills_nothing_up(opened: Any) -> None:
    """A token of a stream without drafts costs what it costs in llama.cpp."""
    target = opened("wide qwen2", "Q4_K_M")
    if "AVX2 = 1" not in target.runtime.adds_by["instructions"]:
        pytest.skip("few tokens are known to have kernels of their own on x86 alone")
    slot = target.cache.acquire()
    target.commit(target.forward([Row.chain(slot, text(0, 20), "none")]), 0, range(20))
    sizes = []
    decode = target.runtime._c.llama_decode

    def counted(context: Any, batch: Any) -> int:
        sizes.append(batch.n_tokens)
        return int(decode(context, batch))

    target.runtime._c.llama_decode = counted
    try:
        target.commit(target.forward([Row.chain(slot, [5])]), 0, [0])
        target.forward([Row.chain(slot, text(1, 8), "all")])
    finally:
        target.runtime._c.llama_decode = decode
    assert sizes == [1, 3, 3, 2]


def test_what_verified_means_is_said_of_each_way_to_compute(opened: Any) -> None:
    assert "to the last bit" in opened().capabilities.promise
    assert (
        "as close as rounding" in opened(options=replace(OPTIONS, exact=False)).capabilities.promise
    )


def test_a_mixture_is_the_librarys_and_its_experts_may_be_told_to_stay(opened: Any) -> None:
    """On a processor they are there anyway: the same text. That they leave a card is not shown."""
    target = opened("qwen3_moe")
    assert not target.capabilities.batch_invariant, "experts see other tokens of the batch"
    ids = text(6, 30)
    with torch.inference_mode():
        truth = tiny("qwen3_moe", **MIXTURE)(torch.tensor([ids])).logits[0].numpy()
    slot = target.cache.acquire()
    step = target.forward([Row.chain(slot, ids, "all")])
    found = step.host_logits([Node(0, node) for node in range(len(ids))])
    assert np.abs(found - truth).max() < 0.2
    staying = opened("qwen3_moe", options=replace(OPTIONS, cpu_moe=True))
    assert plain(target, ids, 12)[0] == plain(staying, ids, 12)[0]
    head = target._head
    experts = sum(tensor.size for tensor in head.tensors if "_exps" in tensor.name)
    weights = sum(tensor.size for tensor in head.tensors)
    room = 2**30 + weights - experts
    assert layers_that_fit(head, room, kv_bytes=0, experts_on_host=True) == 5
    assert layers_that_fit(head, room, kv_bytes=0) < 5


def test_other_machines_need_a_build_that_can_reach_them(opened: Any) -> None:
    with pytest.raises(UsageError, match="has no RPC backend") as refused:
        opened(options=replace(OPTIONS, rpc=("127.0.0.1:1",)))
    assert "GGML_RPC" in refused.value.hint


def test_as_many_layers_go_to_a_card_as_it_has_memory_for(opened: Any) -> None:
    head = opened()._head
    weights = sum(tensor.size for tensor in head.tensors)
    workspace = 2**30
    assert layers_that_fit(head, workspace + weights + 4000, kv_bytes=4000) == 5
    assert layers_that_fit(head, workspace + weights - 1, kv_bytes=0) == 3
    assert layers_that_fit(head, 1000, kv_bytes=0) == 0


def test_so_many_slots_as_a_server_asks_for_are_given_and_bounded_in_memory(opened: Any) -> None:
    target = opened(options=LoadOptions(slots=256, capacity=64, kv_tokens=131072, threads=1))
    assert (target.cache.slots, target.cache.pages) == (256, 64)
    slot = target.cache.acquire()
    assert target.forward([Row.chain(slot, text(0, 10))]).argmax(0)[-1] >= 0


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_beginning_is_shared_with_a_session_of_another_block(family: str, opened: Any) -> None:
    """Of a window's layer llama.cpp copies there what the end of the text sees, and no more."""
    target = opened(family)
    ids = text(7, 60)
    others = {end: [*ids[:end], *text(end, 4)] for end in (50, 20, 10)}
    truths = {end: plain(target, other, 6)[0] for end, other in others.items()}
    first = target.cache.acquire()
    target.commit(target.forward([Row.chain(first, ids)]), 0, range(60))
    for end, truth in truths.items():
        slot = target.cache.share(first, end)
        step = target.forward([Row.chain(slot, [*others[end][end:], *truth[:-1]], "all")])
        assert step.argmax(0)[3:].tolist() == truth
    assert target.runtime.sequences_in_memory == 4


def test_memory_of_sessions_is_taken_as_they_come_and_given_back_as_they_go(opened: Any) -> None:
    """And the text of those in other blocks is the same, of those that share a beginning, too."""
    target = opened("qwen2", options=replace(OPTIONS, slots=16))
    runtime = target.runtime
    assert runtime.sequences_in_memory == 2
    ids = text(7, 40)
    truth, logits = plain(target, ids, 6)
    slots = []
    for expected in (2, 2, 4, 4, 6, 6, 8, 8, 10):
        slots.append(target.cache.acquire())
        assert runtime.sequences_in_memory <= expected, "a slot without tokens takes nothing"
        target.commit(target.forward([Row.chain(slots[-1], ids[:-1], "none")]), 0, range(39))
        assert runtime.sequences_in_memory == expected
    slots.append(target.cache.share(slots[0], 39))  # from the first block to the last
    step = target.forward([Row.chain(slot, [ids[-1], *truth[:5]], "all") for slot in slots])
    for b in range(len(slots)):
        assert np.array_equal(step.host_logits([Node(b, node) for node in range(6)]), logits)
        target.commit(step, b, range(6))
    for slot in slots[1:9]:
        target.cache.release(slot)
    assert runtime.sequences_in_memory == 10, "the last block is in use"
    step = target.forward([Row.chain(slots[9], [truth[5]]), Row.chain(slots[0], [truth[5]])])
    assert step.argmax(0)[-1] == step.argmax(1)[-1]
    target.cache.release(slots[9])
    assert runtime.sequences_in_memory == 2
    again = target.cache.acquire()
    step = target.forward([Row.chain(again, ids)])
    assert step.argmax(0)[-1] == truth[0]


def test_a_session_that_there_is_no_memory_for_is_refused_and_the_others_go_on(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = opened(options=replace(OPTIONS, slots=8))
    ids = text(8, 12)
    first = target.cache.acquire()
    before = target.forward([Row.chain(first, ids)]).argmax(0)[-1]
    monkeypatch.setattr("moa.llama.runtime.available_bytes", lambda: 1000)
    others = [target.cache.acquire() for _ in range(2)]
    target.forward([Row.chain(others[0], ids)])
    with pytest.raises(FullError, match="for keys and values"):
        target.forward([Row.chain(others[1], ids)])
    assert target.forward([Row.chain(first, ids)]).argmax(0)[-1] == before
    monkeypatch.undo()
    assert target.forward([Row.chain(others[1], ids)]).argmax(0)[-1] == before


def test_weights_that_memory_does_not_hold_stay_in_the_file(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system then reads pages as they are needed. A number may differ in its last bit: another
    identity."""
    ids = text(9, 30)
    held = opened(kind="Q8_0")
    tokens, _ = plain(held, ids, 8)
    monkeypatch.setattr("moa.llama.memory_plan.available_bytes", lambda: 100_000)
    mapped = opened(kind="Q8_0", options=replace(OPTIONS, slots=3))
    assert mapped.runtime.shape.mapped
    assert not held.runtime.shape.mapped
    assert (mapped.machine.weights_on_disk, held.machine.weights_on_disk) == (True, False)
    assert mapped.computes != held.computes
    assert plain(mapped, ids, 8)[0] == tokens


def test_a_file_that_stays_on_disk_leaves_room_for_several_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was one, and who asked behind another's answer was told that the verifier is busy."""
    path = gguf_tiny.save(tiny("llama"), tmp_path / "tiny.gguf")
    options = replace(OPTIONS, slots=2, capacity=8)
    weights = path.stat().st_size
    monkeypatch.setattr("moa.llama.memory_plan.available_bytes", lambda: weights - 1)
    plan = plan_memory(path, options)
    assert plan.mapped
    assert plan.sequences == 2
