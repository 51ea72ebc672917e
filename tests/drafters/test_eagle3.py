"""Others' EAGLE-3 drafters: every layout is read, and drafts what its published forward says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moa.drafters.contract import DraftRequest
from moa.drafters.drafting import Level
from moa.drafters.eagle3.config import Eagle3Config
from moa.drafters.eagle3.model import Eagle3Drafter
from moa.drafters.features import FeatureDrafting
from moa.errors import MoaError
from moa.model.borrowed import SharedWeights
from moa.sampling import SamplingSettings
from moa.target.torch_target import Row, Target
from moa.tree import TreeGrower, TreeShape
from testing.tiny import tiny
from tests.model import published

WORDS = [5, 9, 11, 12, 40, 41, 90, 127]
TEXT = [7, 30, 5, 99, 12, 64, 90, 40, 41, 9, 120, 5]
KNOWN = 7
"""Tokens that the target has run; the next is pending."""


def loaded(
    folder: Path, layout: str, family: str = "llama"
) -> tuple[Target, Eagle3Drafter, published.Weights]:
    """A tiny target that keeps what the drafter in `folder` reads, the drafter, and its weights."""
    model = tiny(family)
    weights = published.write(folder, layout, model, WORDS)
    target = Target.from_model(model, slots=2, capacity=64)
    drafter = Eagle3Drafter.load(folder, target.facts, SharedWeights.of(model))
    target.tap(drafter.config.taps)
    return target, drafter, weights


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layout", published.LAYOUTS)
@torch.inference_mode()
def test_drafting_is_the_published_forward(layout: str, family: str, tmp_path: Path) -> None:
    target, drafter, weights = loaded(tmp_path, layout, family)
    states = tiny(family)(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    # hidden_states[i] is the input of layer i.
    taps = (2, 2, 1) if layout == "authors" else (1, 2, 3)
    features = published.fused(weights, layout, torch.cat([states[tap][0] for tap in taps], -1))
    slot = target.cache.acquire()
    drafting = FeatureDrafting(drafter, slots=2, capacity=64)
    place = drafting.open()
    for start, stop in (
        (0, 4),
        (4, KNOWN),
    ):  # a piece of the prompt, and an accepted draft beside a wrong node
        tokens = [*TEXT[start:stop], 3]
        step = target.forward([Row(slot, tokens, [*range(-1, stop - start - 1), 0])])
        path = range(stop - start)
        target.commit(step, 0, path)
        drafting.take(place, TEXT[start:stop], step.tapped(0, path))
    request = DraftRequest(place, TEXT[KNOWN], TreeShape.chain(4), SamplingSettings())
    grower = TreeGrower(TEXT[KNOWN], request.shape)
    fed = features[:KNOWN]
    for at in range(KNOWN, KNOWN + 4):
        mine = drafting.logits(Level([request], [grower], drafting.pool, drafting.device))[0, 0]
        theirs, again = published.forward(weights, layout, torch.tensor(TEXT[1 : at + 1]), fed)
        torch.testing.assert_close(mine, theirs[-1], atol=1e-4, rtol=1e-4)
        fed = torch.cat([fed, again[-1:]])
        grower.expand(np.array([[TEXT[at + 1]]]), np.zeros((1, 1)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.inference_mode()
def test_drafts_are_tokens_of_the_target(temperature: float, tmp_path: Path) -> None:
    _, drafter, _ = loaded(tmp_path, "specforge")
    drafting = FeatureDrafting(drafter, slots=1, capacity=64)
    place = drafting.open()
    drafting.take(place, [7], torch.zeros(1, 3 * 64))
    shape = TreeShape(breadth=8, depth=3, nodes=20)
    (tree,) = drafting.draft(
        [DraftRequest(place, 30, shape, SamplingSettings(temperature=temperature, seed=2))]
    )
    assert len(tree) == 21
    assert set(tree.tokens[1:]) <= set(WORDS)


def test_a_layer_is_counted_as_the_layout_counts_it(tmp_path: Path) -> None:
    target = Target.from_model(tiny("llama", num_hidden_layers=12))
    for layout, taps in (
        ("authors", (2, 6, 9)),
        ("specforge", (1, 2, 3)),
        ("speculators", (1, 2, 3)),
    ):
        published.write(tmp_path / layout, layout, tiny("llama"), WORDS)
        assert Eagle3Config.read(tmp_path / layout, target.facts).taps == taps


@torch.inference_mode()
def test_what_a_checkpoint_leaves_out_is_the_targets(tmp_path: Path) -> None:
    model = tiny("llama", hidden_size=published.WIDTH)
    published.write(tmp_path, "specforge", model, range(128))
    kept = load_file(tmp_path / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"):
        del kept[name]
    save_file(kept, tmp_path / "model.safetensors")
    target = Target.from_model(model)
    drafter = Eagle3Drafter.load(tmp_path, target.facts, SharedWeights.of(model))
    assert drafter.draft_tokens is None
    assert drafter.shared.embedding.data_ptr() == target.embedding_weight.data_ptr()
    assert drafter.shared.head.data_ptr() == target.head_weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 2}, "one Llama layer"),
        ({"target_hidden_size": 32}, "another target"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"the target has 0\.\.3"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "cannot be read"),
        ({"rope_scaling": "all"}, "cannot be read"),
        ({"target_hidden_size": float("inf")}, "cannot be read"),
        ({"intermediate_size": 10**12}, "by its config"),
        ({"fc_norm": True}, "lack fc_norm"),
        ({"model_type": "qwen3"}, "not that of an EAGLE-3"),
        ({"num_key_value_heads": 3}, "do not fit"),
        ({"hidden_size": 64}, "its head must have the shape"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    model = tiny("llama")
    published.write(tmp_path, "specforge", model, WORDS)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    facts = Target.from_model(model).facts
    with pytest.raises(MoaError, match=says):
        Eagle3Drafter.load(tmp_path, facts, SharedWeights.of(model))


def test_words_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    facts = Target.from_model(model).facts
    shared = SharedWeights.of(model)
    published.write(tmp_path, "specforge", model, WORDS)
    stored = load_file(tmp_path / "model.safetensors")
    # Copies: what is read may be a view of the file that is written anew here.
    kept = {name: value.clone() for name, value in stored.items()}
    for name, value, says in (
        ("d2t", kept["d2t"] + 100, "leaves the target's vocabulary"),
        ("d2t", kept["d2t"].float(), "whole numbers"),
        ("t2d", ~kept["t2d"], "do not describe the same"),
    ):
        save_file(kept | {name: value}, tmp_path / "model.safetensors")
        with pytest.raises(MoaError, match=says):
            Eagle3Drafter.load(tmp_path, facts, shared)
    torch.save({"fc.weight": print}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MoaError, match="is a pickle, which is never read"):
        Eagle3Drafter.load(tmp_path, facts, shared)
