"""Working through short lists: sorting, maximum, filtering and counting."""

import random

from .base import Skill, Task, listed, numbers, same_last_number, same_list
from .words import goods


def _spread(rng: random.Random) -> list[int]:
    """Two-digit numbers, mostly with different tens, so that one digit is enough to order them."""
    count = rng.choice((3, 3, 3, 4, 4, 4, 5))
    if rng.random() < 0.15:
        return rng.sample(range(10, 100), count)
    return [10 * tens + rng.randrange(10) for tens in rng.sample(range(1, 10), count)]


def _shown(rng: random.Random, values: list[int] | list[str]) -> str:
    """A list as people write it: mostly with commas."""
    words = [str(value) for value in values]
    match rng.choices(("commas", "and", "tight", "spaces"), (75, 15, 5, 5))[0]:
        case "and":
            return f"{listed(words[:-1])} and {words[-1]}"
        case "tight":
            return ",".join(words)
        case "spaces":
            return " ".join(words)
        case _:
            return listed(words)


def sort_steps(values: list[int]) -> str:
    """The answer that takes the smallest number again and again."""
    left, working = list(values), []
    while len(left) > 1:
        working.append(f"From {listed(left)} take {min(left)}.")
        left.remove(min(left))
    working.append(f"Last is {left[0]}. Sorted: {listed(sorted(values))}.")
    return " ".join(working)


def _draw_sort(rng: random.Random) -> Task:
    values = _spread(rng)
    return Task("sort", sort_steps(values), material=_shown(rng, values))


def walk_to_maximum(values: list[int]) -> str:
    """The answer that compares every number with the largest so far."""
    best, working = values[0], [f"Start with {values[0]}."]
    for value in values[1:]:
        relation, verb = ("larger", "take") if value > best else ("smaller", "keep")
        working.append(f"{value} is {relation} than {best}, so {verb} {max(value, best)}.")
        best = max(value, best)
    return " ".join([*working, f"The answer is {best}."])


def _draw_maximum(rng: random.Random) -> Task:
    values = _spread(rng)
    return Task("maximum", walk_to_maximum(values), material=_shown(rng, values))


_ABOVE = ("greater than",) * 5 + (
    "above",
    "above",
    "larger than",
    "bigger than",
    "over",
    "more than",
)


def _passes(value: int, rule: str) -> bool:
    if rule in ("even", "odd"):
        return value % 2 == (rule == "odd")
    return value > numbers(rule)[0]


def check_each(values: list[int], rule: str) -> str:
    """The answer that checks every number; at least one must pass."""
    ending = " ends in {}" if rule in ("even", "odd") else ""  # parity is the last digit's
    working = [
        f"{value}{ending.format(value % 10)}: {'yes' if _passes(value, rule) else 'no'}."
        for value in values
    ]
    kept = [value for value in values if _passes(value, rule)]
    return " ".join([f"Check which are {rule}.", *working, f"The result is: {listed(kept)}."])


def _draw_filter(rng: random.Random) -> Task:
    values = _spread(rng)
    rule = rng.choice(("even", "odd", "more"))
    if rule == "more":
        # The bound's tens are no value's tens, and the largest value passes: the result is never
        # empty.
        free = [
            tens
            for tens in range(1, max(values) // 10)
            if tens not in {value // 10 for value in values}
        ]
        rule = f"greater than {10 * rng.choice(free)}" if free else "even"
    if not any(_passes(value, rule) for value in values):
        rule = "odd" if rule == "even" else "even"
    said = rule.replace("greater than", rng.choice(_ABOVE))
    return Task("filter", check_each(values, rule), {"rule": said}, _shown(rng, values))


def counted(items: list[str]) -> str:
    """The answer that numbers the items."""
    numbered = listed([f"{place} {item}" for place, item in enumerate(items, start=1)])
    return f"Counting: {numbered}. The answer is {len(items)}."


def _draw_count(rng: random.Random) -> Task:
    items = goods(rng, rng.randint(2, 8))
    return Task("count", counted(items), material=_shown(rng, items))


SKILLS = (
    Skill("sort", _draw_sort, same_list),
    Skill("maximum", _draw_maximum, same_last_number),
    Skill("filter", _draw_filter, same_list),
    Skill("count", _draw_count, same_last_number),
)
