"""Words for exercises: a small frequent core, a wider choice, and invented names."""

import random

NAMES = (
    "Mia",
    "Tom",
    "Anna",
    "Ben",
    "Lily",
    "Max",
    "Nora",
    "Sam",
    "Ella",
    "Jack",
    "Ruth",
    "Leo",
    "Ida",
    "Paul",
)
MORE_NAMES = (
    "Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "John", "Kate", "Lucas", "Maria",
    "Noah", "Olga", "Peter", "Rosa", "Simon", "Tina", "Victor", "Wendy", "Yuki", "Zoe", "Ali", "Chen", "Fatima", "Ivan",
    "Lena", "Omar", "Sofia", "Jim", "Eve", "Sara", "Mark", "Julia", "Oscar", "Amir", "Nina", "Hugo", "Vera", "Robert",
)  # fmt: skip
CITIES = (
    "Paris",
    "London",
    "Rome",
    "Berlin",
    "Madrid",
    "Oslo",
    "Vienna",
    "Prague",
    "Tokyo",
    "Boston",
    "Lima",
    "Cairo",
)
MORE_CITIES = (
    "Hamburg", "Lisbon", "Dublin", "Delhi", "Seoul", "Toronto", "Chicago", "Nairobi", "Athens", "Warsaw", "Sydney",
    "Munich", "Milan", "Zurich", "Helsinki", "Lagos", "Quito", "Austin", "Denver", "Osaka",
)  # fmt: skip
ANIMALS = ("fox", "bear", "rabbit", "duck", "horse", "cat", "frog", "goat", "mouse", "dog")
MORE_ANIMALS = (
    "wolf", "sheep", "cow", "hen", "lion", "tiger", "bird", "fish", "turtle", "pig", "donkey", "snake", "whale", "bee",
    "parrot", "crab", "deer", "monkey", "camel", "squirrel",
)  # fmt: skip
PLACES = (
    "forest",
    "river",
    "garden",
    "village",
    "lake",
    "castle",
    "beach",
    "farm",
    "park",
    "mountain",
)
MORE_PLACES = (
    "city", "school", "house", "library", "bridge", "tower", "market", "desert", "harbour", "valley", "cave", "station",
    "museum", "kitchen", "field", "hill", "ship", "mill", "pond", "shop",
)  # fmt: skip
THINGS = ("apples", "pears", "books", "coins", "cards", "shells", "stamps", "pens")
MORE_THINGS = (
    "eggs", "balls", "cups", "keys", "marbles", "stickers", "flowers", "stones", "candles", "cookies", "nuts", "toys",
    "photos", "pencils", "boxes", "tickets", "oranges", "plums",
)  # fmt: skip
GOODS = (
    "apple",
    "pen",
    "cup",
    "book",
    "lamp",
    "chair",
    "hat",
    "ball",
    "plate",
    "spoon",
    "table",
    "clock",
    "shoe",
)
MORE_GOODS = (
    "fork", "knife", "bag", "coat", "ring", "key", "box", "bottle", "brush", "bowl", "map", "phone", "shirt", "sock",
    "bread", "cheese", "milk", "tea", "coffee", "lemon", "onion", "rope", "candle", "mirror", "pillow", "ladder",
)  # fmt: skip
ADJECTIVES = ("old", "young", "small", "big", "quick", "happy", "quiet", "brown", "white", "clever")
MORE_ADJECTIVES = (
    "red",
    "green",
    "lazy",
    "tall",
    "brave",
    "tired",
    "hungry",
    "grey",
    "noisy",
    "gentle",
    "black",
    "shy",
)
VERBS = ("sleeps", "sits", "waits", "plays", "walks", "rests", "sings", "runs")
MORE_VERBS = (
    "jumps",
    "hides",
    "eats",
    "dances",
    "swims",
    "stands",
    "reads",
    "dreams",
    "works",
    "stays",
)
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_ONSETS = (
    *"BCDFGHJKLMNPRSTVWYZ", "Br", "Ch", "Cl", "Dr", "Fl", "Gr", "Kr", "Ph", "Qu", "Sh", "Sk", "St", "Th", "Tr", "A",
    "E", "I", "O", "U",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ia", "io", "ee", "ou")
_MIDDLES = (
    "b",
    "d",
    "dr",
    "g",
    "l",
    "ll",
    "m",
    "mm",
    "n",
    "nd",
    "nn",
    "p",
    "r",
    "rt",
    "s",
    "sh",
    "ss",
    "st",
    "t",
    "v",
    "z",
)
_ENDS = (
    "",
    "",
    "a",
    "o",
    "n",
    "r",
    "s",
    "l",
    "ra",
    "na",
    "ne",
    "th",
    "ck",
    "ndo",
    "lla",
    "m",
    "t",
    "x",
)


def made_up(rng: random.Random) -> str:
    """An invented name: there are more than a hundred thousand, so the model must copy it."""
    first = rng.choice(_ONSETS)
    syllables = first if first in "AEIOU" else first + rng.choice(_VOWELS)
    for _ in range(rng.choice((0, 1, 1, 2)) or (len(syllables) < 2)):
        syllables += rng.choice(_MIDDLES) + rng.choice(_VOWELS)
    return syllables + rng.choice(_ENDS)


def _wide(rng: random.Random, core: tuple[str, ...], more: tuple[str, ...]) -> str:
    return rng.choice(core if rng.random() < 0.5 else more)


def name(rng: random.Random) -> str:
    """A person."""
    return made_up(rng) if rng.random() < 0.35 else _wide(rng, NAMES, MORE_NAMES)


def city(rng: random.Random) -> str:
    """A city."""
    return made_up(rng) if rng.random() < 0.25 else _wide(rng, CITIES, MORE_CITIES)


def animal(rng: random.Random) -> str:
    """An animal."""
    return _wide(rng, ANIMALS, MORE_ANIMALS)


def place(rng: random.Random) -> str:
    """A place to be at."""
    return _wide(rng, PLACES, MORE_PLACES)


def things(rng: random.Random) -> str:
    """Things to own several of."""
    return _wide(rng, THINGS, MORE_THINGS)


def goods(rng: random.Random, count: int) -> list[str]:
    """So many different things to list or to buy."""
    return rng.sample(GOODS if rng.random() < 0.5 else GOODS + MORE_GOODS, count)


def adjective(rng: random.Random) -> str:
    """What somebody is like."""
    return _wide(rng, ADJECTIVES, MORE_ADJECTIVES)


def verb(rng: random.Random) -> str:
    """What somebody does."""
    return _wide(rng, VERBS, MORE_VERBS)
