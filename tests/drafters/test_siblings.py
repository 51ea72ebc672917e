"""Siblings whose layers differ, drafting in torch: drafts are what the library's own model says."""

from __future__ import annotations

import numpy as np
import pytest

from moa.drafters.contract import DraftRequest
from moa.drafters.drafting import TorchDrafting
from moa.drafters.sibling.config import SiblingConfig
from moa.drafters.sibling.drafting import MixedDrafting
from moa.drafters.sibling.model import SiblingDrafter
from moa.model.borrowed import Sibling
from moa.sampling import SamplingSettings
from moa.target.families import per_layer_width
from moa.target.loading import prepare
from moa.tree import TreeShape
from testing.tiny import available, tiny
from tests.target.trees import plain_logits, reference

FAMILIES = [name for name in ("gemma4", "gemma4 dense", "lfm2", "qwen3_5") if available(name)]
CHAIN = TreeShape.chain(5, min_score=-1000.0)
GREEDY = SamplingSettings()


def drafting(family: str, slots: int = 3) -> TorchDrafting:
    model = tiny(family)
    facts = prepare(model)
    body = Sibling(model)
    config = SiblingConfig.of(facts, body.memory, per_layer_width(model.config))
    drafter = SiblingDrafter(config, body, facts.vocab_size).eval()
    found = drafter.drafting(slots=slots, capacity=96, scratch=24)
    assert isinstance(found, MixedDrafting)
    return found


def likeliest(family: str, ids: list[int], count: int) -> list[int]:
    """The model's own greedy continuation, the whole text computed anew for each token."""
    text = list(ids)
    for _ in range(count):
        text.append(int(plain_logits(reference(family), text).argmax()))
    return text[len(ids) :]


def draft(at_work: TorchDrafting, slots: list[int], pending: list[int]) -> list[list[int]]:
    requests = [
        DraftRequest(slot, token, CHAIN, GREEDY, None)
        for slot, token in zip(slots, pending, strict=True)
    ]
    return [tree.tokens[1:] for tree in at_work.draft(requests)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_of_several_texts_are_the_models_own(family: str) -> None:
    """Also behind rejected drafts, of texts of different lengths, beyond windows."""
    at_work = drafting(family)
    rng = np.random.default_rng(1)
    texts = [rng.integers(4, 128, length).tolist() for length in (3, 11, 26)]
    slots = [at_work.open() for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        at_work.read(slot, text[:-1])
    for _ in range(3):
        found = draft(at_work, slots, [text[-1] for text in texts])
        assert found == [likeliest(family, text, 5) for text in texts]
        for slot, text, tokens in zip(slots, texts, found, strict=True):
            kept = int(rng.integers(0, 6))
            more = [*tokens[:kept], int(rng.integers(4, 128))]
            at_work.read(slot, [text[-1], *more[:-1]])
            text += more
    for slot in slots:
        at_work.close(slot)
    fresh = at_work.open()
    at_work.read(fresh, texts[0][:-1])
    assert draft(at_work, [fresh], texts[0][-1:]) == [likeliest(family, texts[0], 5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_where_layers_keep_running_states_a_tree_is_a_chain(family: str) -> None:
    at_work = drafting(family)
    slot = at_work.open()
    at_work.read(slot, [5, 6, 7])
    shape = TreeShape(breadth=3, depth=3, nodes=12, min_score=-1000.0)
    (tree,) = at_work.draft([DraftRequest(slot, 8, shape, GREEDY, None)])
    is_chain = tree.parents == list(range(-1, len(tree) - 1))
    assert is_chain == (family in ("lfm2", "qwen3_5"))
    if not is_chain:  # each branch scores as its path does
        for node in range(1, len(tree)):
            path = [tree.tokens[node]]
            at = tree.parents[node]
            while at > 0:
                path.insert(0, tree.tokens[at])
                at = tree.parents[at]
            text = [5, 6, 7, 8]
            score = 0.0
            for token in path:
                logp = plain_logits(reference(family), text).log_softmax(-1)
                score += float(logp[token])
                text.append(token)
            assert score == pytest.approx(tree.scores[node], abs=1e-3)
    assert at_work.known(slot) == 3
