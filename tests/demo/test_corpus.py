"""The corpus is deterministic, even over the skills, and its splits are disjoint."""

import ast
from collections import Counter
from itertools import islice

from moa.demo.corpus import examples, messages, split_of, stdlib_prompts, stdlib_text
from moa.demo.skills import SKILLS, Example


def test_examples_are_deterministic_and_depend_on_the_seed() -> None:
    first, again, other = (list(islice(examples("train", seed), 100)) for seed in (1, 1, 2))
    assert first == again != other


def test_skills_are_interleaved_uniformly() -> None:
    drawn = Counter(example.skill for example in islice(examples("heldout", 0), 5 * len(SKILLS)))
    assert drawn == dict.fromkeys(SKILLS, 5)


def test_splits_share_no_prompt() -> None:
    train = {example.prompt for example in islice(examples("train", 0), 4000)}
    heldout = {example.prompt for example in islice(examples("heldout", 0), 1000)}
    assert not train & heldout
    assert len(heldout) > 500, "too few different held-out prompts for a measurement"
    assert all(split_of(prompt) == "heldout" for prompt in heldout)


def test_messages_are_a_chat() -> None:
    chat = messages(Example("parity", "Is 3 odd?", "Yes."))
    assert chat == [{"role": "user", "content": "Is 3 odd?"}, {"role": "assistant", "content": "Yes."}]


def test_stdlib_text_is_deterministic_and_split_by_file() -> None:
    train, heldout = list(islice(stdlib_text("train"), 20)), list(stdlib_text("heldout"))
    assert train == list(islice(stdlib_text("train"), 20))
    assert len(heldout) > 10
    assert not set(train) & set(heldout)


def test_stdlib_prompts_continue_held_out_functions() -> None:
    heldout = "".join(stdlib_text("heldout"))
    for example in islice(stdlib_prompts(lines=6), 20):
        assert example.skill == "code"
        assert example.prompt.count("\n") == 6
        assert example.prompt + example.answer.rstrip("\n") in heldout


def test_stdlib_text_is_python() -> None:
    for text in islice(stdlib_text("train"), 5):
        ast.parse(text)
