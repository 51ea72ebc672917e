"""Reading and editing text: table look-up, JSON extraction and replacing a word."""

import json
import random
import re

from .base import Example, Skill, Task, same_last_number
from .words import adjective, animal, city, goods, name, place, verb

_HEADS = ("Prices in coins:",) * 4 + ("Price list:", "Prices:", "The shop sells:", "Menu:")


def _draw_table(rng: random.Random) -> Task:
    prices = {item: rng.randint(2, 99) for item in goods(rng, rng.randint(3, 5))}
    item = rng.choice(list(prices))
    if rng.random() < 0.85:
        # After the dash a name is the same token as in a sentence, so that looking it up means
        # finding an equal token.
        material = "\n".join(
            [rng.choice(_HEADS), *(f"- {what}: {price}" for what, price in prices.items())]
        )
    else:
        material = (
            "Prices in coins: "
            + ", ".join(f"{what} {price}" for what, price in prices.items())
            + "."
        )
    answer = f"The table says {item}: {prices[item]}. So the price of the {item} in coins is {prices[item]}."
    return Task("table", answer, {"item": item}, material)


_JSON_SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "In {city} lives {name}, who is {age} years old.",
    "My name is {name}, I am {age} and I come from {city}.",
    "At the age of {age}, {name} moved to {city}.",
    "{name}, {age}, lives in {city}.",
    "This is {name} from {city}, aged {age}.",
    "{name} ({age}) comes from {city}.",
    "I am {name}. I live in {city} and I am {age} years old.",
)


def _draw_json(rng: random.Random) -> Task:
    facts = {"name": name(rng), "age": rng.randint(10, 99), "city": city(rng)}
    return Task("json", json.dumps(facts), material=rng.choice(_JSON_SENTENCES).format(**facts))


def _judge_json(example: Example, reply: str) -> bool:
    found = re.search(r"\{.*\}", reply, re.DOTALL)
    try:
        return found is not None and json.loads(found[0]) == json.loads(example.answer)
    except (json.JSONDecodeError, RecursionError):
        return False


_SENTENCES = (
    "The {adjective} {animal} {verb} near the {place}.",
    "Every day {name} {verb} with the {adjective} {animal}.",
    "In the {place} {name} {verb} behind the {adjective} {animal}.",
    "{name} {verb} and the {adjective} {animal} looks at the {place}.",
    "Near the {place} a {adjective} {animal} {verb}.",
    "My {animal} is {adjective} and {verb} all day.",
)
_WORDS = {"adjective": adjective, "animal": animal, "verb": verb, "place": place, "name": name}


def _draw_edit(rng: random.Random) -> Task:
    template = rng.choice(_SENTENCES)
    words = {kind: choose(rng) for kind, choose in _WORDS.items()}
    if rng.random() < 0.3:
        kind, task = "adjective", "edit_capitals"
        new = words[kind].upper()
    else:
        kind, task = rng.choice(re.findall(r"\{(\w+)\}", template)), "edit_replace"
        new = words[kind]
        while new == words[kind]:
            new = _WORDS[kind](rng)
    old, edited = words[kind], template.format(**{**words, kind: new})
    answer = f'With "{new}" instead of "{old}" the sentence is: {edited}'
    return Task(task, answer, {"old": old, "new": new}, template.format(**words))


def _judge_edit(example: Example, reply: str) -> bool:
    return reply.rpartition(": ")[2].strip() == example.answer.rpartition(": ")[2]


SKILLS = (
    Skill("table", _draw_table, same_last_number),
    Skill("json", _draw_json, _judge_json),
    Skill("edit", _draw_edit, _judge_edit),
)
