"""Reading and editing text: table look-up, JSON extraction and replacing a word."""

import json
import random
import re

from .base import Skill, ends_with_number, numbers
from .words import ADJECTIVES, ANIMALS, CITIES, GOODS, NAMES, PLACES, VERBS

_TABLE_PROMPTS = ("What does the {} cost?", "How much is the {}?", "Look up the price of the {}.")


def _write_table(rng: random.Random) -> tuple[str, str]:
    prices = {item: rng.randint(2, 99) for item in rng.sample(GOODS, rng.randint(3, 5))}
    item = rng.choice(list(prices))
    # After the dash a name is the same token as in a sentence, so that looking it up is looking for an equal.
    rows = "\n".join(f"- {name}: {price}" for name, price in prices.items())
    prompt = f"Prices in coins:\n{rows}\n{rng.choice(_TABLE_PROMPTS).format(item)}"
    return prompt, f"The table says {item}: {prices[item]}. So the price of the {item} in coins is {prices[item]}."


def _judge_table(prompt: str, reply: str) -> bool:
    prices = dict(re.findall(r"^- (\w+): (\d+)$", prompt, re.MULTILINE))
    question = prompt.rpartition("\n")[2].rstrip("?.").split()
    return ends_with_number(reply, next(int(prices[word]) for word in reversed(question) if word in prices))


_JSON_PROMPTS = (
    "Extract name, age and city as JSON: {}",
    "Turn this sentence into JSON with the keys name, age and city: {}",
)
_JSON_SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "In {city} lives {name}, who is {age} years old.",
    "My name is {name}, I am {age} and I come from {city}.",
    "At the age of {age}, {name} moved to {city}.",
)


def _write_json(rng: random.Random) -> tuple[str, str]:
    facts = {"name": rng.choice(NAMES), "age": rng.randint(10, 99), "city": rng.choice(CITIES)}
    return rng.choice(_JSON_PROMPTS).format(rng.choice(_JSON_SENTENCES).format(**facts)), json.dumps(facts)


def _judge_json(prompt: str, reply: str) -> bool:
    words = re.findall(r"\w+", prompt)
    facts = {
        "name": next(word for word in words if word in NAMES),
        "age": numbers(prompt)[0],
        "city": next(word for word in words if word in CITIES),
    }
    found = re.search(r"\{.*\}", reply, re.DOTALL)
    try:
        return found is not None and json.loads(found[0]) == facts
    except json.JSONDecodeError:
        return False


_SENTENCES = (
    "The {adjective} {animal} {verb} near the {place}.",
    "Every day {name} {verb} with the {adjective} {animal}.",
    "In the {place} {name} {verb} behind the {adjective} {animal}.",
)
_CLASSES = {"adjective": ADJECTIVES, "animal": ANIMALS, "verb": VERBS, "place": PLACES, "name": NAMES}


def _write_edit(rng: random.Random) -> tuple[str, str]:
    template = rng.choice(_SENTENCES)
    words = {kind: rng.choice(choices) for kind, choices in _CLASSES.items()}
    if rng.random() < 0.3:
        kind, old = "adjective", words["adjective"]
        new, order = old.upper(), f'Write "{old}" in capital letters'
    else:
        kind = rng.choice(re.findall(r"\{(\w+)\}", template))
        old = words[kind]
        new = rng.choice([word for word in _CLASSES[kind] if word != old])
        order = rng.choice((f'Replace "{old}" with "{new}"', f'Change the word "{old}" to "{new}"'))
    edited = template.format(**{**words, kind: new})
    return f"{order}: {template.format(**words)}", f'With "{new}" instead of "{old}" the sentence is: {edited}'


def _judge_edit(prompt: str, reply: str) -> bool:
    order, _, sentence = prompt.partition(": ")
    old, *rest = re.findall(r'"(\w+)"', order)
    new = rest[0] if rest else old.upper()
    return reply.rpartition(": ")[2].strip() == re.sub(rf"\b{old}\b", new, sentence)


SKILLS = (
    Skill("table", _write_table, _judge_table),
    Skill("json", _write_json, _judge_json),
    Skill("edit", _write_edit, _judge_edit),
)
