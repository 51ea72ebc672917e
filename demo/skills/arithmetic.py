"""Sums worked step by step, word problems and unit conversion."""

import random

from .base import Skill, Task, same_last, same_last_number
from .words import name, things

LIMIT = 99
"""Results stay within two digits: few enough facts to learn from a small corpus."""


def _apply(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right


def _draw_step(rng: random.Random, total: int, largest: int) -> tuple[str, int]:
    """A sign and an operand that keep the running total between 1 and the limit."""
    signs = [sign for sign, room in (("+", LIMIT - total), ("-", total - 1)) if room >= 2]
    sign = rng.choice(signs)
    room = LIMIT - total if sign == "+" else total - 1
    return sign, rng.randint(1 if rng.random() < 0.1 else 2, min(largest, room))


def _work(total: int, sign: str, operand: int) -> str:
    """One step, written out: tens first and then ones, so that each part is a simple fact."""
    tens, ones = operand // 10 * 10, operand % 10
    if not tens or not ones:
        return f"{total} {sign} {operand} = {_apply(total, sign, operand)}."
    middle = _apply(total, sign, tens)
    return f"{total} {sign} {tens} = {middle} and {middle} {sign} {ones} = {_apply(middle, sign, ones)}."


def add_up(total: int, steps: list[tuple[str, int]]) -> str:
    """The answer that works a sum out, step by step."""
    working = []
    for opening, (sign, operand) in zip(("First,", "Then,", "Then,"), steps, strict=False):
        working.append(f"{opening} {_work(total, sign, operand)}")
        total = _apply(total, sign, operand)
    return " ".join([*working, f"The answer is {total}."])


_SIGNS = ((" + ", " - "),) * 5 + (("+", "-"),) * 3 + ((" plus ", " minus "),) * 4
"""How signs are written in a prompt."""


def _draw_sum(rng: random.Random) -> Task:
    total = rng.randint(10, 80) if rng.random() < 0.8 else rng.randint(1, 97)
    steps = rng.choices((1, 2, 3), (9, 10, 1))[0]
    plus, minus = rng.choice(_SIGNS)
    start, expression, taken = total, str(total), []
    for _ in range(steps):
        sign, operand = _draw_step(rng, total, 39 if steps > 1 else 89)
        expression += f"{plus if sign == '+' else minus}{operand}"
        taken.append((sign, operand))
        total = _apply(total, sign, operand)
    return Task("arithmetic", add_up(start, taken), {"sum": expression})


_GAINS = (
    "buys",
    "finds",
    "gets",
    "buys",
    "finds",
    "gets",
    "receives",
    "wins",
    "collects",
    "picks up",
)
_LOSSES = (
    "loses",
    "sells",
    "gives away",
    "loses",
    "sells",
    "gives away",
    "drops",
    "throws away",
    "hands out",
)


def _draw_word_problem(rng: random.Random) -> Task:
    who, what = name(rng), things(rng)
    start = total = rng.randint(10, 80)
    steps, working = [], []
    for _ in range(rng.choice((1, 2, 2, 2))):
        sign, operand = _draw_step(rng, total, 9)
        verb = rng.choice(_GAINS if sign == "+" else _LOSSES)
        steps.append(f"{verb} {operand}")
        after = _apply(total, sign, operand)
        working.append(f"{who} {verb} {operand}, so {total} {sign} {operand} = {after}.")
        total = after
    answer = " ".join([f"{who} has {start} {what}.", *working, f"The answer is {total}."])
    slots = {
        "name": who,
        "start": start,
        "things": what,
        "steps": rng.choice((" and ", " and ", ", then ")).join(steps),
    }
    return Task("word_problem", answer, slots)


# (large unit, small unit, factor, the small amounts in use)
_UNITS = (
    ("m", "cm", 100, range(10, 100)),
    ("kg", "g", 1000, range(100, 1000, 10)),
    ("km", "m", 1000, range(100, 1000, 10)),
    ("h", "min", 60, range(10, 60)),
    ("weeks", "days", 7, range(1, 7)),
)
_LONG = {
    "m": ("metres", "meters"), "cm": ("centimetres", "centimeters"), "kg": ("kilograms", "kilos"), "g": ("grams",),
    "km": ("kilometres", "kilometers"), "h": ("hours",), "min": ("minutes",),
}  # fmt: skip


def working_units(large: str, small: str, factor: int, many: int, few: int = 0) -> str:
    """The answer that converts so many large units and a few small ones."""
    total = many * factor
    working = f"There are {factor} {small} in 1 {large}, so {many} {large} are {total} {small}."
    if few:
        working += f" {total} + {few} = {total + few}."
    return f"{working} The answer is {total + few} {small}."


def _draw_units(rng: random.Random) -> Task:
    large, small, factor, amounts = rng.choice(_UNITS)
    many, few = rng.randint(2, 9), rng.choice(amounts)
    long = rng.random() < 0.35
    said = {unit: rng.choice(_LONG.get(unit, (unit,))) if long else unit for unit in (large, small)}
    gap = "" if len(large) < 3 and not long and rng.random() < 0.2 else " "
    amount = f"{many}{gap}{said[large]}"
    if rng.random() < 0.75:
        amount += f"{rng.choice((' ', ' ', ' and '))}{few}{gap}{said[small]}"
    else:
        few = 0
    return Task(
        "units",
        working_units(large, small, factor, many, few),
        {"amount": amount, "unit": said[small]},
    )


SKILLS = (
    Skill("arithmetic", _draw_sum, same_last_number),
    Skill("word_problem", _draw_word_problem, same_last_number),
    Skill("units", _draw_units, same_last(r"(?<![\d.])(-?\d+(?:\.\d+)?) ([a-z]+)")),
)
