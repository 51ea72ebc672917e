"""Every skill accepts its own answers, also in other words, and rejects wrong final answers."""

import random
import re

import pytest

from demo.skills import SKILLS, TALK, Example, Skill
from demo.skills.words import WEEKDAYS

SEEDS = range(200)


def _other_last(pattern: str, text: str, other: dict[str, str] | None = None) -> str:
    """The text with its last match replaced: by its counterpart, or, for a number, by the next one."""
    *_, last = re.finditer(pattern, text)
    new = other[last[0]] if other else str(int(last[0]) + 1)
    return text[: last.start()] + new + text[last.end() :]


def _wrong(example: Example) -> str:
    """The reference answer with another final number, day, word or name."""
    answer = example.answer
    match example.skill:
        case "weekday":
            following = dict(zip(WEEKDAYS, WEEKDAYS[1:] + WEEKDAYS[:1], strict=True))
            return _other_last("|".join(WEEKDAYS), answer, following)
        case "parity":
            return _other_last("odd|even", answer, {"odd": "even", "even": "odd"})
        case "edit":
            return re.sub(r"\w+\.$", "moon.", answer)
        case "story":
            hero = example.facts[0]
            return answer.replace(hero, "Max" if hero != "Max" else "Mia")
    return _other_last(r"\d+", answer)


@pytest.mark.parametrize("skill", SKILLS.values(), ids=SKILLS)
def test_only_right_answers_pass(skill: Skill) -> None:
    first, *others = made = [skill.make(random.Random(seed)) for seed in SEEDS]
    for example in made:
        assert skill.check(example, example.answer), example
        assert not skill.check(example, _wrong(example)), example
        for unrelated in ("", "I do not know.", "```python\nimport os\n```", "{"):
            assert not skill.check(example, unrelated)
    accepted = [other for other in others if skill.check(first, other.answer)]
    assert len(accepted) < (140 if skill.name == "parity" else 70)


@pytest.mark.parametrize(
    ("name", "reference", "reply", "right"),
    [
        ("arithmetic", "The answer is 34.", "34", True),
        ("arithmetic", "The answer is 34.", "It is 34.5", False),
        ("units", "The answer is 130 min.", "That makes 130 min.", True),
        ("units", "The answer is 130 min.", "That makes 130 h.", False),
        ("date", "The date is 5 May.", "It is 5 May.", True),
        ("date", "The date is 5 May.", "It is 5 June.", False),
        ("sort", "Last is 41. Sorted: 12, 30, 41.", "12, 30, 41", True),
        ("sort", "Last is 41. Sorted: 12, 30, 41.", "12, 41, 30", False),
        ("filter", "12: no. The result is: 41.", "Only 41.", True),
        ("filter", "12: no. The result is: 41.", "41, 12", False),
        (
            "json",
            '{"name": "Mia", "age": 9, "city": "Rome"}',
            'Here: {"city": "Rome", "name": "Mia", "age": 9}',
            True,
        ),
        (
            "json",
            '{"name": "Mia", "age": 9, "city": "Rome"}',
            '{"city": "Oslo", "name": "Mia", "age": 9}',
            False,
        ),
        ("json", '{"name": "Mia", "age": 9, "city": "Rome"}', "{" * 100_000 + "}", False),
        ("edit", "the sentence is: The old dog sleeps.", "The old dog sleeps.", True),
        ("edit", "the sentence is: The old dog sleeps.", "The old cat sleeps.", False),
    ],
)
def test_the_final_answer_decides_not_the_wording(
    name: str, reference: str, reply: str, right: bool
) -> None:
    assert SKILLS[name].check(Example(name, "", reference), reply) is right


def _function(line: str, call: str = "add_3(4)", shown: str = "7") -> str:
    return (
        f'def add_3(x):\n    """Add.\n\n    >>> {call}\n    {shown}\n    """\n    return {line}\n'
    )


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (_function("3 + x"), True),
        (f"Sure:\n```python\n{_function('x + 3')}```", True),
        (_function("x + 3", shown="8"), False),
        (_function("7"), False),
        (_function("x + 3", call="print(7)"), False),
        (_function("__import__('os').getpid()"), False),
        (_function("x.__class__"), False),
        (_function("9 ** 9 ** 9 ** 9"), False),
        (_function("y + 3"), False),
        ("def add_3(x):\n    return x + 3\n", False),
        ("import os\n" + _function("x + 3"), False),
    ],
)
def test_functions_are_run_only_when_harmless(reply: str, right: bool) -> None:
    asked = Example("function", "Write add_3.", "", facts=("add", "3"))
    assert SKILLS["function"].check(asked, reply) is right


def test_a_story_is_about_its_own_people_alone() -> None:
    asked = Example("story", "", "", facts=("Ada", "fox", "garden"))
    told = "Ada went to the garden. There Ada met a {}. They were good friends."
    found = [
        SKILLS["story"].check(asked, told.format(animal))
        for animal in ("fox", "bear", "fox with Ruth")
    ]
    assert found == [True, False, False]


def test_small_talk_says_what_it_cannot() -> None:
    for seed in SEEDS:
        example = TALK.make(random.Random(seed))
        assert TALK.check(example, example.answer)
        assert not TALK.check(example, "It is Paris.")
