"""Numbers, dates and days in more of the words that people use."""

import random

from .arithmetic import add_up, working_units
from .base import Example, listed
from .calendar import weekday_steps
from .digits import larger_by
from .lists import check_each, sort_steps, walk_to_maximum
from .vocabulary import NOUNS, QUALITIES, ask, draw_noun, draw_nouns, kept
from .words import MONTHS, WEEKDAYS, name

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
    "{name} is {a} years old. How old will {name} be in {b} years?",
    "{name} read {a} pages on {day} and {b} pages on {day2}. How many pages did {name} read?",
    "{name} walked {a} km on {day} and {b} km on {day2}. How far is that in all?",
    "I bought {a} {colour} {things} and {b} {colour2} {things}. How many {things} do I have?",
    "We have {a} {things} at home and {b} in the {place}. How many {things} do we have?",
    "{name} picked {a} {things} and {other} picked {b}. How many did they pick?",
    "A bus has {a} people on it, {b} get on. How many people are on the bus?",
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
    "{name} is {a} years old. How old was {name} {b} years ago?",
    "{name} has {a} {things} and {other} has {b}. How many more does {name} have?",
    "I need {a} {things} and have {b}. How many do I still need?",
    "A book has {a} pages, and {name} has read {b}. How many pages are left?",
    "{a} {things} are in the {box}, {name} takes {b} of them. How many remain in the {box}?",
    "There were {a} {things} in the {place}. {name} ate {b}. How many are left?",
)


def word_problem(rng: random.Random) -> Example:
    sign = rng.choice("+-")
    a = rng.randint(2, 40)
    b = rng.randint(1, min(a, 30 if sign == "-" else 20))
    box, box2 = rng.sample(NOUNS, 2)
    day, day2 = rng.sample(WEEKDAYS, 2)
    slots = {
        "a": a, "b": b, "name": name(rng), "other": name(rng), "things": draw_nouns(rng), "place": draw_noun(rng),
        "box": box,
        "box2": box2, "money": rng.choice(("euros", "dollars", "coins", "pounds")), "day": day, "day2": day2,
        "colour": rng.choice(QUALITIES), "colour2": rng.choice(QUALITIES),
    }  # fmt: skip
    prompt = rng.choice(_GAIN if sign == "+" else _LOSS).format(**slots)
    return kept(prompt, add_up(a, [(sign, b)]))


def _mixed(rng: random.Random) -> list[int]:
    """Numbers of one and two digits side by side."""
    low, high = (
        rng.sample(range(10), rng.choice((1, 1, 2, 2, 3))),
        rng.sample(range(10, 100), rng.randint(1, 2)),
    )
    values = [*low, *high]
    if len(values) < 3:
        values.append(rng.choice([value for value in range(100) if value not in values]))
    rng.shuffle(values)
    return values if rng.random() < 0.75 else rng.sample(range(10), rng.choice((3, 4)))


def _shown(rng: random.Random, values: list[int]) -> str:
    last = rng.choice((" and ", " and ", " or ", ", ", ", ", ", "))
    return f"{listed(values[:-1])}{last}{values[-1]}"


def sort(rng: random.Random) -> Example:
    values = _mixed(rng)
    ways = (
        "sort {list}.", "sort {list}", "put these numbers in order: {list}", "put {list} in the right order.",
        "order these: {list}", "can you sort {list}?", "can you sort {list} from small to large?",
        "sort these from small to big: {list}", "Sort: {list}", "sort the numbers {list}.", "{list} sorted?",
        "arrange {list} in order.", "what is the order of {list}?", "sort these numbers: {list}",
    )  # fmt: skip
    return ask(rng, ways, sort_steps(values), list=_shown(rng, values).replace(" or ", " and "))


def maximum(rng: random.Random) -> Example:
    values = _mixed(rng)
    ways = (
        "what is the largest number in {list}?", "what is the biggest number: {list}?",
        "which is the biggest: {list}?",
        "find the largest of {list}.", "find the highest of {list}.", "biggest of {list}?",
        "which is largest: {list}?",
        "which number is the highest: {list}?", "maximum of {list}", "the largest of {list}?",
        "what is the maximum of {list}?",
    )  # fmt: skip
    return ask(rng, ways, walk_to_maximum(values), list=_shown(rng, values))


def keep(rng: random.Random) -> Example:
    values = _mixed(rng)
    rule = rng.choice(("even", "odd", "more", "more"))
    if rule == "more":
        bound = rng.choice((5, 10, 10, 20, 30, 50))
        if max(values) <= bound:
            values[rng.randrange(len(values))] = rng.randint(bound + 1, 99)
        said = (
            f"{rng.choice(('above', 'over', 'greater than', 'larger than', 'bigger than'))} {bound}"
        )
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
    return ask(
        rng,
        ways,
        check_each(values, rule),
        list=_shown(rng, values).replace(" or ", " and "),
        rule=said,
    )


def compare(rng: random.Random) -> Example:
    left, right = rng.sample(range(rng.choice((10, 30, 100))), 2)
    wanted = rng.choice(("larger", "smaller"))
    said = rng.choice(
        {"larger": ("larger", "bigger", "greater", "more"), "smaller": ("smaller", "less")}[wanted]
    )
    if rng.random() < 0.5:
        said = {"more": "greater", "less": "lower"}.get(said, said)
        ways: tuple[str, ...] = (
            "which is {said}, {left} or {right}?", "which number is {said}, {left} or {right}?",
            "what is {said}: {left} or {right}?", "which is the {said} number, {left} or {right}?",
            "{left} or {right}, which is {said}?", "which of {left} and {right} is {said}?",
            "{said}: {left} or {right}?",
        )  # fmt: skip
        return ask(rng, ways, larger_by(left, right, wanted), left=left, right=right, said=said)
    holds = left > right if wanted == "larger" else left < right
    ways = (
        "is {left} {said} than {right}?",
        "is {left} {said} than {right}?",
        "{left} is {said} than {right}, right?",
    )
    answer = f"{larger_by(left, right, wanted)} So {'yes' if holds else 'no'}."
    return ask(rng, ways, answer, left=left, right=right, said=said)


