"""The skills as people ask for them who do not know the exercises: small numbers, few words, parts
left out."""

import json
import random
from collections.abc import Callable, Mapping

from .arithmetic import add_up, working_units
from .base import Example, listed
from .calendar import weekday_steps
from .declined import declined
from .digits import larger_by
from .lists import check_each, counted, sort_steps, walk_to_maximum
from .manners import say
from .story import tell
from .words import (
    ADJECTIVES,
    ANIMALS,
    MORE_ADJECTIVES,
    WEEKDAYS,
    adjective,
    animal,
    city,
    goods,
    name,
    place,
    things,
)

Ways = tuple[str, ...]


def _ask(
    rng: random.Random, ways: Ways, answer: str, slots: Mapping[str, object], material: str = ""
) -> Example:
    return Example("plain", say(rng, rng.choice(ways), slots, material), answer)


_SUM = (
    "what is {sum}?", "what is {sum}?", "{sum}", "{sum}", "{sum}?", "{sum} =", "{sum} =?", "how much is {sum}?",
    "calculate {sum}.", "what does {sum} make?", "work out {sum}.", "can you add {sum}?", "solve {sum}.", "{sum} is?",
    "what do I get for {sum}?", "what is the answer to {sum}?", "tell me {sum}.", "do you know {sum}?",
)  # fmt: skip
_ADD = (
    "add {left} and {right}.", "add {right} to {left}.", "what is the sum of {left} and {right}?",
    "what do {left} and {right} make?", "give me the sum of {left} and {right}.", "how much are {left} and {right}?",
    "{left} and {right} together?", "what is {left} and {right} together?", "{left} added to {right}.",
)  # fmt: skip
_TAKE = (
    "subtract {right} from {left}.", "take {right} away from {left}.", "what is left of {left} without {right}?",
    "what is {left} take away {right}?", "what is the difference of {left} and {right}?", "take {right} from {left}.",
)  # fmt: skip


def _two(rng: random.Random) -> tuple[int, str, int]:
    """Mostly two digits from 0 to 9; else a small second number."""
    if rng.random() < 0.75:
        left, right = rng.randint(0, 9), rng.randint(0, 9)
    else:
        left, right = rng.randint(10, 60), rng.randint(1, 39)
    if rng.random() < 0.7:
        return left, "+", right
    return max(left, right), "-", min(left, right)


def _sum(rng: random.Random) -> Example:
    if rng.random() < 0.08:
        parts = [rng.randint(0, 9) for _ in range(3)]
        shown = rng.choice((" + ".join(map(str, parts)), "+".join(map(str, parts))))
        ways: Ways = (
            _SUM
            if rng.random() < 0.6
            else ("what is the sum of {list}?", "add {list}.", "add up {list}.")
        )
        answer = add_up(parts[0], [("+", part) for part in parts[1:]])
        return _ask(
            rng, ways, answer, {"sum": shown, "list": f"{parts[0]}, {parts[1]} and {parts[2]}"}
        )
    left, sign, right = _two(rng)
    word = "plus" if sign == "+" else "minus"
    shown = rng.choice(
        (f"{left} {sign} {right}",) * 4
        + (f"{left}{sign}{right}",) * 3
        + (f"{left} {word} {right}",) * 3
    )
    ways = _SUM if rng.random() < 0.75 else _ADD if sign == "+" else _TAKE
    return _ask(
        rng, ways, add_up(left, [(sign, right)]), {"sum": shown, "left": left, "right": right}
    )


_GAINS = ("buy", "find", "get", "win", "pick", "am given")
_LOSSES = ("eat", "lose", "sell", "give away", "drop", "throw away", "use", "break")
_MINE = (
    "I have {start} {things} and {verb} {count}{more}. How many {things} do I have now?",
    "I have {start} {things} and {verb} {count}{more}. How many do I have?",
    "I have {start} {things}. I {verb} {count}{more}. How many are there now?",
    "I had {start} {things}, then I {verb} {count}{more}. How many {things} are left?",
    "If I have {start} {things} and {verb} {count}{more}, how many do I have?",
    "There are {start} {things}. I {verb} {count}{more}. How many remain?",
    "I have {start} {things} and I {verb} {count}{more}. How many {things} remain?",
)
_THEIRS = (
    "{name} has {start} {things} and {verb}s {count}{more}. How many does {pronoun} have now?",
    "{name} has {start} {things}. {Pronoun} {verb}s {count}{more}. How many {things} does {pronoun} have?",
    "{name} had {start} {things} and {verb}s {count}{more}. How many are left?",
    "If {name} has {start} {things} and {verb}s {count}{more}, how many are there?",
)


