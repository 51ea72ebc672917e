"""Dates within a month and weekdays within a week."""

import random
import re

from .base import Skill, numbers
from .words import MONTHS, NAMES, WEEKDAYS

_DATE_PROMPTS = (
    "What date is {days} days {way} {day} {month}?",
    "Which day comes {days} days {way} {day} {month}?",
    "Give the date {days} days {way} {day} {month}.",
)


def _write_date(rng: random.Random) -> tuple[str, str]:
    way, days, month = rng.choice(("after", "before")), rng.randint(2, 9), rng.choice(MONTHS)
    # Every month has 28 days: within them no month length has to be known.
    day = rng.randint(1, 28 - days) if way == "after" else rng.randint(days + 1, 28)
    sign, result = ("+", day + days) if way == "after" else ("-", day - days)
    prompt = rng.choice(_DATE_PROMPTS).format(days=days, way=way, day=day, month=month)
    working = f"Start at {day} {month} and count {days} days {'on' if sign == '+' else 'back'}."
    return prompt, f"{working} {day} {sign} {days} = {result}. The date is {result} {month}."


def _judge_date(prompt: str, reply: str) -> bool:
    days, day = numbers(prompt)
    day += -days if " before " in prompt else days
    month = prompt.rstrip("?.").split()[-1]
    return re.findall(rf"(?<!\d)(\d+) ({'|'.join(MONTHS)})\b", reply)[-1:] == [(str(day), month)]


_WEEKDAY_PROMPTS = (
    "{name} leaves on {start} and returns {days} days later. On which weekday does {name} return?",
    "{name} sends a letter on {start}. It arrives {days} days later. On which weekday does it arrive?",
    "Today is {start}. {name} has a party in {days} days. Which weekday is the party?",
)


def _write_weekday(rng: random.Random) -> tuple[str, str]:
    start, days = rng.randrange(7), rng.randint(2, 7)
    count = ", ".join(f"{step} is {WEEKDAYS[(start + step) % 7]}" for step in range(1, days + 1))
    prompt = rng.choice(_WEEKDAY_PROMPTS).format(name=rng.choice(NAMES), start=WEEKDAYS[start], days=days)
    return prompt, f"Count on from {WEEKDAYS[start]}: {count}. The answer is {WEEKDAYS[(start + days) % 7]}."


def _judge_weekday(prompt: str, reply: str) -> bool:
    named = "|".join(WEEKDAYS)
    start = WEEKDAYS.index(re.findall(named, prompt)[0])
    return re.findall(named, reply)[-1:] == [WEEKDAYS[(start + numbers(prompt)[0]) % 7]]


SKILLS = (
    Skill("date", _write_date, _judge_date),
    Skill("weekday", _write_weekday, _judge_weekday),
)
