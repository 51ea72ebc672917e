"""Sums worked step by step, word problems and unit conversion."""

import random
import re

from .base import Skill, ends_with_number, numbers
from .words import NAMES, THINGS

_LIMIT = 99  # results stay within two digits: few enough facts to be learnt from a small corpus

_SUM_PROMPTS = ("What is {}?", "Calculate {}.", "Work out {} step by step.")


def _apply(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right


def _draw_step(rng: random.Random, total: int, largest: int) -> tuple[str, int]:
    """A sign and an operand that keep the running total between 1 and the limit."""
    signs = [sign for sign, room in (("+", _LIMIT - total), ("-", total - 1)) if room >= 2]
    sign = rng.choice(signs)
    room = _LIMIT - total if sign == "+" else total - 1
    return sign, rng.randint(2, min(largest, room))


def _work(total: int, sign: str, operand: int) -> str:
    """The step written out: tens first and then ones, so that each part is a simple fact."""
    tens, ones = operand // 10 * 10, operand % 10
    if not tens or not ones:
        return f"{total} {sign} {operand} = {_apply(total, sign, operand)}."
    middle = _apply(total, sign, tens)
    return f"{total} {sign} {tens} = {middle} and {middle} {sign} {ones} = {_apply(middle, sign, ones)}."


def _write_sum(rng: random.Random) -> tuple[str, str]:
    total = rng.randint(10, 80)
    expression, working = str(total), []
    for opening in ("First,", "Then,"):
        sign, operand = _draw_step(rng, total, 39)
        expression += f" {sign} {operand}"
        working.append(f"{opening} {_work(total, sign, operand)}")
        total = _apply(total, sign, operand)
    answer = " ".join([*working, f"The answer is {total}."])
    return rng.choice(_SUM_PROMPTS).format(expression), answer


def _judge_sum(prompt: str, reply: str) -> bool:
    terms = re.findall(r"[+-]? ?\d+", prompt)
    return ends_with_number(reply, sum(int(term.replace(" ", "")) for term in terms))


_GAINS = ("buys", "finds", "gets")
_LOSSES = ("loses", "sells", "gives away")
_STORY_PROMPTS = (
    "{name} has {start} {things}. {name} {steps}. How many {things} does {name} have now?",
    "{name} starts with {start} {things} and then {steps}. How many {things} does {name} have in the end?",
)


def _write_word_problem(rng: random.Random) -> tuple[str, str]:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    start = total = rng.randint(10, 80)
    steps, working = [], []
    for _ in range(2):
        sign, operand = _draw_step(rng, total, 9)
        verb = rng.choice(_GAINS if sign == "+" else _LOSSES)
        steps.append(f"{verb} {operand}")
        after = _apply(total, sign, operand)
        working.append(f"{name} {verb} {operand}, so {total} {sign} {operand} = {after}.")
        total = after
    prompt = rng.choice(_STORY_PROMPTS).format(name=name, start=start, things=things, steps=" and ".join(steps))
    return prompt, " ".join([f"{name} has {start} {things}.", *working, f"The answer is {total}."])


def _judge_word_problem(prompt: str, reply: str) -> bool:
    total = numbers(prompt)[0]
    for verb, operand in re.findall(rf"({'|'.join(_GAINS + _LOSSES)}) (\d+)", prompt):
        total += int(operand) if verb in _GAINS else -int(operand)
    return ends_with_number(reply, total)


# (large unit, small unit, factor, the small amounts in use)
_UNITS = (
    ("m", "cm", 100, range(10, 100)),
    ("kg", "g", 1000, range(100, 1000, 10)),
    ("km", "m", 1000, range(100, 1000, 10)),
    ("h", "min", 60, range(10, 60)),
    ("weeks", "days", 7, range(1, 7)),
)
_UNIT_PROMPTS = ("Convert {} to {}.", "Write {} in {}.", "Change {} into {}.")


def _write_units(rng: random.Random) -> tuple[str, str]:
    large, small, factor, amounts = rng.choice(_UNITS)
    many, few = rng.randint(2, 9), rng.choice(amounts)
    prompt = rng.choice(_UNIT_PROMPTS).format(f"{many} {large} {few} {small}", small)
    total = many * factor + few
    return prompt, (
        f"There are {factor} {small} in 1 {large}, so {many} {large} are {many * factor} {small}. "
        f"{many * factor} + {few} = {total}. The answer is {total} {small}."
    )


def _judge_units(prompt: str, reply: str) -> bool:
    many, few = numbers(prompt)
    large, small = re.findall(r"\d+ ([a-z]+)", prompt)
    factor = next(entry[2] for entry in _UNITS if entry[:2] == (large, small))
    final = re.findall(r"(?<![\d.])(-?\d+(?:\.\d+)?) ([a-z]+)", reply)
    return final[-1:] == [(str(many * factor + few), small)] and ends_with_number(reply, many * factor + few)


SKILLS = (
    Skill("arithmetic", _write_sum, _judge_sum),
    Skill("word_problem", _write_word_problem, _judge_word_problem),
    Skill("units", _write_units, _judge_units),
)