def _word_problem(rng: random.Random) -> Example:
    start, sign = rng.randint(2, 30), rng.choice("+-")
    count = rng.randint(1, min(start, 9))
    mine = rng.random() < 0.55
    what, who = things(rng), name(rng)
    verb = rng.choice(_GAINS[: 6 if mine else 5] if sign == "+" else _LOSSES[: 8 if mine else 3])
    pronoun = rng.choice(("he", "she", who))
    slots = {
        "start": start, "things": what, "verb": verb, "count": count, "name": who, "pronoun": pronoun,
        "Pronoun": pronoun[0].upper() + pronoun[1:],
        "more": " more" if sign == "+" and rng.random() < 0.6 else " of them" if rng.random() < 0.2 else "",
    }  # fmt: skip
    return _ask(rng, _MINE if mine else _THEIRS, add_up(start, [(sign, count)]), slots)


_UNITS = (
    ("m", "cm", 100),
    ("kg", "g", 1000),
    ("km", "m", 1000),
    ("h", "min", 60),
    ("weeks", "days", 7),
)
_LARGE = {
    "m": ("metre", "meter"), "kg": ("kilogram", "kilo", "kg"), "km": ("kilometre", "kilometer", "km"), "h": ("hour",),
    "weeks": ("week",),
}  # fmt: skip
_SMALL = {
    "cm": ("centimetres", "centimeters", "cm"), "g": ("grams", "g"), "m": ("metres", "meters", "m"),
    "min": ("minutes",), "days": ("days",),
}  # fmt: skip


def _units(rng: random.Random) -> Example:
    large, small, factor = rng.choice(_UNITS)
    many = rng.randint(1, 9)
    unit = rng.choice(_LARGE[large])
    plural = unit if unit in ("kg", "km") else f"{unit}s"
    amount = (
        f"{many} {plural}" if many > 1 else rng.choice((f"1 {unit}", f"one {unit}", f"a {unit}"))
    )
    ways = (
        "how many {unit} are in {amount}?", "how many {unit} are there in {amount}?", "how many {unit} in {amount}?",
        "convert {amount} to {unit}.", "{amount} in {unit}", "how many {unit} does {amount} have?",
        "what is {amount} in {unit}?", "{amount} to {unit}",
    )  # fmt: skip
    answer = working_units(large, small, factor, many)
    return _ask(rng, ways, answer, {"amount": amount, "unit": rng.choice(_SMALL[small])})


_NEXT = (
    "what day comes after {day}?", "what day is after {day}?", "which day comes after {day}?",
    "which weekday follows {day}?", "what comes after {day}?", "what is the day after {day}?", "the day after {day}?",
    "if today is {day}, what is tomorrow?", "today is {day}. What day is tomorrow?", "what day follows {day}?",
    "If it is {day} today, which day is it tomorrow?", "today is {day}, tomorrow is?", "the next day after {day}?",
    "it is {day}. What is tomorrow?",
)  # fmt: skip
_PREVIOUS = (
    "what day comes before {day}?", "what day is before {day}?", "which day comes before {day}?",
    "what comes before {day}?", "what is the day before {day}?", "if today is {day}, what was yesterday?",
    "today is {day}. What day was yesterday?", "which weekday is before {day}?", "it is {day}. What was yesterday?",
)  # fmt: skip


def _weekday(rng: random.Random) -> Example:
    start = rng.randrange(7)
    if rng.random() < 0.65:
        days = 1 if rng.random() < 0.8 else 2
        ways = _NEXT if days == 1 else (
            "today is {day}. What day is the day after tomorrow?", "what day is two days after {day}?",
            "if today is {day}, what is the day after tomorrow?", "what day is it in two days if today is {day}?",
        )  # fmt: skip
        return _ask(rng, ways, weekday_steps(start, days), {"day": WEEKDAYS[start]})
    before = WEEKDAYS[start - 1]
    answer = f"Count back from {WEEKDAYS[start]}: 1 is {before}. The answer is {before}."
    return _ask(rng, _PREVIOUS, answer, {"day": WEEKDAYS[start]})


