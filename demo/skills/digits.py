"""Looking at digits: comparing two numbers, odd or even."""

import random

from .base import Skill, Task, same_last, same_last_number

_PLACES = {1: ("ones",), 2: ("tens", "ones"), 3: ("hundreds", "tens", "ones")}
_WORDS = {
    "larger": ("larger", "larger", "bigger", "greater", "higher"),
    "smaller": ("smaller", "smaller", "lower"),
}


def larger_by(left: int, right: int, wanted: str) -> str:
    """The answer that compares two numbers place by place; a shorter number has a 0 in the first."""
    digits = max(len(str(left)), len(str(right)))
    working = ""
    for place, one, other in zip(
        _PLACES[digits], f"{left:0{digits}}", f"{right:0{digits}}", strict=True
    ):
        if one != other:
            working += f"{left} has {one} {place} and {right} has {other} {place}."
            break
        working += f"Both have {one} {place}. "
    chosen = max(left, right) if wanted == "larger" else min(left, right)
    return f"{working} The {wanted} number is {chosen}."


def _draw_compare(rng: random.Random) -> Task:
    digits = rng.choices((2, 3), (4, 1))[0]
    left, right = rng.sample(range(10 ** (digits - 1), 10**digits), 2)
    wanted = rng.choice(("larger", "smaller"))
    slots = {"wanted": rng.choice(_WORDS[wanted]), "left": left, "right": right}
    return Task("compare", larger_by(left, right, wanted), slots)


def _draw_parity(rng: random.Random) -> Task:
    digits = rng.choices((1, 2, 3, 4), (1, 3, 6, 1))[0]
    value = rng.randint(10 ** (digits - 1), 10**digits - 1)
    kind = "odd" if value % 2 else "even"
    answer = f"The number {value} ends in {value % 10}. The digit {value % 10} is {kind}, so {value} is {kind}."
    return Task("parity", answer, {"value": value})


SKILLS = (
    Skill("compare", _draw_compare, same_last_number),
    Skill("parity", _draw_parity, same_last(r"\b(odd|even)\b")),
)
