"""More of what people ask, with words beyond the exercises' lists: for the last course, after `plain`."""

import json
import random
from collections.abc import Callable

from .arithmetic import add_up, working_units
from .base import Example, listed
from .calendar import weekday_steps
from .digits import larger_by
from .lists import check_each, counted, sort_steps, walk_to_maximum
from .manners import say
from .phrasings import PHRASINGS
from .story import tell
from .talk import DECLINED, REPLIES
from .words import MONTHS, WEEKDAYS, animal, made_up, name, place

_NOUNS = (
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
_QUALITIES = (
    "cold", "warm", "hot", "dark", "bright", "heavy", "light", "long", "short", "new", "dirty", "clean", "broken",
    "empty", "full", "soft", "hard", "round", "wet", "dry", "rich", "poor", "strong", "weak", "fast", "slow",
    "loud", "calm", "funny", "serious", "kind", "angry", "proud", "lonely", "sleepy", "beautiful", "ugly", "cheap",
    "expensive", "golden", "purple", "orange", "pink", "silver", "wooden", "strange", "famous", "tiny", "huge",
)  # fmt: skip
_ACTS = (
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


def _noun(rng: random.Random) -> str:
    return rng.choice(_NOUNS) if rng.random() < 0.7 else rng.choice((animal, place))(rng)


def _many(rng: random.Random) -> str:
    return _plural(rng.choice(_NOUNS))


def _ask(rng: random.Random, ways: tuple[str, ...], answer: str, **slots: object) -> Example:
    return Example("plain", say(rng, rng.choice(ways), slots), answer)


def _kept(prompt: str, answer: str) -> Example:
    return Example("plain", prompt, answer)


_GAIN = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
    "{name} had {a} {things} and found {b}. How many are there now?",
    "I have {a} {things} and buy {b} more. How many {things} do I have?",
    "There are {a} {things} in the {place} and {b} more come. How many are there?",
    "There were {a} {things}. Then {b} more arrived. How many are there now?",
    "A {box} has {a} {things} and another has {b}. How many {things} are there altogether?",
    "One {box} holds {a} {things}, the other holds {b}. How many {things} in total?",
    "One {box} has {a} {things} and the other {box} has {b} {things}. How many is that together?",
    "{name} has {a} {things} and {other} has {b}. How many do they have together?",
    "I saw {a} {things} on {day} and {b} on {day2}. How many is that?",
    "{name} earns {a} {things} and then {b} more. How much is that?",
    "A {box} costs {a} {money} and a {box2} costs {b} {money}. What do they cost together?",
    "A {box} costs {a} and a {box2} costs {b}. How much are both?",
    "I buy a {box} for {a} {money} and a {box2} for {b} {money}. How much do I pay?",
    "If a {box} is {a} {money} and a {box2} is {b} {money}, what is the total?",
)
_LOSS = (
    "{name} has {a} {things} and gives {b} away. How many are left?",
    "{name} has {a} {money} and pays {b}. How much is left?",
    "{name} had {a} {money} and spent {b} on a {box}. How much money is left?",
    "I had {a} {money} and paid {b} for a {box}. How much do I have left?",
    "There are {a} {things} in the {place} and {b} leave. How many are still in the {place}?",
    "There were {a} {things} on the {box}. {b} fell off. How many are still there?",
    "{a} {things} are on the train and {b} get out. How many stay on the train?",
    "{name} had {a} {things}, {b} broke. How many does {name} have now?",
    "{name} had {a} {things}, but {b} ran away. How many are left?",
    "I had {a} {things}, {b} of them got lost. How many do I have now?",
    "I bake {a} {things} and we eat {b}. How many remain?",
    "A {box} holds {a} {things}. I take out {b}. How many stay in it?",
    "Of {a} {things}, {b} are {colour}. How many are not?",
)


def _word_problem(rng: random.Random) -> Example:
    sign = rng.choice("+-")
    a = rng.randint(2, 40)
    b = rng.randint(1, min(a, 30 if sign == "-" else 20))
    box, box2 = rng.sample(_NOUNS, 2)
    day, day2 = rng.sample(WEEKDAYS, 2)
    slots = {
        "a": a, "b": b, "name": name(rng), "other": name(rng), "things": _many(rng), "place": _noun(rng), "box": box,
        "box2": box2, "money": rng.choice(("euros", "dollars", "coins", "pounds")), "day": day, "day2": day2,
        "colour": rng.choice(_QUALITIES),
    }  # fmt: skip
    prompt = rng.choice(_GAIN if sign == "+" else _LOSS).format(**slots)
    return _kept(prompt, add_up(a, [(sign, b)]))


def _mixed(rng: random.Random) -> list[int]:
    """Numbers of one and two digits side by side."""
    low, high = rng.sample(range(10), rng.choice((1, 1, 2, 2, 3))), rng.sample(range(10, 100), rng.randint(1, 2))
    values = [*low, *high]
    if len(values) < 3:
        values.append(rng.choice([value for value in range(100) if value not in values]))
    rng.shuffle(values)
    return values if rng.random() < 0.75 else rng.sample(range(10), rng.choice((3, 4)))


def _shown(rng: random.Random, values: list[int]) -> str:
    last = rng.choice((" and ", " and ", " or ", ", ", ", ", ", "))
    return f"{listed(values[:-1])}{last}{values[-1]}"


def _sort(rng: random.Random) -> Example:
    values = _mixed(rng)
    ways = (
        "sort {list}.", "sort {list}", "put these numbers in order: {list}", "put {list} in the right order.",
        "order these: {list}", "can you sort {list}?", "can you sort {list} from small to large?",
        "sort these from small to big: {list}", "Sort: {list}", "sort the numbers {list}.", "{list} sorted?",
        "arrange {list} in order.", "what is the order of {list}?", "sort these numbers: {list}",
    )  # fmt: skip
    return _ask(rng, ways, sort_steps(values), list=_shown(rng, values).replace(" or ", " and "))


def _maximum(rng: random.Random) -> Example:
    values = _mixed(rng)
    ways = (
        "what is the largest number in {list}?", "what is the biggest number: {list}?", "which is the biggest: {list}?",
        "find the largest of {list}.", "find the highest of {list}.", "biggest of {list}?", "which is largest: {list}?",
        "which number is the highest: {list}?", "maximum of {list}", "the largest of {list}?",
        "what is the maximum of {list}?",
    )  # fmt: skip
    return _ask(rng, ways, walk_to_maximum(values), list=_shown(rng, values))


def _filter(rng: random.Random) -> Example:
    values = _mixed(rng)
    rule = rng.choice(("even", "odd", "more", "more"))
    if rule == "more":
        bound = rng.choice((5, 10, 10, 20, 30, 50))
        if max(values) <= bound:
            values[rng.randrange(len(values))] = rng.randint(bound + 1, 99)
        said = f"{rng.choice(('above', 'over', 'greater than', 'larger than', 'bigger than'))} {bound}"
        rule = f"greater than {bound}"
    else:
        if not any(value % 2 == (rule == "odd") for value in values):
            rule = "odd" if rule == "even" else "even"
        said = rule
    ways: tuple[str, ...] = (
        "which of {list} are {rule}?", "keep only the numbers {rule}: {list}", "list the numbers {rule}: {list}",
        "which numbers are {rule}: {list}?", "find the numbers {rule}: {list}", "what numbers in {list} are {rule}?",
        "only the numbers {rule}: {list}", "which ones are {rule}: {list}?",
    )  # fmt: skip
    if rule in ("even", "odd"):
        ways = (
            *ways[:1], "list the {rule} numbers in {list}.", "keep only the {rule} numbers: {list}",
            "which are {rule}: {list}?", "what are the {rule} numbers in {list}?", "show the {rule} ones: {list}",
            "name the {rule} numbers of {list}.",
        )  # fmt: skip
    return _ask(rng, ways, check_each(values, rule), list=_shown(rng, values).replace(" or ", " and "), rule=said)


def _compare(rng: random.Random) -> Example:
    left, right = rng.sample(range(rng.choice((10, 30, 100))), 2)
    wanted = rng.choice(("larger", "smaller"))
    said = rng.choice({"larger": ("larger", "bigger", "greater", "more"), "smaller": ("smaller", "less")}[wanted])
    holds = left > right if wanted == "larger" else left < right
    ways = ("is {left} {said} than {right}?", "is {left} {said} than {right}?", "{left} is {said} than {right}, right?")
    answer = f"{larger_by(left, right, wanted)} So {'yes' if holds else 'no'}."
    return _ask(rng, ways, answer, left=left, right=right, said=said)


_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _calendar(rng: random.Random) -> Example:
    at = rng.randrange(12)
    month, after, before = MONTHS[at], MONTHS[(at + 1) % 12], MONTHS[at - 1]
    match rng.randrange(6):
        case 0:
            ways: tuple[str, ...] = (
                "what month comes after {month}?", "which month is after {month}?", "what is the month after {month}?",
                "what month follows {month}?",
            )  # fmt: skip
            return _ask(rng, ways, f"After {month} comes {after}. The answer is {after}.", month=month)
        case 1:
            ways = ("what month comes before {month}?", "which month is before {month}?", "the month before {month}?")
            return _ask(rng, ways, f"Before {month} comes {before}. The answer is {before}.", month=month)
        case 2:
            ways = (
                "how many days has {month}?", "how many days are in {month}?", "how long is {month} in days?",
                "how many days are there in {month}?",
            )  # fmt: skip
            return _ask(rng, ways, f"The answer is {_LENGTHS[at]} days.", month=month)
        case 3:
            date = rng.choice((f"{_LENGTHS[at]} {month}", f"{month} {_LENGTHS[at]}"))
            answer = f"{month} has {_LENGTHS[at]} days, so next is {after}. The date is 1 {after}."
            return _ask(rng, _TOMORROW, answer, date=date)
        case _:
            day = rng.randint(1, 27)
            days = 1 if rng.random() < 0.5 else rng.randint(2, min(9, 29 - day))
            date = rng.choice((f"{day} {month}", f"{month} {day}"))
            answer = (
                f"Start at {day} {month} and count {days} day{'s'[: days - 1]} on. {day} + {days} = {day + days}."
                f" The date is {day + days} {month}."
            )
            ways = _TOMORROW if days == 1 else (
                "what is the date {days} days after {date}?", "what date is {days} days after {date}?",
                "what date is it {days} days after {date}?", "{date} plus {days} days?",
                "today is {date}. What date is it in {days} days?", "which date comes {days} days after {date}?",
            )  # fmt: skip
            return _ask(rng, ways, answer, date=date, days=days)


_TOMORROW = (
    "what date comes after {date}?", "what is the date after {date}?", "which date is after {date}?",
    "today is {date}. What is the date tomorrow?", "what is the day after {date}?", "which date follows {date}?",
)  # fmt: skip


def _weekday(rng: random.Random) -> Example:
    start = rng.randrange(7)
    day, before = WEEKDAYS[start], WEEKDAYS[start - 1]
    if rng.random() < 0.45:
        ways: tuple[str, ...] = (
            "which day is before {day}?", "what weekday comes before {day}?", "the day before {day} is?",
            "what day was it before {day}?", "which weekday comes before {day}?", "what is one day before {day}?",
            "name the day before {day}.", "which day do we have before {day}?",
        )  # fmt: skip
        return _ask(rng, ways, f"Count back from {day}: 1 is {before}. The answer is {before}.", day=day)
    days = rng.choice((1, 1, 2, 2, 3))
    ways = {
        1: ("which day follows {day}?", "which day is after {day}?", "what is the day after {day}?",
            "what weekday comes after {day}?", "what day comes next after {day}?"),
        2: ("what day is two days after {day}?", "which day is 2 days after {day}?", "two days after {day} is?",
            "what weekday is it two days after {day}?", "which weekday comes two days after {day}?"),
        3: ("what day is three days after {day}?", "which day is 3 days after {day}?", "three days after {day} is?"),
    }[days]  # fmt: skip
    return _ask(rng, ways, weekday_steps(start, days), day=day)


_SAID = (
    "the {noun} {act}", "my {noun} is {quality}", "it is a {quality} {noun}", "the {noun} {act} on the {noun2}",
    "a {noun} {act} in the {noun2}", "I see a {quality} {noun}", "we have a {quality} {noun} at home",
    "{name} has a {noun}", "{name} {act} with the {noun}", "this {noun} is very {quality}",
    "the {quality} {noun} {act}",
    "there is a {noun} in my {noun2}", "your {noun} and my {noun2} are {quality}", "{name} gave me a {quality} {noun}",
    "the {noun} was {quality} and the {noun2} was {quality2}", "he likes the {noun}", "she bought a {quality} {noun}",
    "good {noun}, bad {noun2}", "all {nouns} are {quality}", "do not open the {quality} {noun}", "I love {nouns}",
)  # fmt: skip


def _sentence(rng: random.Random) -> tuple[str, dict[str, str]]:
    one, two = _noun(rng), _noun(rng)
    while two == one:
        two = _noun(rng)
    quality, quality2 = rng.sample(_QUALITIES, 2)
    words = {
        "noun": one, "noun2": two, "nouns": _many(rng), "quality": quality, "quality2": quality2,
        "act": rng.choice(_ACTS), "name": name(rng),
    }  # fmt: skip
    said = rng.choice(_SAID)
    return said, {slot: word for slot, word in words.items() if f"{{{slot}}}" in said}


def _capital(text: str, full_stop: bool) -> str:
    return f"{text[0].upper()}{text[1:]}{'.' if full_stop else ''}"


def _edit(rng: random.Random) -> Example:
    said, words = _sentence(rng)
    slot = rng.choice(list(words))
    old, new = words[slot], words[slot]
    while new in words.values():
        new = {"quality": rng.choice(_QUALITIES), "act": rng.choice(_ACTS), "name": name(rng)}.get(
            slot.rstrip("2"), _many(rng) if slot == "nouns" else _noun(rng)
        )
    text, edited = said.format(**words), said.format(**{**words, slot: new})
    form = rng.randrange(3)
    if form:
        text, edited = _capital(text, form == 1), _capital(edited, form == 1)
    quote = rng.choice(("", "", '"'))
    slots = {"old": f"{quote}{old}{quote}", "new": f"{quote}{new}{quote}", "text": text}
    prompt = rng.choice((
        "Change {old} to {new} in: {text}", "Replace {old} with {new} in: {text}", "replace {old} by {new}: {text}",
        "change {old} into {new}: {text}", "Swap {old} for {new}: {text}",
        "In this sentence, change {old} to {new}: {text}",
        "{text} Change {old} to {new}.", "Put {new} instead of {old}: {text}", 'Replace {old} by {new} in "{text}"',
        "Replace the word {old} with {new}: {text}", "Rewrite with {new} instead of {old}: {text}",
    )).format(**slots)  # fmt: skip
    return _kept(prompt, f'With "{new}" instead of "{old}" the sentence is: {edited}')


def _capitals(rng: random.Random) -> Example:
    said, words = _sentence(rng)
    text = said.format(**words)
    if rng.random() < 0.4:
        text = " ".join(text.split()[: rng.randint(1, 3)])
    ways = (
        "Write this in capitals: {text}", "Write this in capital letters: {text}", "In capital letters: {text}",
        "put this sentence in capitals: {text}", "make this upper case: {text}", "{text} in capital letters, please",
        "Write in upper case: {text}", "all in capitals please: {text}", 'write "{text}" in capitals',
    )  # fmt: skip
    return _kept(rng.choice(ways).format(text=text), f"In capitals the sentence is: {text.upper()}")


def _remove(rng: random.Random) -> Example:
    said, words = _sentence(rng)
    words_of = said.format(**words).split()
    at = rng.randrange(len(words_of))
    old = words_of[at].strip(",")
    if words_of.count(words_of[at]) > 1:
        return _remove(rng)
    edited = " ".join(words_of[:at] + words_of[at + 1 :])
    quote = rng.choice(("", "", '"'))
    ways = (
        "Remove {old} from: {text}", "Delete the word {old}: {text}", "take out the word {old}: {text}",
        "Remove the word {old} from this sentence: {text}", "Leave out {old}: {text}", "drop {old} from: {text}",
    )  # fmt: skip
    prompt = rng.choice(ways).format(old=f"{quote}{old}{quote}", text=" ".join(words_of))
    return _kept(prompt, f'Without "{old}" the sentence is: {edited}')


def _count(rng: random.Random) -> Example:
    said, words = _sentence(rng)
    text = said.format(**words).replace(",", "")
    shown = rng.choice((text, f'"{text}"', f'"{text}"'))
    ways = (
        "how many words are in {text}?", "how many words are there in {text}?", "how many words: {text}",
        "count the words in {text}.", "how many words are in this: {text}", "how many words has {text}?",
        "Count the words: {text}", "number of words in {text}?", "how many words does {text} have?",
    )  # fmt: skip
    return _ask(rng, ways, counted(text.split()), text=shown)


def _table(rng: random.Random) -> Example:
    prices = dict(zip(rng.sample(_NOUNS, rng.randint(2, 4)), rng.sample(range(1, 40), 4), strict=False))
    costs = ", ".join(f"{what} {price}" for what, price in prices.items())
    rows = "\n".join(f"- {what}: {price}" for what, price in prices.items())
    shown = rng.choice((f"Prices: {costs}. {{}}", f"{rows}\n{{}}", f"Price list: {costs}. {{}}"))
    if rng.random() < 0.5:
        item = rng.choice(list(prices))
        ask = rng.choice(("How much is the {item}?", "What does the {item} cost?", "what is the price of the {item}?",
                          "What does {item} cost?", "How much for the {item}?")).format(item=item)  # fmt: skip
        answer = f"The table says {item}: {prices[item]}. So the price of the {item} in coins is {prices[item]}."
        return _kept(shown.format(ask), answer)
    most = rng.random() < 0.6
    item = (max if most else min)(prices, key=prices.__getitem__)
    ask = rng.choice(
        ("Which is the most expensive?", "What costs the most?", "Which one costs the most?", "What is most expensive?")
        if most
        else ("Which is the cheapest?", "What costs the least?", "Which one is the cheapest?", "What is cheapest?")
    )
    values = list(prices.values())
    working = f"Of {listed(values)} the {'largest' if most else 'smallest'} is {prices[item]}."
    return _kept(shown.format(ask), f"{working} The table says {item}: {prices[item]}. The answer is {item}.")


def _json(rng: random.Random) -> Example:
    who, age, kind = name(rng), rng.randint(1, 99), _noun(rng)
    years = rng.choice((f"is {age} years old", f"is {age}", f"is {age} years old"))
    start = rng.choice((
        "Give me a JSON object for", "Write JSON for", "Make JSON for", "I need JSON for", "Write a JSON object for",
        "JSON for", "Create a JSON object for", "Can you write JSON for",
    ))  # fmt: skip
    said = rng.choice((
        f"a {kind} called {who} who {years}", f"a {kind} named {who} who {years}", f"my {kind} {who}, who {years}",
        f"a {kind} with name {who} and age {age}", f"name {who} and age {age}", f"{who}, age {age}",
        f"a {kind} called {who}, {age} years old", f"a {age} year old {kind} called {who}",
        f"a person called {who} who {years}",
    ))  # fmt: skip
    start = "Write JSON" if said.startswith("name") and rng.random() < 0.5 else start
    joined = f"{start} {'with ' if start == 'Write JSON' else ''}{said}"
    return _kept(joined + rng.choice(("", ".", ".", " please")), json.dumps({"name": who, "age": age}))


_BEGINS = ("One morning {hero} found a {quality} {thing}.", "{hero} had a {quality} {thing}.",
           "Once upon a time {hero} built a {quality} {thing}.", "On a quiet day {hero} bought a {thing}.")  # fmt: skip
_GOES_ON = ("A little {animal} came along and liked the {thing}.", "{hero} showed the {thing} to a friendly {animal}.",
            "Then it began to rain, and the {thing} was wet.",
            "The {thing} was old, but {hero} was happy with it.")  # fmt: skip
_ENDS = ("From that day on {hero} took the {thing} along.", "In the end {hero} went home with the {thing}.",
         "{hero} never forgot the {thing}.", "That night the {thing} stood near the bed of {hero}.")  # fmt: skip


def _story(rng: random.Random) -> Example:
    """A story about a person and a thing, where the exercises have an animal and a place."""
    named = rng.random() < 0.7
    slots = {"hero": name(rng), "thing": rng.choice(_NOUNS), "quality": rng.choice(_QUALITIES), "animal": animal(rng)}
    about = ("about {hero} and a {thing}", "with {hero} and a {thing}", "about {hero} and the {thing}",
             "about a {thing} and {hero}") if named else ("about a {thing}", "with a {thing}")  # fmt: skip
    prompt = (
        f"{rng.choice(_STORY_BEGINNINGS)} {rng.choice(('story', 'short story', 'little story'))} {rng.choice(about)}"
    )
    answer = " ".join(rng.choice(part) for part in (_BEGINS, _GOES_ON, _ENDS))
    return _kept((prompt + rng.choice(("", ".", "!"))).format(**slots), answer.format(**slots))


_STORY_BEGINNINGS = (
    "Tell me a", "Write a", "tell a", "write me a", "Can you tell me a", "Please tell me a", "I want a", "Make up a",
    "Could you write me a", "Give me a",
)  # fmt: skip


def _talk(rng: random.Random) -> Example:
    """The small talk of the exercises in more words."""
    more = {
        "greeting": ("Hi, how nice", "Hello again!", "hi you", "Good morning!", "hello dear model", "Hey model!",
        "hello hello"),
        "feeling": ("how are you all?", "How are you feeling today?", "how have you been?", "How's life?",
                    "hi, how is your day going?", "are you well today?", "How are you this morning?",
                    "how do you do today?"),
        "thanks": ("Thank you, very kind", "thanks again!", "Thanks a million", "thank you very very much",
                   "Thanks for everything!", "That helped, thank you!", "Great, thank you so much",
                   "many thanks to you"),
        "farewell": ("Bye now", "bye for today", "goodbye then!", "Goodbye for now", "see you again",
        "I am leaving, bye"),
        "identity": ("Hello, who is this?", "hi, what are you?", "So who are you?", "What exactly are you?",
                     "Hello, what's your name?", "whom am I talking with?", "hey, who's there"),
        "ability": ("what all can you do?", "please help", "Help me", "which skills?", "what can I do with you?",
                    "what sort of things can you do?", "What do you know to do?", "How do you help?",
                    "what are you for?",
                    "what tasks can you do?", "hi, what can you do"),
    }  # fmt: skip
    kind = rng.choice(list(more))
    if rng.random() < 0.5:
        return _kept(rng.choice(more[kind]), REPLIES[kind])
    return _kept(say(rng, rng.choice(PHRASINGS[kind]), {"name": name(rng)}), REPLIES[kind])


_NO_SKILL = (
    "sort the words {a}, {b} and {c}.", "sort these words: {a}, {b}, {c}", "put {a}, {b}, {c} in alphabetical order.",
    "how many letters has {a}?", "how many letters are in {a}?", "how many times is the letter {l} in {a}?",
    "how often does {l} appear in {a}?", "count the letter {l} in {a}.", "how do you spell {a}?",
    "what rhymes with {a}?",
    "spell {a} backwards.", "what is the plural of {a}?", "what is the opposite of {q}?", "is a {a} {q}?",
    "what colour is a {a}?", "who was the first {k} of {place}?", "who is the {k} of the world?",
    "who painted the {a}?",
    "what is a {a} made of?", "how much does a {a} weigh?", "where can I buy a {a}?", "when was the {a} invented?",
)  # fmt: skip


def _declined(rng: random.Random) -> Example:
    a, b, c = rng.sample(_NOUNS, 3)
    if rng.random() < 0.3:
        text = " ".join(made_up(rng).lower() for _ in range(rng.randint(2, 4)))
        return _kept(text, DECLINED)
    return _ask(rng, _NO_SKILL, DECLINED, a=a, b=b, c=c, l=rng.choice("abcdefghiklmnoprstu"), q=rng.choice(_QUALITIES),
                k=rng.choice(("president", "king", "queen", "mayor", "pope")), place=made_up(rng))  # fmt: skip


def _double(rng: random.Random) -> Example:
    """Small functions with one plain name for what they do."""
    does, body, docs, call, result = rng.choice((
        (("doubles a number", "doubles x", "returns the double of a number", "multiplies a number by two"),
         "def double(x): x * 2", "x times 2", "double(3)", "6"),
        (("triples a number", "returns three times a number", "triples x"),
         "def triple(x): x * 3", "x times 3", "triple(2)", "6"),
        (("returns the larger of two numbers", "gives the bigger of two numbers", "returns the maximum of two numbers"),
         "def larger(a, b): max(a, b)", "the larger of a and b", "larger(2, 3)", "3"),
        (("returns the smaller of two numbers", "gives the smaller of two numbers",
        "returns the minimum of two numbers"),
         "def smaller(a, b): min(a, b)", "the smaller of a and b", "smaller(2, 3)", "2"),
        (("adds two numbers", "returns the sum of two numbers", "adds a and b"),
         "def add(a, b): a + b", "a plus b", "add(2, 3)", "5"),
        (("squares a number", "returns a number times itself", "squares x"),
         "def square(x): x * x", "x times x", "square(3)", "9"),
    ))  # fmt: skip
    start = rng.choice((
        "Write a Python function that", "Write a function that", "Please write a Python function that",
        "write python code that", "Can you write a Python function that", "Give me a function that",
        "I need a Python function which", "write me a python function that",
    ))  # fmt: skip
    head, expression = body.split(": ", 1)
    code = f'{head}:\n    """Return {docs}.\n\n    >>> {call}\n    {result}\n    """\n    return {expression}'
    return _kept(f"{start} {rng.choice(does)}{rng.choice(('', '.', '.', '?'))}", f"```python\n{code}\n```")


_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_SUMS = (
    "{sum}", "{sum}?", "what is {sum}?", "what is {sum}?", "how much is {sum}?", "hey what is {sum}", "{sum} equals",
    "{sum}=", "{sum} = ?", "what does {sum} equal?", "{sum} is what?", "can you calculate {sum}?", "{sum} please",
    "so {sum} is?", "quick: {sum}", "do you know what {sum} is?", "the result of {sum}?",
)  # fmt: skip
_PAIRS = {
    "+": ("the sum of {a} and {b}", "{a} and {b} together", "{a} added to {b}", "what do {a} and {b} make?",
          "add {a} and {b}", "add {a} to {b}", "add {a} and {b} please", "sum of {a} and {b}", "{a} and {b} makes?"),
    "-": ("subtract {b} from {a}", "take {b} from {a}", "the difference between {a} and {b}", "{a} take away {b}",
          "what is the difference between {a} and {b}?", "{a} less {b}", "what is {a} without {b}?"),
}  # fmt: skip


def _sum(rng: random.Random) -> Example:
    """Sums in words, without spaces, or with the two numbers far from the sign."""
    sign = rng.choice("++-")
    low = rng.random() < 0.6
    a, b = (rng.randint(0, 9), rng.randint(0, 9)) if low else (rng.randint(10, 69), rng.randint(1, 30))
    a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    word = {"+": "plus", "-": "minus"}[sign]
    said: dict[str, object] = {"a": a, "b": b}
    if low and rng.random() < 0.35:
        said = {"a": _ONES[a], "b": _ONES[b]}
    answer = add_up(a, [(sign, b)])
    if rng.random() < 0.35:
        return _ask(rng, _PAIRS[sign], answer, **said)
    joined = f"{said['a']} {word} {said['b']}" if said["a"] != a else rng.choice(
        (f"{a} {sign} {b}", f"{a}{sign}{b}", f"{a} {word} {b}")
    )  # fmt: skip
    return _ask(rng, _SUMS, answer, sum=joined)


_BARE_UNITS = (
    ("m", "cm", 100, "metre", ("cm", "centimetres", "centimeters")), ("kg", "g", 1000, "kilogram", ("grams", "g")),
    ("km", "m", 1000, "kilometre", ("metres", "meters", "m")), ("h", "min", 60, "hour", ("minutes",)),
    ("weeks", "days", 7, "week", ("days",)),
)  # fmt: skip


def _units(rng: random.Random) -> Example:
    large, small, factor, long, units = rng.choice(_BARE_UNITS)
    long = long.replace("metre", "meter") if rng.random() < 0.5 else long
    many = rng.choice((1, 1, *range(2, 10)))
    article = "an" if long == "hour" else "a"
    if many == 1:
        amount = rng.choice((f"one {long}", f"{article} {long}", f"{article} {long}", f"1 {long}"))
    else:
        amount = rng.choice((f"{many} {long}s", f"{_ONES[many]} {long}s", f"{many} {large}"))
    ways = (
        "how many {unit} are in {amount}?", "how many {unit} has {amount}?", "how many {unit} is {amount}?",
        "how many {unit} does {amount} have?", "{amount} in {unit}?", "{amount} is how many {unit}?",
        "how many {unit} make {amount}?", "how long is {amount} in {unit}?" if small in ("min", "days") else
        "convert {amount} into {unit}.",
    )  # fmt: skip
    return _ask(rng, ways, working_units(large, small, factor, many), amount=amount, unit=rng.choice(units))


def _short_story(rng: random.Random) -> Example:
    """A story that was asked for in few words, with a cast or none."""
    cast = {"hero": name(rng), "animal": animal(rng), "place": place(rng)}
    about = rng.choice((
        "", "", "", "", " about {hero}", " about {hero} and her {animal}", " about {hero} and his {animal}",
        " about my {animal}", " about a boy named {hero}", " about a girl called {hero}", " about the {place}",
        " about a boy named {hero} and a {animal}", " about {hero} in the {place}",
        " about {hero} and a {animal} in the {place}",
    ))  # fmt: skip
    prompt = rng.choice((
        "story{about}", "a story{about}", "story{about} please", "a short story{about}", "tell me a story{about}",
        "Tell me a story{about}", "Tell me a story{about}.", "I want to hear a story{about}", "Write a story{about}",
        "Can you tell me a story{about}?", "Can you tell me a bedtime story{about}?", "please tell a story{about}",
        "do you know a story{about}?", "let me hear a story{about}", "I would like a story{about}", "one story{about}!",
        "write me a little story{about}", "another story{about}", "a bedtime story{about} please",
    )).format(about=about.format(**cast))  # fmt: skip
    return _kept(prompt, tell(rng, cast))


def _named_program(rng: random.Random) -> Example:
    """A function that is named rather than described, or described by what it is for."""
    names, does, body, docs, call, result = rng.choice((
        (("add(a, b)", "add", "sum of two numbers"), "adds two numbers", "def add(a, b): a + b", "a plus b",
         "add(2, 3)", "5"),
        (("subtract(a, b)", "subtract"), "subtracts two numbers", "def subtract(a, b): a - b", "a minus b",
         "subtract(5, 2)", "3"),
        (("multiply(a, b)", "multiply"), "multiplies two numbers", "def multiply(a, b): a * b", "a times b",
         "multiply(2, 3)", "6"),
        (("square(x)", "square"), "squares a number", "def square(x): x * x", "x times x", "square(3)", "9"),
        (("double(x)", "double"), "doubles a number", "def double(x): x * 2", "x times 2", "double(3)", "6"),
        (("is_even(x)", "is_even", "even number"), "checks if a number is even", "def is_even(x): x % 2 == 0",
         "whether x is even", "is_even(4)", "True"),
        (("is_odd(x)", "is_odd", "odd number"), "checks if a number is odd", "def is_odd(x): x % 2 == 1",
         "whether x is odd", "is_odd(4)", "False"),
        (("largest(items)", "largest", "maximum of a list"), "returns the maximum of a list",
         "def largest(items): max(items)", "the largest of items", "largest([1, 4, 2])", "4"),
        (("total(items)", "total", "sum of a list"), "sums a list", "def total(items): sum(items)",
         "the sum of items", "total([1, 4, 2])", "7"),
        (("length(items)", "length"), "counts the items of a list", "def length(items): len(items)",
         "the number of items", "length([3, 1, 2])", "3"),
        (("backwards(items)", "backwards", "reverse"), "reverses a string", "def backwards(items): items[::-1]",
         "items from the last to the first", "backwards('abc')", "'cba'"),
    ))  # fmt: skip
    ways: tuple[str, ...] = (
        "write a function {name}",
        "python {name} function",
        "{name} function in python",
        "python function {name}",
        "write the function {name} in Python",
        "Write {name} in Python.",
        "code for {name} in python",
    )
    if rng.random() < 0.5:
        ways = (
            "Write a Python function that {does}.", "Write a Python function that {does}", "python code that {does}",
            "Can you write a small Python function that {does}?", "a function that {does}",
            "please write me a function that {does}", "how do I write a function that {does}?",
        )  # fmt: skip
    head, expression = body.split(": ", 1)
    code = f'{head}:\n    """Return {docs}.\n\n    >>> {call}\n    {result}\n    """\n    return {expression}'
    return _kept(rng.choice(ways).format(name=rng.choice(names), does=does), f"```python\n{code}\n```")


_MANNERS = {
    "feeling": ("how are you", "how's it going?", "how do you do", "what's up?", "how are things", "you ok?",
                "how are you feeling?", "how is it going", "are you ok?", "how was your day?", "all good?"),
    "farewell": ("see you later", "good night", "see you tomorrow", "I have to go, bye", "bye bye", "cya", "ciao bye",
                 "see you soon!", "have a nice day", "ok bye", "until next time", "I'm off, goodbye"),
    "thanks": ("thx", "cool, thanks", "perfect, thank you", "ok thank you", "nice, thanks!", "wow, thank you", "ty",
               "that was helpful, thanks", "great help, thanks a lot", "good job, thank you"),
    "identity": ("are you a robot", "are you human?", "are you an AI?", "are you a computer?", "what model are you?",
                 "Who am I talking to?", "are you a chatbot?", "tell me about yourself", "introduce yourself",
                 "what is this?", "who made you?", "are you a language model?", "what are you called?", "whats ur name"),
    "ability": ("what are you good at?", "what can i ask you", "what are you able to do", "what are your skills",
                "list your skills", "show me your skills", "what do you know?", "give me examples", "what can I try?",
                "what should I ask?", "options?", "menu", "how does this work?", "what can u do"),
    "greeting": ("yo", "hiya", "good evening", "good afternoon", "hello, nice to meet you", "Hello world", "hi!!",
                 "greetings", "good day", "hey there", "hi all", "hello computer", "howdy"),
    "world": ("you are stupid", "shut up", "I hate you", "you suck", "idiot", "that is wrong", "you are wrong", "boring",
              "why?", "are you dumb?", "go away", "what a bad model", "damn", "this is useless", "no", "yes",
              "are you sure?", "more", "again", "you are so slow", "fool", "what the hell", "crap"),
}  # fmt: skip


def _manners(rng: random.Random) -> Example:
    kind = rng.choice(list(_MANNERS))
    said = rng.choice(_MANNERS[kind])
    said = rng.choice((said, said, said.capitalize(), said.lower(), f"{said.rstrip('?!.')}!", said.rstrip("?")))
    return _kept(said, REPLIES[kind])


WIDER: dict[Callable[[random.Random], Example], float] = {
    _word_problem: 11, _sort: 10, _maximum: 6, _filter: 7, _compare: 6, _calendar: 9, _weekday: 6, _edit: 11,
    _capitals: 3, _remove: 3, _count: 6, _table: 5, _json: 5, _story: 5, _talk: 7, _declined: 6, _double: 5,
    _sum: 12, _units: 4, _short_story: 7, _named_program: 7, _manners: 9,
}  # fmt: skip