_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def calendar(rng: random.Random) -> Example:
    at = rng.randrange(12)
    month, after, before = MONTHS[at], MONTHS[(at + 1) % 12], MONTHS[at - 1]
    match rng.randrange(6):
        case 0:
            ways: tuple[str, ...] = (
                "what month comes after {month}?", "which month is after {month}?",
                "what is the month after {month}?",
                "what month follows {month}?",
            )  # fmt: skip
            return ask(
                rng, ways, f"After {month} comes {after}. The answer is {after}.", month=month
            )
        case 1:
            ways = (
                "what month comes before {month}?",
                "which month is before {month}?",
                "the month before {month}?",
            )
            return ask(
                rng, ways, f"Before {month} comes {before}. The answer is {before}.", month=month
            )
        case 2:
            ways = (
                "how many days has {month}?", "how many days are in {month}?", "how long is {month} in days?",
                "how many days are there in {month}?",
            )  # fmt: skip
            return ask(rng, ways, f"The answer is {_LENGTHS[at]} days.", month=month)
        case 3:
            date = rng.choice((f"{_LENGTHS[at]} {month}", f"{month} {_LENGTHS[at]}"))
            answer = f"{month} has {_LENGTHS[at]} days, so next is {after}. The date is 1 {after}."
            return ask(rng, _TOMORROW, answer, date=date)
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
            return ask(rng, ways, answer, date=date, days=days)


_TOMORROW = (
    "what date comes after {date}?", "what is the date after {date}?", "which date is after {date}?",
    "today is {date}. What is the date tomorrow?", "what is the day after {date}?", "which date follows {date}?",
)  # fmt: skip


def weekday(rng: random.Random) -> Example:
    start = rng.randrange(7)
    day, before = WEEKDAYS[start], WEEKDAYS[start - 1]
    if rng.random() < 0.45:
        ways: tuple[str, ...] = (
            "which day is before {day}?", "what weekday comes before {day}?", "the day before {day} is?",
            "what day was it before {day}?", "which weekday comes before {day}?", "what is one day before {day}?",
            "name the day before {day}.", "which day do we have before {day}?",
        )  # fmt: skip
        return ask(
            rng, ways, f"Count back from {day}: 1 is {before}. The answer is {before}.", day=day
        )
    if rng.random() < 0.3:
        back, ways = rng.choice((
            (True, ("tomorrow is {day}. What day is today?", "If tomorrow is {day}, what day is it today?",
                    "today is {day}. What day was yesterday?", "It is {day} today, so yesterday was?")),
            (False, ("yesterday was {day}. What day is today?", "If yesterday was {day}, what is today?",
                     "today is {day}. What day is tomorrow?", "It is {day}. Which day is tomorrow?")),
        ))  # fmt: skip
        answer = (
            f"Count back from {day}: 1 is {before}. The answer is {before}."
            if back
            else weekday_steps(start, 1)
        )
        return ask(rng, ways, answer, day=rng.choice((day, day, day.lower())))
    days = rng.choice((1, 1, 1, 2, 2, 3))
    ways = {
        1: ("day after {day}", "day after {day}?", "the day after {day}", "which day follows {day}?",
        "which day is after {day}?", "what is the day after {day}?",
            "what weekday comes after {day}?", "what day comes next after {day}?"),
        2: ("what day is two days after {day}?", "which day is 2 days after {day}?", "two days after {day} is?",
            "what weekday is it two days after {day}?", "which weekday comes two days after {day}?"),
        3: ("what day is three days after {day}?", "which day is 3 days after {day}?", "three days after {day} is?"),
    }[days]  # fmt: skip
    return ask(rng, ways, weekday_steps(start, days), day=rng.choice((day, day, day.lower())))


_ONES = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


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


def add_or_subtract(rng: random.Random) -> Example:
    """Sums in words, without spaces, or with the two numbers far from the sign."""
    sign = rng.choice("++-")
    low = rng.random() < 0.6
    a, b = (
        (rng.randint(0, 9), rng.randint(0, 9)) if low else (rng.randint(10, 69), rng.randint(1, 30))
    )
    a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    word = {"+": "plus", "-": "minus"}[sign]
    said: dict[str, object] = {"a": a, "b": b}
    if low and rng.random() < 0.35:
        said = {"a": _ONES[a], "b": _ONES[b]}
    answer = add_up(a, [(sign, b)])
    if rng.random() < 0.35:
        return ask(rng, _PAIRS[sign], answer, **said)
    joined = f"{said['a']} {word} {said['b']}" if said["a"] != a else rng.choice(
        (f"{a} {sign} {b}", f"{a}{sign}{b}", f"{a} {word} {b}")
    )  # fmt: skip
    return ask(rng, _SUMS, answer, sum=joined)


_BARE_UNITS = (
    ("m", "cm", 100, "metre", ("cm", "centimetres", "centimeters")), ("kg", "g", 1000, "kilogram", ("grams", "g")),
    ("km", "m", 1000, "kilometre", ("metres", "meters", "m")), ("h", "min", 60, "hour", ("minutes",)),
    ("weeks", "days", 7, "week", ("days",)),
)  # fmt: skip


def units(rng: random.Random) -> Example:
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
    return ask(
        rng, ways, working_units(large, small, factor, many), amount=amount, unit=rng.choice(units)
    )
