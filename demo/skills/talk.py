"""Small talk: greetings, what the demo is and can do, and saying what it cannot do."""

import random

from .base import Example, Skill, Task
from .words import city, made_up, name

_MODEL = "I am a small demo model with sixteen skills"
_TRY = "Try a sum, a date or a short story."

REPLIES = {
    "greeting": f"Hello! {_MODEL}. {_TRY}",
    "feeling": f"I am well, thank you. {_MODEL}. {_TRY}",
    "thanks": "You are welcome!",
    "farewell": "Goodbye!",
    "identity": f"{_MODEL}, made to show how drafts are verified. I know nothing about the world.",
    "ability": (
        "I have sixteen skills: sums, word problems, units, dates, weekdays, sorting, the maximum, filtering, counting,"
        " comparing, odd or even, price tables, JSON, editing a sentence, short stories and small Python functions."
    ),
    "world": f"{_MODEL}, and this is not one of them, so I cannot help with it. {_TRY}",
    "large": "I only add and subtract, with results up to 99, so I cannot work this out.",
}
"""One reply each: the demo always describes itself in the same words."""
DECLINED = REPLIES["world"]

_TOPICS = (
    "gravity", "the moon", "the French Revolution", "photosynthesis", "black holes", "the stock market",
    "climate change",
    "football", "music", "quantum physics", "the Roman Empire", "love", "the weather", "chess", "evolution",
    "computers",
    "the internet", "volcanoes", "cooking", "the human heart", "democracy", "electricity", "dinosaurs", "the ocean",
    "history", "art", "philosophy", "money", "medicine", "religion", "machine learning", "the sun", "vitamins", "sleep",
    "a car engine", "the blockchain", "wine", "tea", "the law", "space travel", "DNA", "coffee", "war", "dreams",
)  # fmt: skip
_COUNTRIES = (
    "France", "Japan", "Brazil", "Canada", "Kenya", "Spain", "India", "Peru", "Norway", "Egypt", "Italy", "China",
    "Mexico", "Poland", "Turkey", "Chile", "Greece", "Ghana", "Cuba", "Nepal",
)  # fmt: skip
_LANGUAGES = (
    "French",
    "German",
    "Spanish",
    "Italian",
    "Japanese",
    "Latin",
    "Chinese",
    "Russian",
    "Greek",
    "Dutch",
)
_DEEDS = (
    "book a flight", "send an email", "call my mother", "open the door", "search the web", "play a song",
    "order a pizza",
    "fix my bike", "draw a picture", "set an alarm", "buy a house", "learn to swim", "lose weight", "find a job",
    "cook rice", "plant a tree", "write a web server", "train a neural network", "parse a log file", "use git",
)  # fmt: skip


def _draw_small_talk(rng: random.Random) -> Task:
    kind = rng.choice(
        ("greeting", "greeting", "feeling", "thanks", "farewell", "identity", "ability")
    )
    return Task(kind, REPLIES[kind], {"name": name(rng)}, facts=(REPLIES[kind],))


def _draw_world(rng: random.Random) -> Task:
    slots = {
        "topic": rng.choice(_TOPICS) if rng.random() < 0.85 else made_up(rng),
        "country": rng.choice(_COUNTRIES),
        "language": rng.choice(_LANGUAGES),
        "deed": rng.choice(_DEEDS),
        "city": city(rng),
        "name": name(rng),
        "year": rng.randint(1500, 2030),
    }
    return Task("world", REPLIES["world"], slots, facts=("cannot",))


def _draw_large(rng: random.Random) -> Task:
    if rng.random() < 0.5:
        sign = rng.choice(
            (
                " * ",
                " / ",
                "*",
                " times ",
                " divided by ",
                " x ",
                " multiplied by ",
                "/",
                " to the power of ",
            )
        )
        left, right = rng.randint(2, 99), rng.randint(2, 30)
    else:
        sign = rng.choice((" + ", " + ", "+", " plus ", " - ", " minus "))
        left, right = rng.sample((rng.randint(100, 9999), rng.randint(50, 9999)), 2)
    return Task("large", REPLIES["large"], {"sum": f"{left}{sign}{right}"}, facts=("cannot",))


def _draw(rng: random.Random) -> Task:
    return rng.choices((_draw_small_talk, _draw_world, _draw_large), (5, 6, 2))[0](rng)


def _judge(example: Example, reply: str) -> bool:
    return example.facts[0] in reply


TALK = Skill("talk", _draw, _judge)
