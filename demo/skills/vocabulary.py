"""Words beyond the exercises' lists, and turns made of them."""

import random

from .base import Example
from .manners import say
from .words import animal, place

NOUNS = (
    "euro", "dollar", "pound", "child", "student", "teacher", "passenger", "balloon", "car", "train", "boat",
    "kite", "ticket", "letter", "postcard", "bottle", "tree", "chocolate", "biscuit", "sandwich", "pizza", "carrot",
    "potato", "tomato", "banana", "cherry", "grape", "melon", "peach", "sheet", "page", "picture", "painting",
    "guitar", "drum", "violin", "game", "puzzle", "doll", "robot", "brick", "nail", "screw", "hammer", "wheel",
    "bicycle", "scooter", "ship", "plane", "bus", "truck", "garage", "window", "door", "floor", "wall", "roof",
    "room", "bed", "sofa", "desk", "shelf", "drawer", "curtain", "carpet", "blanket", "towel", "soap", "sponge",
    "bucket", "basket", "star", "planet", "cloud", "river", "island", "bridge", "road", "street", "corner",
    "market", "ladder", "rocket", "castle", "tower", "tunnel", "fence", "gate", "bell", "coin", "wallet", "purse",
    "jacket", "scarf", "glove", "boot", "button", "pocket", "belt", "watch", "necklace", "crown", "mask", "costume",
    "flag", "drum", "trumpet", "spider", "ant", "butterfly", "beetle", "worm", "snail", "owl", "eagle", "swan",
    "goose", "penguin", "seal", "dolphin", "shark", "elephant", "zebra", "giraffe", "panda", "kitten", "puppy",
    "chicken", "lamb", "pony", "hamster", "lizard", "dragon", "giant", "wizard", "pirate", "king", "queen",
    "princess", "knight", "farmer", "baker", "doctor", "nurse", "driver", "pilot", "sailor", "singer", "dancer",
    "painter", "writer", "neighbour", "friend", "brother", "sister", "cousin", "uncle", "rice", "soup", "salad",
    "butter", "sugar", "salt", "pepper", "honey", "cake", "pie", "muffin", "pancake", "noodle", "egg", "sausage",
    "juice", "water", "lemonade",
)  # fmt: skip


QUALITIES = (
    "cold", "warm", "hot", "dark", "bright", "heavy", "light", "long", "short", "new", "dirty", "clean", "broken",
    "empty", "full", "soft", "hard", "round", "wet", "dry", "rich", "poor", "strong", "weak", "fast", "slow",
    "loud", "calm", "funny", "serious", "kind", "angry", "proud", "lonely", "sleepy", "beautiful", "ugly", "cheap",
    "expensive", "golden", "purple", "orange", "pink", "silver", "wooden", "strange", "famous", "tiny", "huge",
)  # fmt: skip


ACTS = (
    "barks", "cries", "laughs", "smiles", "looks", "listens", "cooks", "cleans", "drives", "flies", "climbs",
    "falls", "grows", "shines", "turns", "stops", "starts", "opens", "closes", "rings", "moves", "waits", "talks",
    "sleeps", "swims", "paints", "writes", "counts", "shouts", "dances",
)  # fmt: skip


def _plural(noun: str) -> str:
    if noun == "child":
        return "children"
    if noun.endswith(("s", "sh", "ch", "x", "tato", "mato")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def draw_noun(rng: random.Random) -> str:
    return rng.choice(NOUNS) if rng.random() < 0.7 else rng.choice((animal, place))(rng)


def draw_nouns(rng: random.Random) -> str:
    return _plural(rng.choice(NOUNS))


def ask(rng: random.Random, ways: tuple[str, ...], answer: str, **slots: object) -> Example:
    return Example("plain", say(rng, rng.choice(ways), slots), answer)


def kept(prompt: str, answer: str) -> Example:
    return Example("plain", prompt, answer)
