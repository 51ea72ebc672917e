"""Dates within a month and weekdays within a week."""

import random

from .base import Skill, Task, same_last
from .words import MONTHS, WEEKDAYS, name


def _ordinal(day: int) -> str:
    ending = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def _draw_date(rng: random.Random) -> Task:
    way, days, month = rng.choice(("after", "before")), rng.randint(2, 9), rng.choice(MONTHS)
    # Every month has 28 days: within them no month length has to be known.
    day = rng.randint(1, 28 - days) if way == "after" else rng.randint(days + 1, 28)
    sign, result = ("+", day + days) if way == "after" else ("-", day - days)
    working = f"Start at {day} {month} and count {days} days {'on' if sign == '+' else 'back'}."
    styles = (
        (f"{day} {month}",) * 6
        + (f"{month} {day}",) * 3
        + (f"{_ordinal(day)} {month}", f"the {_ordinal(day)} of {month}")
    )
    return Task(
        f"date_{way}",
        f"{working} {day} {sign} {days} = {result}. The date is {result} {month}.",
        {"days": days, "date": rng.choice(styles)},
    )


def weekday_steps(start: int, days: int) -> str:
    """The answer that counts on from a weekday."""
    count = ", ".join(f"{step} is {WEEKDAYS[(start + step) % 7]}" for step in range(1, days + 1))
    return (
        f"Count on from {WEEKDAYS[start]}: {count}. The answer is {WEEKDAYS[(start + days) % 7]}."
    )


def _draw_weekday(rng: random.Random) -> Task:
    start, days = rng.randrange(7), rng.randint(2, 7)
    return Task(
        "weekday",
        weekday_steps(start, days),
        {"name": name(rng), "start": WEEKDAYS[start], "days": days},
    )


SKILLS = (
    Skill("date", _draw_date, same_last(rf"(?<!\d)(\d+) ({'|'.join(MONTHS)})\b")),
    Skill("weekday", _draw_weekday, same_last("|".join(WEEKDAYS))),
)
