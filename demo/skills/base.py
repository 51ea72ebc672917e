"""The classes of skills, and text helpers that all checkers share."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .manners import say
from .phrasings import PHRASINGS


@dataclass(frozen=True)
class Example:
    """One exercise: the skill it belongs to, the user's prompt and a correct reply.

    `facts` are what a free reply is checked for, if the reference answer is not enough.
    """

    skill: str
    prompt: str
    answer: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A task without its wording: a phrasing's slots, the text it is about, and a right answer.

    `kind` names the phrasings that fit (`PHRASINGS`, and `ASKED` for the held-out ones).
    """

    kind: str
    answer: str
    slots: Mapping[str, object] = field(default_factory=dict)
    material: str = ""
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skill:
    """A family of tasks: `draw` makes one, `judge` decides about any reply to it."""

    name: str
    draw: Callable[[random.Random], Task]
    judge: Callable[[Example, str], bool]

    def make(self, rng: random.Random) -> Example:
        """Draw one exercise, in one of the phrasings of training."""
        task = self.draw(rng)
        prompt = say(rng, rng.choice(PHRASINGS[task.kind]), task.slots, task.material)
        return self.exercise(task, prompt)

    def exercise(self, task: Task, prompt: str) -> Example:
        """The task asked in these words."""
        return Example(self.name, prompt, task.answer, task.facts)

    def check(self, example: Example, reply: str) -> bool:
        """Whether the reply's final answer is right; the steps before it do not matter."""
        return self.judge(example, reply)


def numbers(text: str) -> list[int]:
    """All whole numbers in the text, in order; a number with a fraction is not taken for one."""
    return [int(found) for found in re.findall(r"(?<![\d.])-?\d+(?!\.?\d)", text)]


def same_last_number(example: Example, reply: str) -> bool:
    """Whether the reply ends with the number that the reference answer ends with."""
    expected, found = (
        re.findall(r"(?<!\d)-?\d+(?:\.\d+)?", text)[-1:] for text in (example.answer, reply)
    )
    return expected == found


def same_last(pattern: str) -> Callable[[Example, str], bool]:
    """A judge: the last match of the pattern is the reference answer's."""

    def judge(example: Example, reply: str) -> bool:
        return re.findall(pattern, reply)[-1:] == re.findall(pattern, example.answer)[-1:]

    return judge


def same_list(example: Example, reply: str) -> bool:
    """Whether the reply's last clause lists the numbers that the reference answer's lists."""
    return numbers(_last_clause(reply)) == numbers(_last_clause(example.answer))


def _last_clause(reply: str) -> str:
    """The text after the last colon or full stop in the reply, where a list answer is."""
    return re.split(r":|\.\s", reply.strip())[-1]


def listed(items: list[int] | list[str]) -> str:
    """The items as prose: separated by commas."""
    return ", ".join(str(item) for item in items)
