"""What a skill is, and the few text helpers that every checker shares."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One exercise: the skill it belongs to, the user's prompt and a correct reply."""

    skill: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Skill:
    """A family of exercises: `write` draws a prompt and its answer, `judge` decides about any reply to the prompt."""

    name: str
    write: Callable[[random.Random], tuple[str, str]]
    judge: Callable[[str, str], bool]

    def make(self, rng: random.Random) -> Example:
        """Draw one exercise."""
        return Example(self.name, *self.write(rng))

    def check(self, prompt: str, reply: str) -> bool:
        """Whether the reply's final answer is right, worked out anew from the prompt."""
        return self.judge(prompt, reply)


def numbers(text: str) -> list[int]:
    """All whole numbers in the text, in order; a number with a fraction is not taken for one."""
    return [int(found) for found in re.findall(r"(?<![\d.])-?\d+(?!\.?\d)", text)]


def ends_with_number(reply: str, expected: int) -> bool:
    """Whether the last number of the reply is the expected one."""
    return re.findall(r"(?<!\d)-?\d+(?:\.\d+)?", reply)[-1:] == [str(expected)]


def last_clause(reply: str) -> str:
    """The text behind the last colon or full stop within the reply: where a list answer stands."""
    return re.split(r":|\.\s", reply.strip())[-1]


def listed(items: list[int] | list[str]) -> str:
    """The items as prose: separated by commas."""
    return ", ".join(str(item) for item in items)