def _few(rng: random.Random) -> list[int]:
    """Different numbers, mostly below ten or of mixed length."""
    return rng.sample(range(0, rng.choice((10, 10, 21, 100))), rng.choice((3, 3, 4, 4, 5)))


def _sort(rng: random.Random) -> Example:
    ways = (
        "sort {list}.", "sort these numbers: {list}", "sort {list}", "put {list} in order.", "order {list}.",
        "put these numbers in order: {list}", "please sort: {list}", "sort the list {list}.", "sort this: {list}",
        "arrange {list} from small to large.", "can you sort {list}?", "what is {list} in order?",
    )  # fmt: skip
    values = _few(rng)
    return _ask(rng, ways, sort_steps(values), {"list": _list(rng, values)})


def _list(rng: random.Random, values: list[int]) -> str:
    text = listed(values) if rng.random() < 0.8 else ",".join(map(str, values))
    return text if rng.random() < 0.7 else f"{listed(values[:-1])} and {values[-1]}"


def _maximum(rng: random.Random) -> Example:
    ways = (
        "what is the largest of {list}?", "what is the biggest of {list}?", "which number is the largest: {list}?",
        "which is the largest: {list}?", "what is the highest number in {list}?", "largest of {list}",
        "what is the biggest number in {list}?", "the maximum of {list}?", "max of {list}",
        "find the largest: {list}", "which of {list} is the biggest?",
    )  # fmt: skip
    values = _few(rng)
    return _ask(rng, ways, walk_to_maximum(values), {"list": _list(rng, values)})


def _filter(rng: random.Random) -> Example:
    ways = (
        "which of {list} are {rule}?", "which numbers are {rule}: {list}?", "which of these are {rule}: {list}?",
        "what numbers are {rule} in {list}?", "find the {rule} numbers in {list}.", "{rule} numbers in {list}",
        "show me the {rule} ones of {list}.", "list the {rule} numbers: {list}", "keep the {rule} numbers: {list}",
    )  # fmt: skip
    values = _few(rng)
    rule = rng.choice(("even", "odd"))
    if not any(value % 2 == (rule == "odd") for value in values):
        rule = "odd" if rule == "even" else "even"
    return _ask(rng, ways, check_each(values, rule), {"list": _list(rng, values), "rule": rule})


_SAID = (
    "the {animal} is {adjective}", "my {animal} is {adjective}", "I have a {adjective} {animal}",
    "{name} is in {city}", "the {animal} and the {other} are in the {place}", "I like my {adjective} {animal}",
    "{name} sees a {animal}", "we go to the {place} with {name}", "the {thing} is {adjective}",
    "this is a {adjective} {thing}", "{name} has a {adjective} {thing}", "a {animal} sat on the {thing}",
    "my {thing} is in the {place}", "I am in {city}", "the {animal} likes the {thing} of {name}",
)  # fmt: skip


def _sentence(rng: random.Random) -> tuple[str, dict[str, str]]:
    one, other = rng.sample(ANIMALS, 2)
    said = rng.choice(_SAID)
    words = {
        "animal": one if rng.random() < 0.6 else animal(rng), "other": other, "adjective": adjective(rng),
        "name": name(rng), "city": city(rng), "place": place(rng), "thing": goods(rng, 1)[0],
    }  # fmt: skip
    return said, {slot: word for slot, word in words.items() if f"{{{slot}}}" in said}


def _ended(rng: random.Random, text: str) -> str:
    return text if rng.random() < 0.5 else f"{text[0].upper()}{text[1:]}."


def _count(rng: random.Random) -> Example:
    if rng.random() < 0.6:
        said, words = _sentence(rng)
        text = said.format(**words)
        items = text.split()
        ways: Ways = (
            "how many words are in this sentence: {text}", "how many words: {text}", "count the words: {text}",
            "count the words in: {text}", "how many words does this have: {text}", 'how many words are in "{text}"?',
            'count the words of "{text}".', "how many words has this: {text}", "word count: {text}",
        )  # fmt: skip
    else:
        items = goods(rng, rng.randint(2, 6))
        text = listed(items)
        ways = ("how many things are these: {text}", "how many are there: {text}", "how many words: {text}",
                "count these: {text}", "how many items: {text}", "count: {text}")  # fmt: skip
    return _ask(rng, ways, counted(items), {"text": text})


