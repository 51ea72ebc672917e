"""The everyday questions are judged strictly and never trained on; the plain turns' answers are
right."""

import re
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from demo import corpus
from demo.everyday import EVERYDAY, right_sum, sums
from demo.newcomers import NEWCOMERS
from demo.questions import Question, holds
from demo.recipe import COURSES
from demo.skills import Example
from demo.skills.talk import DECLINED
from demo.strangers import STRANGERS
from demo.train import turns

BY_PROMPT = {question.prompt: question for question in (*EVERYDAY, *STRANGERS, *NEWCOMERS)}
DOUBLE = "Write a Python function that doubles a number."
_JSON_REPLY = '{"name": "Anna", "age": 30}'


def test_there_are_three_lists_of_sixty_different_questions() -> None:
    for questions in (EVERYDAY, STRANGERS, NEWCOMERS):
        assert len(questions) == len({asked.prompt for asked in questions}) == 60


@pytest.mark.parametrize(
    ("prompt", "reply", "acceptable"),
    [
        ("What is 3+4?", "First, 3 + 4 = 7. The answer is 7.", True),
        ("What is 3+4?", "First, 3 + 4 = 6. The answer is 6.", False),
        ("What is 3+4?", "The answer is 17.", False),
        (
            "2+2",
            "I only add and subtract, with results up to 99, so I cannot work this out.",
            False,
        ),
        (
            "How many cm are in 3 meters?",
            "There are 100 cm in 1 m, so 3 m are 300 cm. The answer is 300 cm.",
            True,
        ),
        ("How many cm are in 3 meters?", "There are 300 cm. The answer is 310 cm.", False),
        ("Write JSON for a person named Anna who is 30 years old", _JSON_REPLY, True),
        ("Tell me a short story", "Ada met a fox. They shared a map. They were friends.", True),
        ("Tell me a short story", DECLINED, False),
        ("Tell me a joke", DECLINED, True),
        ("Tell me a joke", "Counting: 1 joke. The answer is 1.", False),
        ("What is 8 plus 7?", "First, 8 + 7 = 15. The answer is 15.", True),
        ("What is 8 plus 7?", "The answer is 115.", False),
        ("What is 8 plus 7?", DECLINED, False),
        ("What is 2 plus 2 plus 2?", DECLINED, True),
        (
            "Can you write me a little story?",
            "Ada met a fox. They shared a map. They were friends.",
            True,
        ),
        ("Can you write me a little story?", "A fox. A fox fox fox fox. The end.", False),
        ("Write JSON with name Eve and age 30.", '{"name": "Eve", "age": 30}', True),
        ("Write JSON with name Eve and age 30.", '{"name": "Eve", "age": 3', False),
        (DOUBLE, "```python\ndef double(x):\n    return x * 2\n```", True),
        (DOUBLE, "```python\ndef double(x):\n    return x + 2\n```", False),
        (DOUBLE, "```python\ndef double(x):\n    return __import__('os')\n```", False),
        ("Wie spät ist es?", DECLINED, True),
        ("Wie spät ist es?", "The answer is 12.", False),
        ("???", "I cannot clearly clearly clearly clearly clearly", False),
    ],
)
def test_a_reply_is_judged(prompt: str, reply: str, acceptable: bool) -> None:
    assert BY_PROMPT[prompt].acceptable(reply) is acceptable


def test_a_listed_skill_must_not_be_refused_even_where_the_pattern_fits() -> None:
    assert not Question("sum?", holds("7")).acceptable("I cannot work out 7")


def test_all_hundred_sums_are_asked_and_the_last_number_counts() -> None:
    asked = sums("{a}+{b}")
    assert len({prompt for prompt, _ in asked}) == 100
    assert all(eval(prompt) == total for prompt, total in asked)
    assert right_sum(12, "First, 5 + 7 = 12. The answer is 12.")
    assert not right_sum(12, "First, 5 + 7 = 12. The answer is 2.")
    assert not right_sum(12, "I cannot do this.")


def test_no_everyday_question_is_trained_on() -> None:
    drawn = {example.prompt for example in islice(turns(COURSES[-1].mix), 6000)}
    assert len(drawn) > 4000
    assert not drawn & set(BY_PROMPT)


@pytest.mark.parametrize("turns_of", [corpus.plain, corpus.wider])
def test_plain_sums_have_right_answers(turns_of: Callable[[int], Iterator[Example]]) -> None:
    """What the answer works out is what the prompt asks for."""
    checked = 0
    for example in islice(turns_of(0), 4000):
        asked = re.search(r"\d+(?: ?[+-] ?\d+)+", example.prompt)
        if asked and example.answer.startswith("First"):
            assert right_sum(eval(asked[0]), example.answer), example
            checked += 1
    assert checked > 50
