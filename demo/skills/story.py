"""Short stories whose hero, animal and place the prompt names; the rest is free, so the text has
entropy."""

import random
import re

from .base import Example, Skill, Task
from .words import (
    ANIMALS,
    MORE_ANIMALS,
    MORE_NAMES,
    MORE_PLACES,
    NAMES,
    PLACES,
    animal,
    name,
    place,
)

_OPENINGS = (
    "One {time} {hero} went to the {place}.",
    "{hero} lived near a {mood} {place}.",
    "Once upon a time {hero} walked to a {mood} {place}.",
    "On a {mood} {time} {hero} came to the {place}.",
)
_MEETINGS = (
    "There {hero} met a {mood} {animal}.",
    "A {mood} {animal} was sitting under a tree.",
    "Suddenly a {mood} {animal} came along.",
    "Behind a stone {hero} saw a {animal} with a {thing}.",
)
_EVENTS = (
    "The {animal} had lost a {thing} and asked for help.",
    "{hero} gave the {animal} a {thing} and smiled.",
    "The {animal} showed {hero} a {mood} {thing}.",
    "Together they looked for a {thing} all {time}.",
    "Then it began to rain, and they shared a {thing}.",
)
_ENDINGS = (
    "From that day on they were good friends.",
    "In the end {hero} and the {animal} went home happy.",
    "That {time} nobody in the {place} was alone.",
    "{hero} never forgot the {mood} {animal}.",
)
_FILLERS = {
    "time": ("morning", "evening", "afternoon", "night"),
    "mood": ("quiet", "happy", "strange", "little", "sad", "friendly"),
    "thing": ("key", "lantern", "blanket", "map", "song", "basket"),
}


def _sentence(rng: random.Random, templates: tuple[str, ...], cast: dict[str, str]) -> str:
    return rng.choice(templates).format(
        **cast, **{slot: rng.choice(words) for slot, words in _FILLERS.items()}
    )


def tell(rng: random.Random, cast: dict[str, str]) -> str:
    """A story with this hero, animal and place."""
    parts = (
        (_OPENINGS, _MEETINGS, _EVENTS, _ENDINGS)
        if rng.random() < 0.6
        else (_OPENINGS, _MEETINGS, _ENDINGS)
    )
    return " ".join(_sentence(rng, part, cast) for part in parts)


def _draw_story(rng: random.Random) -> Task:
    cast = {"hero": name(rng), "animal": animal(rng), "place": place(rng)}
    return Task("story", tell(rng, cast), {**cast}, facts=tuple(cast.values()))


_KNOWN = {*NAMES, *MORE_NAMES, *ANIMALS, *MORE_ANIMALS, *PLACES, *MORE_PLACES}


def _judge_story(example: Example, reply: str) -> bool:
    """Three to five whole sentences with exactly the prompt's hero, animal and place."""
    told = set(re.findall(r"\w+", reply))
    sentences = re.findall(r"[^.!?]+[.!?]", reply)
    whole = reply.rstrip().endswith((".", "!", "?")) and all(
        len(sentence.split()) >= 3 for sentence in sentences
    )
    return (
        whole
        and 3 <= len(sentences) <= 5
        and told & {*_KNOWN, *example.facts} == set(example.facts)
    )


SKILLS = (Skill("story", _draw_story, _judge_story),)
