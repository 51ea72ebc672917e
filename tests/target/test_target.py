"""The target's guarantee: for any trees, lengths and batches it gives the plain model's results."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from moa.errors import CapacityError, NumericalError, UsageError
from moa.model.borrowed import SharedWeights
from moa.target import torch_target
from moa.target.contract import ExpectedLoad
from moa.target.library import cache_argument
from moa.target.products import can_pack
from moa.target.torch_target import Row, Target
from testing.close import assert_rounded
from testing.tiny import FAMILIES, tiny
from tests.target.trees import path_to, plain_logits, random_tree, reference, tree_logits

LOAD = ExpectedLoad(rows=1, tokens=8, draft_tokens=4, prompt_tokens=8)


def prefill(target: Target, ids: list[int], chunk: int = 7) -> int:
    slot = target.cache.acquire()
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        target.commit(target.forward([Row.chain(slot, part)]), 0, range(len(part)))
    return slot


def check_random_trees(
    target: Target, plain: PreTrainedModel, batch: int, **close: float
) -> Iterator[None]:
    """Verify random trees behind random texts, in three rounds, of which each continues what the
    last one committed."""
    rng = np.random.default_rng(batch)
    texts = [rng.integers(4, 128, int(rng.integers(3, 30))).tolist() for _ in range(batch)]
    slots = [prefill(target, text) for text in texts]
    for _ in range(3):
        yield
        trees = [random_tree(rng, int(rng.integers(1, 12))) for _ in range(batch)]
        order = rng.permutation(batch).tolist()
        step = target.forward([Row(slots[b], *trees[b]) for b in order])
        for place, b in enumerate(order):
            tokens, parents = trees[b]
            expected = tree_logits(plain, texts[b], tokens, parents)
            found = step.logits(place, range(len(tokens)))
            torch.testing.assert_close(found, expected, **close) if close else assert_rounded(
                found, expected
            )
            np.testing.assert_array_equal(step.argmax(place), expected.argmax(-1).numpy())
            path = path_to(parents, int(rng.integers(0, len(tokens))))
            committed = target.commit(step, place, path)
            assert committed.positions.tolist() == list(
                range(len(texts[b]), len(texts[b]) + len(path))
            )
            texts[b] = texts[b] + [tokens[node] for node in path]
            assert target.cache.lengths[slots[b]] == len(texts[b])


@pytest.mark.parametrize(
    ("family", "batch"),
    [*((family, 4) for family in (*FAMILIES, "mixtral", "qwen3_moe")), ("llama", 1), ("gemma3", 1)],
)
def test_random_trees_score_as_plain_forwards_do_and_commits_continue_exactly(
    family: str, batch: int
) -> None:
    target = Target.from_model(tiny(family), slots=batch + 1, capacity=96)
    assert len(list(check_random_trees(target, reference(family), batch))) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_itself_still_runs_plainly(family: str) -> None:
    ids = torch.arange(4, 34).reshape(2, 15)
    with torch.no_grad():
        found = Target.from_model(tiny(family), capacity=16, packed=False).model(ids).logits
        assert_rounded(found, reference(family)(ids).logits)


def test_committed_rows_are_the_models_own_cache_and_states() -> None:
    model = tiny("llama")
    target = Target.from_model(tiny("llama"), slots=2, capacity=32)
    prefix = [7, 8, 9]
    tokens = [10, 11, 12, 13]
    parents = [-1, 0, 0, 2]
    slot = prefill(target, prefix)
    committed = target.commit(target.forward([Row(slot, tokens, parents)]), 0, [0, 2, 3])
    with torch.no_grad():
        kept = DynamicCache()
        out = model.model(
            torch.tensor([[7, 8, 9, 10, 12, 13]]),
            use_cache=True,
            **{cache_argument(model.model): kept},
        )
    for keys, values, layer in zip(*committed.kv, kept.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys[0, :, 3:].transpose(0, 1))
        torch.testing.assert_close(values, layer.values[0, :, 3:].transpose(0, 1))
    torch.testing.assert_close(committed.hidden, out.last_hidden_state[0, 3:])
    assert committed.positions.tolist() == [3, 4, 5]


def test_only_judged_nodes_pass_through_the_head_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa.target.torch_target._LOGITS_AT_ONCE", 128)
    target = Target.from_model(tiny("llama"), slots=3, capacity=32)
    slots = [target.cache.acquire() for _ in range(3)]
    rows = [
        Row(slots[0], [5, 6], [-1, 0]),
        Row.chain(slots[1], [7, 8, 9]),
        Row.chain(slots[2], [4], judged="none"),
    ]
    step = target.forward(rows)
    assert step.argmax(0).tolist() == step.logits(0, [0, 1]).argmax(-1).tolist()
    assert step.argmax(1).tolist() == [-1, -1, int(step.logits(1, [2]).argmax())]
    assert step.argmax(2).tolist() == [-1]
    assert target.commit(step, 2, []).hidden.shape == (0, 64)


@pytest.mark.parametrize(
    ("tokens", "parents", "said"),
    [
        ([128], [-1], "token ids must be 0..127"),
        ([-1], [-1], "token ids must be 0..127"),
        ([5, 6], [-1, 1], "must come before it"),
        ([5, 6], [-1, -2], "must come before it"),
        ([5], [0], "must come before it"),
        ([5, 6], [-1], "a parent for each"),
        ([], [], "a row needs tokens"),
        ([5.0], [-1], "plain integers"),
        ([2**70], [-1], "plain integers"),
        ([[5]], [-1], "plain integers"),
        ([True], [-1], "plain integers"),
    ],
)
def test_bad_rows_are_refused_before_the_model_runs(tokens: list, parents: list, said: str) -> None:
    target = Target.from_model(tiny("llama"), slots=2, capacity=16)
    good = target.cache.acquire()
    bad = target.cache.acquire()
    with pytest.raises(UsageError, match=said):
        target.forward([Row(good, [5], [-1]), Row(bad, tokens, parents)])
    assert target.cache.versions == [0, 0]


def test_rows_of_one_slot_or_of_no_slot_are_refused() -> None:
    target = Target.from_model(tiny("llama"), slots=2, capacity=16)
    slot = target.cache.acquire()
    with pytest.raises(UsageError, match="same slot"):
        target.forward([Row(slot, [5], [-1]), Row(slot, [6], [-1])])
    with pytest.raises(UsageError, match="not in use"):
        target.forward([Row(1, [5], [-1])])
    with pytest.raises(UsageError, match="at least one row"):
        target.forward([])


def test_a_full_slot_is_a_typed_error_and_harms_no_other() -> None:
    target = Target.from_model(tiny("llama", max_position_embeddings=16), slots=2, capacity=100)
    full = prefill(target, [5] * 14)
    other = prefill(target, [6] * 3)
    with pytest.raises(CapacityError, match="capacity is 16"):
        target.forward([Row(other, [5], [-1]), Row(full, [5, 6, 7], [-1, 0, 1])])
    step = target.forward([Row(full, [5, 6], [-1, 0])])  # the last columns can be used
    target.commit(step, 0, [0, 1])
    assert target.cache.lengths[full] == 16
    assert_rounded(step.logits(0, [1])[0], plain_logits(reference("llama"), [5] * 15 + [6]))


@pytest.mark.parametrize("path", [[1], [0, 3], [0, 0], [0, 1, 2], [0, 4], [-1]])
def test_a_path_must_be_a_chain_from_the_prefix_on(path: list[int]) -> None:
    target = Target.from_model(tiny("llama"), capacity=16)
    step = target.forward([Row(target.cache.acquire(), [5, 6, 7, 8], [-1, 0, 0, 1])])
    with pytest.raises(UsageError, match="does not continue the path"):
        target.commit(step, 0, path)
    assert target.commit(step, 0, [0, 1, 3]).hidden.shape == (3, 64)


def test_a_step_is_committed_once_and_only_while_it_is_the_last() -> None:
    target = Target.from_model(tiny("llama"), capacity=16)
    slot = target.cache.acquire()
    old = target.forward([Row(slot, [5], [-1])])
    new = target.forward([Row(slot, [6], [-1])])
    with pytest.raises(UsageError, match="moved on"):
        target.commit(old, 0, [0])
    target.commit(new, 0, [0])
    with pytest.raises(UsageError, match="moved on"):
        target.commit(new, 0, [0])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_low_precision_weights_get_a_float32_head(family: str) -> None:
    model = tiny(family).bfloat16()
    target = Target.from_model(model, capacity=16)
    step = target.forward([Row(target.cache.acquire(), [5, 6, 7], [-1, 0, 0])])
    wide = step.hidden(0).float() @ target.head_weight.float().T
    cap = target.logit_softcap
    wide = torch.tanh(wide / cap) * cap if cap else wide
    logits = step.logits(0, [0, 1, 2])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wide)
    with torch.inference_mode():
        narrow = step.hidden(0) @ target.head_weight.T
    assert not torch.equal(narrow.float(), step.hidden(0).float() @ target.head_weight.float().T)


@pytest.mark.parametrize(("family", "scale"), [("llama", 1.0), ("gemma2", 8.0), ("gemma3", 8.0)])
def test_embedding_scale_is_what_the_first_layer_gets(family: str, scale: float) -> None:
    target = Target.from_model(
        tiny(family), capacity=16, packed=False
    )  # the library's own layers can be listened to
    assert target.embedding_scale == scale
    seen: list[torch.Tensor] = []
    hook = target.model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    target.forward([Row(target.cache.acquire(), [5], [-1])])
    hook.remove()
    torch.testing.assert_close(seen[0][0, 0], target.embedding_weight[5] * scale)


def test_logits_that_are_no_numbers_are_told_as_such_and_only_of_their_row() -> None:
    target = Target.from_model(tiny("llama", seed=3), slots=2, capacity=32)
    with torch.no_grad():
        target.embedding_weight[77] = torch.nan
    good = target.cache.acquire()
    bad = target.cache.acquire()
    step = target.forward([Row.chain(good, [5, 6]), Row.chain(bad, [5, 77])])
    alone = target.forward([Row.chain(good, [5, 6])])
    np.testing.assert_array_equal(step.argmax(0), alone.argmax(0))
    with pytest.raises(NumericalError):
        step.argmax(1)


@pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="torch is without oneDNN"
)
@pytest.mark.parametrize("family", ["qwen2", "granite"])
def test_a_head_whose_copy_computes_is_given_back_unless_it_is_shared(family: str) -> None:
    target = Target.from_model(tiny(family), slots=2, capacity=32, pack_weights=True)
    row = Row.chain(target.cache.acquire(), [5, 6, 7], judged="all")
    shared = SharedWeights.of(target.model)  # as a drafter that was loaded beside it has them
    before = target.forward([row]).logits(0, [0, 1, 2])
    kept = shared.head.clone()
    weight = weakref.ref(target.head_weight)
    for _ in range(2):
        target.prepare(LOAD, seconds=0.0)
    assert weight() is None
    assert target.model.lm_head.weight.is_meta
    torch.testing.assert_close(shared.head, kept, rtol=0, atol=0)
    torch.testing.assert_close(target.forward([row]).logits(0, [0, 1, 2]), before, rtol=0, atol=0)


def test_a_head_that_is_the_embedding_or_has_no_copy_stays() -> None:
    tied = tiny("qwen2", tie_word_embeddings=True)
    for model, pack in ((tied, True), (tiny("qwen2"), False)):
        target = Target.from_model(model, capacity=32, pack_weights=pack)
        target.prepare(LOAD, seconds=0.0)
        assert not target.model.lm_head.weight.is_meta
        assert not target.model.get_input_embeddings().weight.is_meta


@pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="torch is without oneDNN"
)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_an_embedding_whose_numbers_fit_into_16_bits_is_kept_in_them(
    stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the head's copy it would be a second one: 0.9 GB for 152k tokens of 1,536 numbers."""
    monkeypatch.setattr(torch_target, "_WORTH_NARROWING", 0)
    model = tiny("qwen2", tie_word_embeddings=True).to(stored).float()
    target = Target.from_model(model, slots=2, capacity=32, pack_weights=True)
    row = Row.chain(target.cache.acquire(), [5, 6, 7], judged="all")
    before = target.forward([row]).logits(0, [0, 1, 2])
    weight = weakref.ref(target.embedding_weight)
    for _ in range(2):
        target.prepare(LOAD, seconds=0.0)
    is_kept_whole = stored == torch.float32
    assert (weight() is not None) == is_kept_whole
    assert target.embedding_weight.dtype == stored
    assert target.model.get_input_embeddings().weight.dtype == stored
    torch.testing.assert_close(target.forward([row]).logits(0, [0, 1, 2]), before, rtol=0, atol=0)
