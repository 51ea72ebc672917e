"""What every target promises (`moa/target/contract.py`), checked on each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from moa.errors import CapacityError, FullError, NumericalError, UsageError
from moa.grammar.matcher import Bits
from moa.sampling import SamplingSettings, choose
from moa.target.choosing import Judged, accept_rows
from moa.target.contract import ExpectedLoad, KVCache, Node, Step, Target
from moa.target.registry import check_conforms
from moa.target.rows import Row
from tests.target.subjects import SUBJECTS, Subject
from tests.target.trees import path_to, random_tree

VOCABULARY = 128
LOAD = ExpectedLoad(rows=2, tokens=16, draft_tokens=8, prompt_tokens=16)


@pytest.fixture(params=SUBJECTS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    found: Subject = request.param
    return found


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCABULARY, length).tolist()


def prefill(target: Target, ids: Sequence[int], piece: int = 7) -> int:
    """A slot that holds a text, which ran in pieces."""
    slot = target.cache.acquire()
    extend(target, slot, ids, piece)
    return slot


def extend(target: Target, slot: int, ids: Sequence[int], piece: int = 7) -> None:
    for start in range(0, len(ids), piece):
        part = ids[start : start + piece]
        step = target.forward([Row.chain(slot, part, judged="none")])
        target.commit(step, 0, range(len(part)))


def draft(target: Target, rng: np.random.Generator, size: int) -> tuple[list[int], list[int]]:
    """A tree, or a chain where drafts may not branch."""
    tokens, parents = random_tree(rng, size, VOCABULARY)
    return tokens, parents if target.capabilities.trees else list(range(-1, size - 1))


def plain_after(
    subject: Subject, ids: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> NDArray[np.float32]:
    """The logits after each node of a draft behind a text, each from a run of its own."""
    return np.stack(
        [
            subject.plain([*ids, *(tokens[at] for at in path_to(parents, node))])
            for node in range(len(tokens))
        ]
    )


def logits_of(step: Step, b: int) -> NDArray[np.float32]:
    """After every node of a row."""
    return step.host_logits([Node(b, node) for node in range(step.sizes[b])])


def check_next(subject: Subject, target: Target, slot: int, ids: Sequence[int]) -> None:
    """The slot continues exactly these tokens; nothing of it is committed."""
    step = target.forward([Row.chain(slot, [9])])
    subject.assert_equal(step.host_logits([Node(0, 0)])[0], subject.plain([*ids, 9]))


# ---- shape


def test_its_classes_have_the_contracts_methods(subject: Subject) -> None:
    target = subject.make(slots=1, capacity=16)
    check_conforms(type(target), Target)
    check_conforms(type(target.cache), KVCache)
    check_conforms(type(target.forward([Row.chain(target.cache.acquire(), [5])])), Step)


def test_it_says_what_it_is_and_takes(subject: Subject) -> None:
    target = subject.make(slots=3, capacity=64, kv_tokens=128)
    cache = target.cache
    assert target.capabilities.decoder
    assert target.facts.vocab_size >= VOCABULARY
    assert all((target.machine.device, target.machine.dtype, target.machine.hardware))
    assert (cache.slots, cache.capacity, cache.free) == (3, 64, 3)
    assert 128 <= cache.pages * cache.page_tokens < 128 + cache.page_tokens
    assert cache.free_pages == cache.pages
    assert target.memory.kv_bytes_per_token > 0
    assert target.memory.kv_bytes <= target.memory.kv_bytes_per_token * (128 + subject.spare_tokens)
    assert target.memory.buffer_bytes >= 0
    slot = prefill(target, text(0, 20))
    assert cache.lengths[slot] == 20
    assert cache.pages_held[slot] * cache.page_tokens >= 20
    assert cache.free_pages == cache.pages - cache.pages_held[slot]
    cache.release(slot)
    assert (cache.lengths[slot], cache.pages_held[slot]) == (0, 0)
    assert (cache.free, cache.free_pages) == (3, cache.pages)


def test_what_it_makes_ready_changes_no_number_and_keeps_no_slot(subject: Subject) -> None:
    target = subject.make(slots=2, capacity=64)
    slot = prefill(target, text(1, 10))
    row = Row.chain(slot, text(2, 6), judged="all")
    before = target.forward([row]).argmax(0)
    target.prepare(LOAD, seconds=0.0)
    for _ in range(100):
        if not target.unprepared:
            break
        target.prepare_more()
    assert not target.unprepared
    assert target.cache.free == 1
    np.testing.assert_array_equal(target.forward([row]).argmax(0), before)


# ---- numbers


@pytest.mark.parametrize("batch", [1, 4])
def test_drafts_score_as_plain_decoding_and_commits_continue_exactly(
    subject: Subject, batch: int
) -> None:
    target = subject.make(slots=batch + 1, capacity=112)
    rng = np.random.default_rng(batch)
    texts = [text(10 + b, int(rng.integers(3, 30))) for b in range(batch)]
    slots = [prefill(target, ids) for ids in texts]
    for _ in range(3):
        drafts = [draft(target, rng, int(rng.integers(1, 10))) for _ in range(batch)]
        order = rng.permutation(batch).tolist()
        step = target.forward([Row(slots[b], *drafts[b]) for b in order])
        for place, b in enumerate(order):
            tokens, parents = drafts[b]
            wanted = plain_after(subject, texts[b], tokens, parents)
            subject.assert_equal(logits_of(step, place), wanted)
            np.testing.assert_array_equal(step.argmax(place), wanted.argmax(1))
            path = path_to(parents, int(rng.integers(0, len(tokens))))
            committed = target.commit(step, place, path)
            assert (committed.start, committed.stop) == (len(texts[b]), len(texts[b]) + len(path))
            assert list(committed.tokens) == [tokens[node] for node in path]
            texts[b] = [*texts[b], *committed.tokens]
            assert target.cache.lengths[slots[b]] == len(texts[b])


def test_greedy_text_is_the_same_with_any_drafts_in_any_company(subject: Subject) -> None:
    target = subject.make(slots=3, capacity=112)
    prompts = [text(20, 9), text(21, 17)]
    plain = []
    for ids in prompts:
        said = list(ids)
        for _ in range(16):
            said.append(int(subject.plain(said).argmax()))
        plain.append(said)
    rng = np.random.default_rng(22)
    slots = [prefill(target, ids[:-1]) for ids in prompts]
    logs = [list(ids) for ids in prompts]
    while min(len(log) - len(ids) for log, ids in zip(logs, prompts, strict=True)) < 16:
        rows = []
        judged = []
        for slot, log, truth in zip(slots, logs, plain, strict=True):
            right = truth[len(log) : len(log) + int(rng.integers(0, 3))]
            tokens = [log[-1], *right, *text(int(rng.integers(0, 99)), 2)]
            parents = range(-1, len(tokens) - 1)
            rows.append(Row(slot, tokens, parents))
            judged.append(Judged(tokens, parents, log, SamplingSettings()))
        step = target.forward(rows)
        for b, accepted in enumerate(accept_rows(step, judged)):
            target.commit(step, b, accepted.path)
            new = [judged[b].tokens[node] for node in accepted.path[1:]]
            logs[b] = [*logs[b], *new, accepted.next_token]
    for log, truth in zip(logs, plain, strict=True):
        assert log[: len(truth)] == truth


def test_only_judged_nodes_have_a_likeliest_token(subject: Subject) -> None:
    target = subject.make(slots=3, capacity=32)
    slots = [target.cache.acquire() for _ in range(3)]
    step = target.forward(
        [
            Row.chain(slots[0], [5, 6], judged="all"),
            Row.chain(slots[1], [7, 8, 9], judged="last"),
            Row.chain(slots[2], [4], judged="none"),
        ]
    )
    assert list(step.sizes) == [2, 3, 1]
    assert step.path
    assert step.argmax(0).tolist() == logits_of(step, 0).argmax(1).tolist()
    last = step.host_logits([Node(1, -1)])
    assert step.argmax(1).tolist() == [-1, -1, int(last.argmax())]
    assert step.argmax(2).tolist() == [-1]
    subject.assert_equal(step.host_logits([Node(2, 0)])[0], subject.plain([4]))


def test_numbers_that_do_not_depend_on_the_batch_are_the_same_bits(subject: Subject) -> None:
    target = subject.make(slots=4, capacity=64)
    if not target.capabilities.batch_invariant:
        pytest.skip("does not say so")
    ids = text(30, 23)
    rows = text(31, 6)
    slots = [prefill(target, ids, piece) for piece in (23, 4)]
    other = prefill(target, text(32, 11))
    alone = target.forward([Row.chain(slots[0], rows, judged="all")])
    wanted = logits_of(alone, 0)
    beside = target.forward(
        [Row.chain(other, text(33, 9)), Row.chain(slots[1], rows, judged="all")]
    )
    np.testing.assert_array_equal(logits_of(beside, 1), wanted)


# ---- slots


@pytest.mark.parametrize("shared", [1, 13, 16, 32, 37])
def test_a_shared_prefix_continues_on_its_own(subject: Subject, shared: int) -> None:
    target = subject.make(slots=3, capacity=64)
    ids = text(40, 37)
    source = prefill(target, ids)
    slot = target.cache.share(source, shared)
    assert target.cache.lengths[slot] == shared
    new = text(41, 5)
    extend(target, slot, new)
    extend(target, source, [6, 7])
    check_next(subject, target, slot, [*ids[:shared], *new])
    target.cache.release(source)
    again = prefill(target, text(42, 40))  # takes what the source gave back
    check_next(subject, target, slot, [*ids[:shared], *new])
    for one in (slot, again):
        target.cache.release(one)
    assert target.cache.free_pages == target.cache.pages


def test_what_cannot_be_shared_is_refused(subject: Subject) -> None:
    target = subject.make(slots=2, capacity=32)
    source = prefill(target, [5, 6, 7])
    for tokens in (0, 4, -1):
        with pytest.raises(UsageError):
            target.cache.share(source, tokens)
    with pytest.raises(UsageError):
        target.cache.share(1 - source, 1)
    assert target.cache.free == 1


def test_drafts_that_are_not_committed_leave_nothing(subject: Subject) -> None:
    target = subject.make(slots=1, capacity=64)
    ids = text(50, 20)
    slot = prefill(target, ids)
    rng = np.random.default_rng(51)
    for _ in range(3):
        target.forward([Row(slot, *draft(target, rng, 9))])
    assert target.cache.lengths[slot] == 20
    check_next(subject, target, slot, ids)
    step = target.forward([Row.chain(slot, [8, 9, 10], judged="all")])
    target.commit(step, 0, [])  # not even its first token
    check_next(subject, target, slot, ids)
    step = target.forward([Row.chain(slot, [8, 9, 10], judged="all")])
    target.commit(step, 0, [0])
    check_next(subject, target, slot, [*ids, 8])


def test_a_slots_next_user_finds_nothing(subject: Subject) -> None:
    target = subject.make(slots=1, capacity=64)
    slot = prefill(target, text(60, 40))
    target.forward([Row.chain(slot, text(61, 9))])
    target.cache.release(slot)
    slot = prefill(target, [5, 6])
    check_next(subject, target, slot, [5, 6])


def test_a_session_goes_on_in_another_target_from_its_tokens(subject: Subject) -> None:
    first = subject.make(slots=2, capacity=64)
    other = subject.make(slots=2, capacity=64)
    log = text(70, 12)
    slot = prefill(first, log[:-1])
    for _ in range(8):
        step = first.forward([Row.chain(slot, log[-1:])])
        first.commit(step, 0, [0])
        log.append(int(step.argmax(0)[-1]))
    resumed = prefill(other, log[:-1])
    steps = [
        first.forward([Row.chain(slot, log[-1:])]),
        other.forward([Row.chain(resumed, log[-1:])]),
    ]
    assert steps[0].argmax(0).tolist() == steps[1].argmax(0).tolist()
    subject.assert_equal(logits_of(steps[1], 0), logits_of(steps[0], 0))


# ---- errors


def test_bad_rows_are_refused_before_anything_changes(subject: Subject) -> None:
    target = subject.make(slots=3, capacity=32)
    good = prefill(target, [5, 6])
    bad = target.cache.acquire()
    step = target.forward([Row.chain(good, [7])])
    for tokens, parents in (
        ([target.facts.vocab_size], [-1]),
        ([-1], [-1]),
        ([5, 6], [-1, 1]),
        ([5, 6], [-1, -2]),
        ([5, 6], [-1]),
        ([], []),
        ([5.0], [-1]),
        ([2**70], [-1]),
    ):
        with pytest.raises(UsageError):
            target.forward([Row.chain(good, [7]), Row(bad, tokens, parents)])  # type: ignore[arg-type]
    for rows in ([], [Row.chain(good, [5]), Row.chain(good, [6])], [Row.chain(2, [5])]):
        with pytest.raises(UsageError):
            target.forward(rows)
    target.commit(step, 0, [0])  # no refused forward has touched the slot
    assert target.cache.lengths[good] == 3


def test_a_path_is_a_chain_and_is_committed_once_and_at_once(subject: Subject) -> None:
    target = subject.make(slots=1, capacity=32)
    slot = target.cache.acquire()
    old = target.forward([Row.chain(slot, [5], judged="all")])
    new = target.forward([Row.chain(slot, [5, 6, 7], judged="all")])
    with pytest.raises(UsageError):
        target.commit(old, 0, [0])
    for path in ([1], [0, 2], [0, 0], [0, 1, 2, 3], [-1]):
        with pytest.raises(UsageError):
            target.commit(new, 0, path)
    target.commit(new, 0, [0, 1])
    with pytest.raises(UsageError):
        target.commit(new, 0, [0])
    check_next(subject, target, slot, [5, 6])


def test_a_step_cannot_be_committed_once_its_slot_was_given_back(subject: Subject) -> None:
    """A connection may end between a forward and its commit, and its slot be another session's."""
    target = subject.make(slots=2, capacity=32)
    slot = prefill(target, text(85, 9))
    other = prefill(target, text(86, 5))
    step = target.forward(
        [Row.chain(slot, [5, 6], judged="all"), Row.chain(other, [7, 8], judged="all")]
    )
    target.cache.release(slot)
    for path in ([], [0], [0, 1]):
        with pytest.raises(UsageError):
            target.commit(step, 0, path)
    assert (target.cache.lengths[slot], target.cache.pages_held[slot]) == (0, 0)
    again = target.cache.acquire()
    assert again == slot, "no other slot is free"
    with pytest.raises(UsageError):
        target.commit(step, 0, [0])
    assert target.cache.lengths[slot] == 0
    target.commit(step, 1, [0, 1])  # the row beside it is as it was
    check_next(subject, target, other, [*text(86, 5), 7, 8])
    extend(target, again, [9, 10])
    check_next(subject, target, again, [9, 10])


