"""The corpus is the same everywhere, even over the skills, asked in many ways, and its splits are
disjoint."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from demo import natural
from demo.corpus import KINDS, examples, mixed, split_of, stdlib_prompts, stdlib_text, talk
from demo.corpus import natural as natural_prompts
from demo.skills import FRESH, SKILLS, TALK, Skill, is_right
from demo.skills.asked import ASKED, asked
from demo.skills.fresh import fresh
from demo.skills.manners import say
from demo.skills.phrasings import PHRASINGS
from moa.errors import UsageError

SPLITS = "train", "heldout"
DRAWN: dict[str, tuple[Callable[[str], Iterator[Any]], int]] = {
    "examples": (lambda split: examples(split, 1), 2000),
    "standard library": (stdlib_text, 20),
    **{kind: (lambda split, kind=kind: natural_prompts(kind, split), 40) for kind in KINDS},
}
"""How a split is drawn from, and how many of it are looked at."""


@pytest.mark.parametrize(("drawn", "count"), DRAWN.values(), ids=DRAWN)
def test_a_split_is_the_same_again_and_shares_nothing_with_the_other(
    drawn: Callable[[str], Iterator[Any]], count: int
) -> None:
    train, heldout = (
        [getattr(one, "prompt", one) for one in islice(drawn(split), count)] for split in SPLITS
    )
    assert train == [getattr(one, "prompt", one) for one in islice(drawn("train"), count)]
    assert not set(train) & set(heldout)
    assert len(set(heldout)) > 0.5 * len(heldout) >= 5


def test_examples_depend_on_the_seed_are_even_over_the_skills_and_split_by_prompt() -> None:
    heldout = list(islice(examples("heldout", 0), 1000))
    assert heldout != list(islice(examples("heldout", 1), 1000))
    assert Counter(example.skill for example in heldout[: 5 * len(SKILLS)]) == dict.fromkeys(
        SKILLS, 5
    )
    assert len({example.prompt for example in heldout}) > 500, (
        "too few different ones for a measurement"
    )
    assert all(split_of(example.prompt) == "heldout" for example in heldout)


def test_prompts_are_continued_by_their_text() -> None:
    heldout = "".join(stdlib_text("heldout"))
    for example in islice(stdlib_prompts(lines=6), 20):
        assert example.prompt.count("\n") == 6
        assert example.prompt + example.answer.rstrip("\n") in heldout
    assert list(natural.passages(["word " * 100, "short"])) == [
        ("word " * 32 + "word", " word" * 67 + " ")
    ]
    code = "def f():\n" + "    x = 1\n" * 20
    assert ["".join(parts) for parts in natural.functions([code, "not python ("])] == [code]


def test_small_talk_is_of_every_kind_and_a_mixed_request_has_two_answers() -> None:
    assert len({example.answer for example in islice(talk(0), 400)}) == 8
    for example in islice(mixed("heldout", 0), 20):
        assert re.match(r"1\. .*\n2\. ", example.answer, re.DOTALL)


def test_natural_text_is_prose_of_packages_that_take_turns() -> None:
    assert not set(natural.TRAINED) & set(natural.HELD_OUT)
    for text in islice(natural.english("heldout"), 30):
        assert len(text) >= 240
        assert ">>>" not in text
        assert not text.lstrip().startswith(("def ", "import "))
    first = list(islice(natural.code("heldout"), len(natural.HELD_OUT)))
    assert all(next(natural.files(package)) in first for package in natural.HELD_OUT)
    with pytest.raises(UsageError, match="no_such_package is not installed"):
        next(natural.files("no_such_package"))


def _plain(text: str) -> str:
    """A way of asking without what may differ by chance: capitals, marks and spaces."""
    return re.sub(r"[^a-z{}]+", " ", text.lower().replace("what's", "what is")).strip()


@pytest.mark.parametrize("kind", PHRASINGS)
def test_no_held_out_way_of_asking_is_one_of_training(kind: str) -> None:
    rng = random.Random(0)
    slots = {
        slot: f"{{{slot}}}"
        for text in PHRASINGS[kind]
        for slot in re.findall(r"{(\w+)}", text)
        if slot != "material"
    }
    said = {
        _plain(say(rng, text, slots, material))
        for material in ("", "{material}")
        for text in PHRASINGS[kind]
        for _ in range(200)
    }
    assert not said & {_plain(text) for text in ASKED[kind]}


@pytest.mark.parametrize("skill", [*SKILLS.values(), TALK], ids=lambda skill: skill.name)
def test_a_skill_is_asked_in_a_dozen_ways_and_in_twenty_held_out_ones(skill: Skill) -> None:
    found = list(asked(skill))
    assert found == list(asked(skill))
    assert len({example.prompt for example in found}) == len(found) >= 20
    for example in found:
        assert "{" not in example.prompt.replace('{"', "")
        assert skill.check(example, example.answer)
    kinds = (
        {skill.draw(random.Random(seed)).kind for seed in range(20)} if skill is not TALK else set()
    )
    assert all(len(PHRASINGS[kind]) >= 12 for kind in kinds)
    assert kinds <= set(ASKED)


def test_a_request_stands_in_many_frames() -> None:
    rng = random.Random(0)
    said = {say(rng, "sort these numbers.", {}, "3, 1, 2") for _ in range(500)}
    assert {
        "Sort these numbers: 3, 1, 2.",
        "sort these numbers: 3, 1, 2",
        "Sort these numbers:\n3, 1, 2",
    } <= said
    assert len(said) > 60
    assert all("3, 1, 2" in text for text in said)


def test_fresh_skills_are_none_of_training() -> None:
    found = list(fresh(8))
    assert found == list(fresh(8))
    assert {example.skill for example in found} == set(FRESH)
    assert not set(FRESH) & {*SKILLS, *PHRASINGS}
    for example in found:
        assert is_right(example, example.answer)
        assert not is_right(example, "It is 1.")
