"""Working through short lists: sorting, maximum, filtering and counting."""

import random
import re

from .base import Skill, ends_with_number, last_clause, listed, numbers
from .words import GOODS


def _spread(rng: random.Random, count: int) -> list[int]:
    """Two-digit numbers with different tens: their order shows in one digit."""
    return [10 * tens + rng.randrange(10) for tens in rng.sample(range(1, 10), count)]


def _values(prompt: str) -> list[int]:
    return numbers(prompt.partition(":")[2])


_SORT_PROMPTS = (
    "Sort these numbers: {}.",
    "Put these numbers in order from small to large: {}.",
    "Arrange in ascending order: {}.",
)


def _write_sort(rng: random.Random) -> tuple[str, str]:
    values = _spread(rng, rng.randint(3, 4))
    left, working = list(values), []
    while len(left) > 1:
        working.append(f"From {listed(left)} take {min(left)}.")
        left.remove(min(left))
    working.append(f"Last is {left[0]}. Sorted: {listed(sorted(values))}.")
    return rng.choice(_SORT_PROMPTS).format(listed(values)), " ".join(working)


def _judge_sort(prompt: str, reply: str) -> bool:
    return numbers(last_clause(reply)) == sorted(_values(prompt))


_MAXIMUM_PROMPTS = (
    "Which is the largest of these numbers: {}?",
    "Find the maximum: {}.",
    "What is the biggest number in this list: {}?",
)


def _write_maximum(rng: random.Random) -> tuple[str, str]:
    values = _spread(rng, rng.randint(3, 4))
    best, working = values[0], [f"Start with {values[0]}."]
    for value in values[1:]:
        relation, verb = ("larger", "take") if value > best else ("smaller", "keep")
        working.append(f"{value} is {relation} than {best}, so {verb} {max(value, best)}.")
        best = max(value, best)
    return rng.choice(_MAXIMUM_PROMPTS).format(listed(values)), " ".join([*working, f"The answer is {best}."])


def _judge_maximum(prompt: str, reply: str) -> bool:
    return ends_with_number(reply, max(_values(prompt)))


_FILTER_PROMPTS = (
    "Keep only the numbers that are {}: {}.",
    "Which of these numbers are {}: {}?",
    "Filter this list for numbers that are {}: {}.",
)


def _passes(value: int, rule: str) -> bool:
    if rule in ("even", "odd"):
        return value % 2 == (rule == "odd")
    return value > numbers(rule)[0]


def _write_filter(rng: random.Random) -> tuple[str, str]:
    values = _spread(rng, rng.randint(3, 4))
    rule = rng.choice(("even", "odd", "more"))
    if rule == "more":
        # The bound's tens are no value's tens, and the largest value passes: the result is never empty.
        free = [tens for tens in range(1, max(values) // 10) if tens not in {value // 10 for value in values}]
        rule = f"greater than {10 * rng.choice(free)}" if free else "even"
    if not any(_passes(value, rule) for value in values):
        rule = "odd" if rule == "even" else "even"
    ending = " ends in {}" if rule in ("even", "odd") else ""  # parity is the last digit's
    working = [f"{value}{ending.format(value % 10)}: {'yes' if _passes(value, rule) else 'no'}." for value in values]
    kept = [value for value in values if _passes(value, rule)]
    answer = " ".join([f"Check which are {rule}.", *working, f"The result is: {listed(kept)}."])
    return rng.choice(_FILTER_PROMPTS).format(rule, listed(values)), answer


def _judge_filter(prompt: str, reply: str) -> bool:
    found = re.search(r"are (even|odd|greater than \d+):", prompt)
    assert found, "not a filter prompt"
    return numbers(last_clause(reply)) == [value for value in _values(prompt) if _passes(value, found[1])]


_COUNT_PROMPTS = (
    "How many things are in this list: {}?",
    "Count the items: {}.",
    "Count how many words are listed here: {}.",
)


def _write_count(rng: random.Random) -> tuple[str, str]:
    items = rng.sample(GOODS, rng.randint(2, 8))
    counted = listed([f"{place} {item}" for place, item in enumerate(items, start=1)])
    return rng.choice(_COUNT_PROMPTS).format(listed(items)), f"Counting: {counted}. The answer is {len(items)}."


def _judge_count(prompt: str, reply: str) -> bool:
    return ends_with_number(reply, len(prompt.partition(":")[2].split(",")))


SKILLS = (
    Skill("sort", _write_sort, _judge_sort),
    Skill("maximum", _write_maximum, _judge_maximum),
    Skill("filter", _write_filter, _judge_filter),
    Skill("count", _write_count, _judge_count),
)