def test_a_full_slot_harms_no_other(subject: Subject) -> None:
    target = subject.make(slots=2, capacity=16)
    ids = text(80, 14)
    full = prefill(target, ids)
    other = prefill(target, [6, 7])
    with pytest.raises(CapacityError):
        target.forward([Row.chain(other, [5]), Row.chain(full, [5, 6, 7])])
    step = target.forward([Row.chain(full, [5, 6], judged="all")])  # the last places can be used
    target.commit(step, 0, [0, 1])
    assert target.cache.lengths[full] == 16
    check_next(subject, target, other, [6, 7])


def test_full_memory_is_told_before_anything_changes(subject: Subject) -> None:
    target = subject.make(slots=3, capacity=32, kv_tokens=64)
    cache = target.cache
    slots = [prefill(target, text(90, length), length) for length in (30, 32)]
    third = cache.acquire()
    with pytest.raises(FullError):
        cache.acquire()
    rows = [Row.chain(third, [5]), Row.chain(slots[0], text(91, 2))]
    with pytest.raises(FullError):
        target.forward(rows)
    assert [cache.lengths[slot] for slot in (*slots, third)] == [30, 32, 0]
    check_next(subject, target, slots[0], text(90, 30))  # alone and short it fits
    cache.release(slots[1])
    step = target.forward(rows)
    target.commit(step, 1, range(2))
    assert cache.lengths[slots[0]] == 32


