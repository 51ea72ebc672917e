"""The corpus is deterministic, even over the skills, and its splits are disjoint."""

from collections import Counter
from itertools import islice

from demo.corpus import KINDS, examples, mixed, natural, split_of, stdlib_prompts, stdlib_text, talk
from demo.skills import SKILLS


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


def test_small_talk_is_deterministic_and_of_every_kind() -> None:
    said = list(islice(talk(0), 400))
    assert said == list(islice(talk(0), 400))
    assert len({example.answer for example in said}) == 8


def test_a_mixed_request_has_two_tasks_and_two_answers() -> None:
    for example in islice(mixed("heldout", 0), 20):
        assert example.answer.startswith("1. ")
        assert "\n2. " in example.answer


def test_natural_text_is_held_out_by_package() -> None:
    for kind in KINDS:
        prompts = [example.prompt for example in islice(natural(kind, "heldout"), 40)]
        assert len(set(prompts)) == 40, f"one hundred prompts in all need 40 of {kind}"
        assert not set(prompts) & {example.prompt for example in islice(natural(kind, "train"), 40)}