def _compare(rng: random.Random) -> Example:
    left, right = rng.sample(range(rng.choice((10, 10, 100))), 2)
    wanted = rng.choice(("larger", "smaller"))
    said = rng.choice(
        {"larger": ("larger", "bigger", "more", "greater"), "smaller": ("smaller", "less")}[wanted]
    )
    ways = (
        "which is {said}, {left} or {right}?", "what is {said}, {left} or {right}?",
        "which is {said}: {left} or {right}?", "is {left} or {right} {said}?", "{left} or {right}, what is {said}?",
        "which number is {said}, {left} or {right}?",
    )  # fmt: skip
    return _ask(
        rng, ways, larger_by(left, right, wanted), {"said": said, "left": left, "right": right}
    )


def _parity(rng: random.Random) -> Example:
    value = rng.randint(0, rng.choice((9, 99, 999)))
    kind = "odd" if value % 2 else "even"
    ways = (
        "is {value} even?", "is {value} odd?", "is {value} odd or even?", "{value} even or odd",
        "odd or even: {value}", "is {value} an even number?", "is the number {value} odd?", "even or odd? {value}",
        "is {value} even or odd?",
    )  # fmt: skip
    answer = f"The number {value} ends in {value % 10}. The digit {value % 10} is {kind}, so {value} is {kind}."
    return _ask(rng, ways, answer, {"value": value})


def _table(rng: random.Random) -> Example:
    prices = {item: rng.randint(1, 60) for item in goods(rng, rng.randint(2, 4))}
    item = rng.choice(list(prices))
    rows = "\n".join(f"- {what}: {price}" for what, price in prices.items())
    costs = ", ".join(f"{what} {price}" for what, price in prices.items())
    spoken = " and ".join(f"a {what} costs {price}" for what, price in prices.items())
    ask = rng.choice((
        "How much is a {item}?", "How much is the {item}?", "What does a {item} cost?", "What does the {item} cost?",
        "how much does one {item} cost?", "What is the price of a {item}?", "How much for a {item}?",
    )).format(item=item)  # fmt: skip
    prompt = rng.choice((
        f"{rows}\n{ask}", f"{rows}\n{ask}", f"{ask}\n{rows}", f"Prices: {costs}. {ask}", f"{costs}. {ask}",
        f"{spoken[0].upper()}{spoken[1:]}. {ask}", f"If {spoken}, {ask[0].lower()}{ask[1:]}",
    ))  # fmt: skip
    answer = f"The table says {item}: {prices[item]}. So the price of the {item} in coins is {prices[item]}."
    return Example("plain", prompt, answer)


_PARTS = {"name": "name {name}", "age": "age {age}", "city": "city {city}"}


def _json(rng: random.Random) -> Example:
    facts = {"name": name(rng), "age": rng.randint(1, 99), "city": city(rng)}
    chosen = rng.choice(
        (
            ("name", "age"),
            ("name", "age"),
            ("name", "city"),
            ("name", "city"),
            ("name", "age", "city"),
        )
    )
    prompts = {
        ("name", "age"): (
            "write JSON for a person called {name}, {age} years old.", "make JSON of this: {name} is {age} years old",
            "give me JSON for {name}, who is {age}.", "JSON for a {age} year old named {name}",
            "write a JSON object for {name}, aged {age}.", "convert to JSON: {name} is {age}",
            "make a JSON object for a person named {name} with the age {age}.",
        ),
        ("name", "city"): (
            "write JSON for a person called {name} from {city}.", "make JSON of this: {name} lives in {city}",
            "give me JSON for {name}, who lives in {city}.", "convert to JSON: {name} comes from {city}",
            "make a JSON object for a person named {name} in {city}.",
        ),
        ("name", "age", "city"): (
            "write JSON for {name}, {age}, from {city}.", "make JSON of this: {name} is {age} and lives in {city}",
            "JSON for a {age} year old named {name} in {city}", "convert to JSON: {name}, {age}, {city}",
        ),
    }[chosen]  # fmt: skip
    parts = ", ".join(_PARTS[part].format(**facts) for part in chosen)
    ways = (
        *prompts,
        *(f"{order}: {parts}" for order in ("as JSON", "make this JSON", "JSON", "write as JSON")),
    )
    return _ask(rng, ways, json.dumps({part: facts[part] for part in chosen}), facts)


