"""Looking at digits: comparing two numbers, odd or even."""

import random
import re

from .base import Skill, ends_with_number, numbers

_COMPARE_PROMPTS = (
    "Which number is {}, {} or {}?",
    "Which of the two is {}, {} or {}?",
    "Pick the {} one of {} and {}.",
)


def _write_compare(rng: random.Random) -> tuple[str, str]:
    left, right = rng.sample(range(10, 100), 2)
    wanted = rng.choice(("larger", "smaller"))
    prompt = rng.choice(_COMPARE_PROMPTS).format(wanted, left, right)
    place, divisor = ("tens", 10) if left // 10 != right // 10 else ("ones", 1)
    working = "" if place == "tens" else f"Both have {left // 10} tens. "
    working += f"{left} has {left // divisor % 10} {place} and {right} has {right // divisor % 10} {place}."
    chosen = max(left, right) if wanted == "larger" else min(left, right)
    return prompt, f"{working} The {wanted} number is {chosen}."


def _judge_compare(prompt: str, reply: str) -> bool:
    return ends_with_number(reply, max(numbers(prompt)) if " larger" in prompt else min(numbers(prompt)))


_PARITY_PROMPTS = ("Is {} odd or even?", "Tell me whether {} is even or odd.", "Is the number {} even or odd?")


def _parity(value: int) -> str:
    return "odd" if value % 2 else "even"


def _write_parity(rng: random.Random) -> tuple[str, str]:
    value = rng.randint(100, 999)
    kind = _parity(value)
    answer = f"The number {value} ends in {value % 10}. The digit {value % 10} is {kind}, so {value} is {kind}."
    return rng.choice(_PARITY_PROMPTS).format(value), answer


def _judge_parity(prompt: str, reply: str) -> bool:
    return re.findall(r"\b(odd|even)\b", reply)[-1:] == [_parity(numbers(prompt)[0])]


SKILLS = (
    Skill("compare", _write_compare, _judge_compare),
    Skill("parity", _write_parity, _judge_parity),
)
