"""Three skills that are not in the training data, to measure what is learnt beyond the sixteen.

They were written after the target's last training rows were packed: one near to a skill of its own
(the smallest of a list), one further away (an item by its place in a list) and one far away
(spelling a word).
"""

import random
from collections.abc import Iterator

from .base import Example, Skill, Task, listed, same_last_number
from .words import goods

_PLACES = ("first", "second", "third", "last")
_WAYS = {
    "minimum": (
        "What is the smallest of these numbers: {material}?",
        "Find the minimum: {material}.",
        "Which number is the lowest: {material}?",
        "smallest number in {material}",
    ),
    "place": (
        "What is the {place} thing in this list: {material}?",
        "Which word comes {place}: {material}?",
        "Give me the {place} item of {material}.",
        "{material} - what is {place}?",
    ),
    "spelling": (
        'Spell the word "{word}" with hyphens.',
        'How do you spell "{word}"? Put a hyphen between the letters.',
        'Write "{word}" letter by letter, with hyphens.',
        "spell {word}, with hyphens please",
    ),
}


def _draw_minimum(rng: random.Random) -> Task:
    values = rng.sample(range(10, 100), rng.randint(3, 4))
    return Task("minimum", f"The answer is {min(values)}.", material=listed(values))


def _draw_place(rng: random.Random) -> Task:
    items, place = goods(rng, rng.randint(3, 5)), rng.choice(_PLACES)
    wanted = items[-1 if place == "last" else _PLACES.index(place)]
    return Task("place", f"It is {wanted}.", {"place": place}, listed(items), facts=(wanted,))


def _draw_spelling(rng: random.Random) -> Task:
    word = goods(rng, 1)[0]
    return Task("spelling", "-".join(word), {"word": word}, facts=("-".join(word),))


def _ends_with_fact(example: Example, reply: str) -> bool:
    return reply.rstrip(' ."').endswith(example.facts[0])


FRESH = {
    skill.name: skill
    for skill in (
        Skill("minimum", _draw_minimum, same_last_number),
        Skill("place", _draw_place, _ends_with_fact),
        Skill("spelling", _draw_spelling, _ends_with_fact),
    )
}


def fresh(per_skill: int, seed: int = 0) -> Iterator[Example]:
    """This many exercises of every fresh skill."""
    rng = random.Random(f"fresh-{seed}")
    for skill in FRESH.values():
        for _ in range(per_skill):
            task = skill.draw(rng)
            way = rng.choice(_WAYS[task.kind])
            yield skill.exercise(task, way.format(**task.slots, material=task.material))