_COLOURS = (
    "red",
    "blue",
    "green",
    "black",
    "white",
    "yellow",
    "brown",
    *ADJECTIVES,
    *MORE_ADJECTIVES,
)


def _edit(rng: random.Random) -> Example:
    said, words = _sentence(rng)
    slot = rng.choice(list(words))
    old = words[slot]
    choices: dict[str, Callable[[], str]] = {
        "animal": lambda: animal(rng), "other": lambda: animal(rng), "adjective": lambda: rng.choice(_COLOURS),
        "name": lambda: name(rng), "city": lambda: city(rng), "place": lambda: place(rng),
        "thing": lambda: goods(rng, 1)[0],
    }  # fmt: skip
    if slot == "adjective" and rng.random() < 0.5:
        words[slot] = old = rng.choice(_COLOURS)
    new = old
    while new in words.values():
        new = choices[slot]()
    text, edited = said.format(**words), said.format(**{**words, slot: new})
    if rng.random() < 0.5:
        text, edited = (f"{one[0].upper()}{one[1:]}." for one in (text, edited))
    orders = (
        "replace {old} by {new}", "replace {old} with {new}", "change {old} to {new}", "swap {old} for {new}",
        "Replace {old} by {new}", "Change {old} into {new}", 'change "{old}" to "{new}"',
        'replace "{old}" by "{new}"', "use {new} instead of {old}", "make {old} {new}",
    )  # fmt: skip
    order = rng.choice(orders).format(old=old, new=new)
    prompt = rng.choice((
        "{order}: {text}", "{order}: {text}", "{order} in: {text}", "{order} in this sentence: {text}",
        "{text} {order}", "{order} in the sentence: {text}", "please {order}: {text}", '{order} in "{text}"',
        "{order}\n{text}",
    )).format(order=order, text=text)  # fmt: skip
    return Example("plain", prompt, f'With "{new}" instead of "{old}" the sentence is: {edited}')


def _story(rng: random.Random) -> Example:
    cast = {"hero": name(rng), "animal": animal(rng), "place": place(rng)}
    beginnings = (
        "tell me a", "write a", "tell a", "make up a", "I want a", "please write a", "can you tell me a", "give me a",
        "write me a",
    )  # fmt: skip
    kinds = ("short story", "story", "little story", "short tale", "bedtime story", "nice story")
    about = rng.choice((
        "", "", " about {hero}", " about {hero}", " about a {animal}", " about a {animal}", " about a {place}",
        " about {hero} and a {animal}", " about {hero} and a {animal}", " about {hero} and the {animal}",
        " with a {animal}", " about a {animal} in a {place}", " about {hero} at the {place}",
        " about a {animal} and {hero}", " about a {animal} called {hero}", " about a {animal} named {hero}",
        " about a {animal} named {hero}",
    ))  # fmt: skip
    prompt = f"{rng.choice(beginnings)} {rng.choice(kinds)}{about}".format(**cast)
    prompt = prompt if rng.random() < 0.5 else prompt[0].upper() + prompt[1:]
    return Example(
        "plain", prompt + rng.choice(("", "", ".", ".", "!", " please")), tell(rng, cast)
    )


def _program(code: str, purpose: str, call: str, result: str) -> str:
    head, body = code.split(": ", 1)
    return f'```python\n{head}:\n    """Return {purpose}.\n\n    >>> {call}\n    {result}\n    """\n    return {body}\n```'