def test_slots_that_nobody_has_are_refused(subject: Subject) -> None:
    target = subject.make(slots=2, capacity=16)
    slot = target.cache.acquire()
    target.cache.release(slot)
    for wrong in (slot, 2, -1):
        with pytest.raises(UsageError):
            target.cache.release(wrong)


def test_logits_that_are_no_numbers_are_told_of_their_row_alone(subject: Subject) -> None:
    if subject.poison is None:
        pytest.skip("its weights cannot be damaged by a test")
    target = subject.make(slots=2, capacity=32)
    bad_token = subject.poison(target)
    good = target.cache.acquire()
    bad = target.cache.acquire()
    greedy = SamplingSettings()
    drawn = SamplingSettings(temperature=1.0, seed=3)
    step = target.forward(
        [Row.chain(good, [5, 6], judged="all"), Row.chain(bad, [bad_token, 5], judged="all")]
    )
    wanted = [int(subject.plain([5]).argmax()), int(subject.plain([5, 6]).argmax())]
    assert step.argmax(0).tolist() == wanted
    with pytest.raises(NumericalError):
        step.argmax(1)
    for sampling in (greedy, drawn):
        with pytest.raises(NumericalError):
            accept_rows(
                step,
                [
                    Judged([5, 6], [-1, 0], [5], greedy),
                    Judged([bad_token, 5], [-1, 0], [bad_token], sampling),
                ],
            )


