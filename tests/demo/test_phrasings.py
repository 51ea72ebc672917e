"""Every kind of task can be asked in many ways, and the held-out ways are not those of training."""

import random
import re

import pytest

from demo.skills import FRESH, SKILLS, TALK, Skill, is_right
from demo.skills.asked import ASKED, asked
from demo.skills.fresh import fresh
from demo.skills.manners import say
from demo.skills.phrasings import PHRASINGS

SKILLS_AND_TALK = [*SKILLS.values(), TALK]


def _plain(text: str) -> str:
    """A way of asking without what may differ by chance: capitals, marks and spaces."""
    return re.sub(r"[^a-z{}]+", " ", text.lower().replace("what's", "what is")).strip()


@pytest.mark.parametrize("kind", PHRASINGS)
def test_no_held_out_way_of_asking_is_one_of_training(kind: str) -> None:
    rng = random.Random(0)
    slots = {
        slot: f"{{{slot}}}" for text in PHRASINGS[kind] for slot in re.findall(r"{(\w+)}", text) if slot != "material"
    }
    said = {_plain(say(rng, text, slots, material)) for material in ("", "{material}")
            for text in PHRASINGS[kind] for _ in range(200)}  # fmt: skip
    assert not said & {_plain(text) for text in ASKED[kind]}


@pytest.mark.parametrize("skill", SKILLS_AND_TALK, ids=lambda skill: skill.name)
def test_a_skill_is_asked_in_twenty_held_out_ways(skill: Skill) -> None:
    examples = list(asked(skill))
    assert examples == list(asked(skill))
    assert len({example.prompt for example in examples}) == len(examples) >= 20
    for example in examples:
        assert "{" not in example.prompt.replace('{"', "")
        assert skill.check(example, example.answer)


def test_training_has_a_dozen_ways_of_every_skill() -> None:
    kinds = {skill.draw(random.Random(seed)).kind for skill in SKILLS.values() for seed in range(20)}
    assert all(len(PHRASINGS[kind]) >= 12 for kind in kinds)
    assert kinds <= set(ASKED)


def test_a_request_stands_in_many_frames() -> None:
    rng = random.Random(0)
    said = {say(rng, "sort these numbers.", {}, "3, 1, 2") for _ in range(500)}
    assert {"Sort these numbers: 3, 1, 2.", "sort these numbers: 3, 1, 2", "Sort these numbers:\n3, 1, 2"} <= said
    assert len(said) > 60
    assert all("3, 1, 2" in text for text in said)


def test_fresh_skills_are_none_of_training() -> None:
    examples = list(fresh(8))
    assert examples == list(fresh(8))
    assert {example.skill for example in examples} == set(FRESH)
    assert not set(FRESH) & {*SKILLS, *PHRASINGS}
    for example in examples:
        assert is_right(example, example.answer)
        assert not is_right(example, "It is 1.")