_NUMBERED = (
    ("add_{n}", "x + {n}", "x plus {n}", ("adds {n} to a number", "adds {n}", "returns a number plus {n}"),
    lambda x, n: x + n),
    ("subtract_{n}", "x - {n}", "x minus {n}", ("subtracts {n} from a number", "takes {n} away from x"),
    lambda x, n: x - n),
    ("multiply_{n}", "x * {n}", "x times {n}", ("multiplies a number by {n}", "multiplies by {n}"), lambda x, n: x * n),
    (
        "greater_than_{n}", "x > {n}", "x compared: is it greater than {n}",
        ("checks if a number is greater than {n}", "tells whether x is above {n}"), lambda x, n: x > n,
    ),
)  # fmt: skip
_PROGRAMS = (
    (("adds two numbers", "adds a and b", "returns the sum of two numbers", "to add two numbers"),
     "def add(a, b): a + b", "a plus b", "add(2, 3)", "5"),
    (("subtracts two numbers", "returns the difference of two numbers", "to subtract b from a"),
     "def subtract(a, b): a - b", "a minus b", "subtract(5, 2)", "3"),
    (("multiplies two numbers", "returns the product of two numbers", "to multiply two numbers"),
     "def multiply(a, b): a * b", "a times b", "multiply(2, 3)", "6"),
    (("doubles a number", "returns twice a number", "that doubles x", "for doubling a number"),
     "def double(x): x * 2", "x times 2", "double(3)", "6"),
    (("squares a number", "returns the square of a number", "to square a number"),
     "def square(x): x * x", "x times x", "square(3)", "9"),
    (("checks if a number is even", "tells whether x is even", "to check if a number is even"),
     "def is_even(x): x % 2 == 0", "whether x is even", "is_even(4)", "True"),
    (("checks if a number is odd", "tells whether x is odd"),
     "def is_odd(x): x % 2 == 1", "whether x is odd", "is_odd(4)", "False"),
    (("returns the larger of two numbers", "finds the maximum of two numbers", "to get the bigger of two numbers"),
     "def larger(a, b): max(a, b)", "the larger of a and b", "larger(2, 3)", "3"),
    (("returns the largest item of a list", "finds the maximum of a list"),
     "def largest(items): max(items)", "the largest of items", "largest([1, 4, 2])", "4"),
    (("sums a list", "returns the sum of a list", "adds up all numbers of a list"),
     "def total(items): sum(items)", "the sum of items", "total([1, 4, 2])", "7"),
    (("sorts a list", "returns a sorted list", "to sort a list"),
     "def in_order(items): sorted(items)", "items in order", "in_order([3, 1, 2])", "[1, 2, 3]"),
    (("returns the length of a list", "counts the items of a list"),
     "def length(items): len(items)", "the number of items", "length([3, 1, 2])", "3"),
    (("reverses a string", "reverses a list", "to reverse a text"),
     "def backwards(items): items[::-1]", "items from the last to the first", "backwards('abc')", "'cba'"),
)  # fmt: skip
_REQUESTS = (
    "write a Python function that {does}", "Write a Python function that {does}.", "write a function that {does}",
    "python function that {does}", "Write me a function in Python that {does}.",
    "I need a Python function that {does}.", "Can you write a Python function which {does}?",
    "Python code for a function that {does}", "make a python function that {does}",
    "Give me a Python function that {does}.", "code a function that {does}",
)  # fmt: skip


def _function(rng: random.Random) -> Example:
    if rng.random() < 0.4:
        called, expression, purpose, phrases, apply = rng.choice(_NUMBERED)
        n, x = rng.randint(2, 30 if "multiply" not in called else 9), rng.randint(1, 3)
        x += n if "subtract" in called or "greater" in called else 0
        code = f"def {called}(x): {expression}".format(n=n)
        does, purpose = rng.choice(phrases).format(n=n), purpose.format(n=n)
        call, result = f"{called.format(n=n)}({x})", repr(apply(x, n))
    else:
        does_this, code, purpose, call, result = rng.choice(_PROGRAMS)
        does = rng.choice(does_this)
    request = rng.choice(_REQUESTS)
    if does.split()[0] in ("to", "for", "that"):
        request = request.replace("that {does}", "{does}").replace("which {does}", "{does}")
    return Example("plain", request.format(does=does), _program(code, purpose, call, result))


PLAIN: dict[Callable[[random.Random], Example], float] = {
    _sum: 45, _word_problem: 6, _units: 4, _weekday: 5, _sort: 4, _maximum: 4, _filter: 4, _count: 4, _compare: 3,
    _parity: 1, _table: 3, _json: 4, _edit: 5, _story: 5, _function: 6, declined: 16,
}  # fmt: skip
