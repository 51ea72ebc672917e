"""Models of no known family: plain ones run by the library, others are refused with the reason; and
the language model of a folder that takes pictures, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from moa.errors import UnsupportedModelError
from moa.target.contract import Node
from moa.target.families import FAMILIES
from moa.target.loading import TAKES_PARTS, load_model, prepare, read_facts, read_partial_target
from moa.target.memory_plan import LoadOptions, plan_memory
from moa.target.rows import Row
from moa.target.torch_target import Target
from testing.tiny import available, tiny, tiny_config, tiny_tokenizer
from tests.target.trees import random_tree, tree_logits

PLAIN = ("olmo2", "starcoder2", "arcee")
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "cohere": ({"logit_scale": 0.0625}, "in pieces it says something else"),
    "gpt2": ({}, "does not say|no decoder of layers"),
    "gpt_neox": ({}, "does not say|keeps something else|no decoder of layers"),
    "falcon_h1": ({}, "keeps something else|running state|differ"),
}


@pytest.mark.parametrize("family", [name for name in PLAIN if available(name)])
def test_a_plain_model_of_an_unknown_family_verifies_trees(family: str) -> None:
    assert family not in FAMILIES
    how = {"sliding_window": None} if family == "starcoder2" else {}
    model = tiny(family, **how)
    target = Target.from_model(model, slots=2, capacity=64)
    assert target.capabilities.trees
    rng = np.random.default_rng(1)
    ids = rng.integers(4, 128, 20).tolist()
    slot = target.cache.acquire()
    target.commit(target.forward([Row.chain(slot, ids)]), 0, range(20))
    tokens, parents = random_tree(rng, 10)
    step = target.forward([Row(slot, tokens, parents, "all")])
    found = step.host_logits([Node(0, node) for node in range(10)])
    wanted = tree_logits(model, ids, tokens, parents).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("family", [name for name in OTHERS if available(name)])
def test_another_is_refused_with_the_reason(family: str) -> None:
    settings, reason = OTHERS[family]
    model = tiny(family, **settings)
    with pytest.raises(UnsupportedModelError, match=reason) as refused:
        Target.from_model(model, capacity=64)
    assert "\n" not in str(refused.value)


def test_windows_of_an_unknown_family_are_refused() -> None:
    if not available("starcoder2"):
        pytest.skip("this release of transformers does not have it")
    with pytest.raises(UnsupportedModelError, match="look through a window"):
        prepare(AutoModelForCausalLM.from_config(tiny_config("starcoder2", sliding_window=8)))


@pytest.fixture(params=["gemma3", "qwen3_5"])
def with_pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of a model that takes pictures, too."""
    family = request.param
    if not available(family) or not TAKES_PARTS:
        pytest.skip("this release of transformers does not have it")
    text = tiny_config(family).to_dict()
    eyes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    if family == "gemma3":
        eyes |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    else:
        eyes |= {"depth": 1, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    config = AutoConfig.for_model(family, text_config=text, vision_config=eyes)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).eval().save_pretrained(tmp_path)
    tiny_tokenizer(128).save_pretrained(tmp_path)
    return tmp_path


def test_the_language_model_of_a_folder_with_pictures_is_a_target(with_pictures: Path) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(with_pictures).eval()
    ids = np.random.default_rng(2).integers(4, 128, 12).tolist()
    with torch.inference_mode():
        wanted = whole(input_ids=torch.tensor([ids])).logits[0].float().numpy()
    target = Target.load(with_pictures, capacity=32)
    slot = target.cache.acquire()
    step = target.forward([Row.chain(slot, ids, "all")])
    found = step.host_logits([Node(0, node) for node in range(12)])
    np.testing.assert_allclose(found, wanted[:, : found.shape[1]], atol=1e-4)
    facts, _ = read_facts(with_pictures)
    assert facts.family.endswith("_text")
    assert facts.weights_id == load_model(with_pictures).facts.weights_id
    plan = plan_memory(str(with_pictures), LoadOptions(capacity=32))
    text_numbers = sum(weight.numel() for weight in target.model.parameters())
    assert plan is not None
    assert plan.weights == pytest.approx(4 * text_numbers, rel=0.1), "pictures are not loaded"
    part = read_partial_target(with_pictures)
    assert torch.equal(part.model.get_input_embeddings().weight, target.embedding_weight)