# ---- sampling


SAMPLED = (
    SamplingSettings(temperature=0.9, seed=3),
    SamplingSettings(temperature=0.7, top_p=0.8, seed=4),
    SamplingSettings(temperature=1.3, top_k=5, min_p=0.01, seed=5),
    SamplingSettings(repetition_penalty=1.6),
    SamplingSettings(),
)


@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
def test_tokens_are_chosen_by_the_one_rule(subject: Subject, masked: bool) -> None:
    target = subject.make(slots=len(SAMPLED), capacity=64)
    rng = np.random.default_rng(100)
    allowed = rng.random(VOCABULARY) < 0.5 if masked else np.ones(VOCABULARY, dtype=bool)
    bits: Bits = np.packbits(allowed, bitorder="little")
    prompts = [text(101 + b, 11) for b in range(len(SAMPLED))]
    slots = [prefill(target, ids[:-1]) for ids in prompts]
    rows = []
    judged = []
    for slot, ids, sampling in zip(slots, prompts, SAMPLED, strict=True):
        # The first guess is right, and the second of two: the third is wrong.
        first = chosen(subject, ids, sampling, allowed)
        second = chosen(subject, [*ids, first], sampling, allowed)
        tokens = [ids[-1], first, second, (second + 1) % VOCABULARY]
        parents = [-1, 0, 1, 2]
        rows.append(Row(slot, tokens, parents))
        masks = [bits] * len(tokens) if masked else None
        judged.append(Judged(tokens, parents, ids, sampling, masks))
    step = target.forward(rows)
    for b, accepted in enumerate(accept_rows(step, judged)):
        said = [*prompts[b], *judged[b].tokens[1:3]]
        assert list(accepted.path[:3]) == [0, 1, 2]
        if len(accepted.path) == 3:
            assert accepted.next_token == chosen(subject, said, SAMPLED[b], allowed)


def chosen(
    subject: Subject, log: Sequence[int], sampling: SamplingSettings, allowed: NDArray[np.bool_]
) -> int:
    """The token after a text, by plain logits and the host's rule."""
    seen = np.unique(np.asarray(log)) if sampling.repetition_penalty != 1.0 else ()
    logits = subject.plain(log)
    mask = np.zeros(len(logits), dtype=bool)
    mask[:VOCABULARY] = allowed
    everything = bool(allowed.all())
    return choose(logits, sampling, len(log), seen, None if everything else mask)
