"""Under a grammar, speculative text is plain text: the mask is a function of the text so far."""

from __future__ import annotations

import json

import jsonschema
import pytest

from moa import demo
from moa.bundle import Bundle
from moa.drafters.attention.model import load_attention
from moa.drafters.body_drafting import BodyDrafting
from moa.drafters.contract import Drafting
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.errors import UsageError
from moa.grammar.spec import Grammar
from moa.graph.load import LoadedGraph
from moa.sampling import SamplingSettings
from moa.target.torch_target import Target
from moa.tree import TreeShape
from testing.speculator import Generation, GenerationSettings, Speculator
from testing.tiny import tiny

KINDS = {
    "name": {"type": "string", "maxLength": 12},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "colour": {"enum": ["red", "green", "blue"]},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
}
PERSON = {
    "type": "object",
    "properties": KINDS,
    "required": list(KINDS),
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.of_schema(PERSON),
    "regex": Grammar("regex", "(yes|no|maybe), [a-z ]{5,30}\\."),
    "choices": Grammar("regex", 'alpha|be"ta|alphabet'),
    "lark": Grammar("lark", 'start: "a" item{1,5} "z"\nitem: /[0-9]{2}/ ";"?'),
}
SAMPLED = SamplingSettings(temperature=1.0, seed=7, top_p=0.95, repetition_penalty=1.1)
PROMPTS = ["Write a person as JSON.\n", "Once upon a time"]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(str(demo.paths().target), slots=4, capacity=512)


def drafter(target: Target, kind: str) -> Drafting:
    model = load_attention(demo.paths().drafter, target.model, target.facts)
    if kind == "torch":
        return BodyDrafting(model, slots=4, capacity=512)
    return OnnxDrafting(model, LoadedGraph.load(Bundle.open(demo.paths().bundle)), slots=4)


def answers(
    target: Target, drafting: Drafting | None, settings: GenerationSettings
) -> list[Generation]:
    prompts = [target.tokenizer(text)["input_ids"] for text in PROMPTS]
    return Speculator(target, drafting).generate(prompts, settings)


@pytest.mark.parametrize("sampling", [SamplingSettings(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_speculative_text_is_plain_text(
    target: Target, name: str, sampling: SamplingSettings
) -> None:
    def settings(shape: TreeShape | None) -> GenerationSettings:
        return GenerationSettings(
            max_new_tokens=120, sampling=sampling, shape=shape, grammar=GRAMMARS[name]
        )

    plain = answers(target, None, settings(None))
    assert {one.finish for one in plain} == {"eos"}
    texts = [target.tokenizer.decode(one.ids, skip_special_tokens=True) for one in plain]
    if name == "schema":
        for text in texts:
            jsonschema.validate(json.loads(text), PERSON)
    if name == "choices":
        assert set(texts) <= {"alpha", 'be"ta', "alphabet"}
    for kind, shape in (("torch", TreeShape()), ("graph", TreeShape.chain(4))):
        fast = answers(target, drafter(target, kind), settings(shape))
        assert [one.ids for one in fast] == [one.ids for one in plain], (kind, shape)
        if name == "schema":
            assert sum(len(one.won) for one in fast) < sum(len(one.won) for one in plain)


def test_a_grammar_needs_a_tokenizer() -> None:
    with pytest.raises(UsageError, match="without a tokenizer"):
        Target.from_model(tiny("llama"), slots=1, capacity=64).grammars.compile(GRAMMARS["regex"])
