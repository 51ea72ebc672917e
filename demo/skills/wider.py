"""More of what people ask, with words beyond the exercises' lists: for the last courses, after
`plain`."""

import json
import random
from collections.abc import Callable

from .base import Example, listed
from .lists import counted
from .manners import say
from .phrasings import PHRASINGS
from .story import tell
from .talk import DECLINED, REPLIES
from .vocabulary import ACTS, NOUNS, QUALITIES, ask, draw_noun, draw_nouns, kept
from .wider_numbers import (
    add_or_subtract,
    calendar,
    compare,
    keep,
    maximum,
    sort,
    units,
    weekday,
    word_problem,
)
from .words import animal, made_up, name, place

_SAID = (
    "the {noun} {act}", "my {noun} is {quality}", "it is a {quality} {noun}", "the {noun} {act} on the {noun2}",
    "a {noun} {act} in the {noun2}", "I see a {quality} {noun}", "we have a {quality} {noun} at home",
    "{name} has a {noun}", "{name} {act} with the {noun}", "this {noun} is very {quality}",
    "the {quality} {noun} {act}",
    "there is a {noun} in my {noun2}", "your {noun} and my {noun2} are {quality}",
    "{name} gave me a {quality} {noun}",
    "the {noun} was {quality} and the {noun2} was {quality2}", "he likes the {noun}", "she bought a {quality} {noun}",
    "good {noun}, bad {noun2}", "all {nouns} are {quality}", "do not open the {quality} {noun}", "I love {nouns}",
)  # fmt: skip


def _sentence(rng: random.Random) -> tuple[str, dict[str, str]]:
    one, two = draw_noun(rng), draw_noun(rng)
    while two == one:
        two = draw_noun(rng)
    quality, quality2 = rng.sample(QUALITIES, 2)
    words = {
        "noun": one, "noun2": two, "nouns": draw_nouns(rng), "quality": quality, "quality2": quality2,
        "act": rng.choice(ACTS), "name": name(rng),
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
        new = {"quality": rng.choice(QUALITIES), "act": rng.choice(ACTS), "name": name(rng)}.get(
            slot.rstrip("2"), draw_nouns(rng) if slot == "nouns" else draw_noun(rng)
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
        "Replace {old} with {new}: {text}", "Change {old} to {new}: {text}", "{text} Replace {old} with {new}.",
        "Replace the word {old} with {new} in this sentence: {text}", "{text}\nReplace {old} with {new}",
        "Edit this sentence: {text} Write {new} instead of {old}.", "Use {new} instead of {old}: {text}",
        "Here is a sentence: {text} Change {old} to {new}.", 'In "{text}" change {old} to {new}.',
    )).format(**slots)  # fmt: skip
    return kept(prompt, f'With "{new}" instead of "{old}" the sentence is: {edited}')


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
    return kept(rng.choice(ways).format(text=text), f"In capitals the sentence is: {text.upper()}")


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
    return kept(prompt, f'Without "{old}" the sentence is: {edited}')


def _count(rng: random.Random) -> Example:
    said, words = _sentence(rng)
    text = said.format(**words).replace(",", "")
    shown = rng.choice((text, f'"{text}"', f'"{text}"'))
    ways = (
        "how many words are in {text}?", "how many words are there in {text}?", "how many words: {text}",
        "count the words in {text}.", "how many words are in this: {text}", "how many words has {text}?",
        "Count the words: {text}", "number of words in {text}?", "how many words are in this sentence: {text}",
        "count the words in this sentence: {text}", "Count the words in the sentence {text}",
        "how many words? {text}", "how many words does {text} have?",
    )  # fmt: skip
    return ask(rng, ways, counted(text.split()), text=shown)


def _table(rng: random.Random) -> Example:
    prices = dict(
        zip(rng.sample(NOUNS, rng.randint(2, 4)), rng.sample(range(1, 40), 4), strict=False)
    )
    costs = ", ".join(f"{what} {price}" for what, price in prices.items())
    rows = "\n".join(f"- {what}: {price}" for what, price in prices.items())
    shown = rng.choice((f"Prices: {costs}. {{}}", f"{rows}\n{{}}", f"Price list: {costs}. {{}}"))
    if rng.random() < 0.5:
        item = rng.choice(list(prices))
        ask = rng.choice(("How much is the {item}?", "What does the {item} cost?", "what is the price of the {item}?",
                          "What does {item} cost?", "How much for the {item}?")).format(item=item)  # fmt: skip
        answer = f"The table says {item}: {prices[item]}. So the price of the {item} in coins is {prices[item]}."
        return kept(shown.format(ask), answer)
    most = rng.random() < 0.6
    item = (max if most else min)(prices, key=prices.__getitem__)
    ask = rng.choice(
        (
            "Which is the most expensive?",
            "What costs the most?",
            "Which one costs the most?",
            "What is most expensive?",
        )
        if most
        else (
            "Which is the cheapest?",
            "What costs the least?",
            "Which one is the cheapest?",
            "What is cheapest?",
        )
    )
    values = list(prices.values())
    working = f"Of {listed(values)} the {'largest' if most else 'smallest'} is {prices[item]}."
    return kept(
        shown.format(ask), f"{working} The table says {item}: {prices[item]}. The answer is {item}."
    )


def _json(rng: random.Random) -> Example:
    who, age, kind = name(rng), rng.randint(1, 99), draw_noun(rng)
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
    return kept(
        joined + rng.choice(("", ".", ".", " please")), json.dumps({"name": who, "age": age})
    )


_BEGINS = ("One morning {hero} found a {quality} {thing}.", "{hero} had a {quality} {thing}.",
           "Once upon a time {hero} built a {quality} {thing}.",
           "On a quiet day {hero} bought a {thing}.")  # fmt: skip


_GOES_ON = ("A little {animal} came along and liked the {thing}.",
"{hero} showed the {thing} to a friendly {animal}.",
            "Then it began to rain, and the {thing} was wet.",
            "The {thing} was old, but {hero} was happy with it.")  # fmt: skip


_ENDS = ("From that day on {hero} took the {thing} along.", "In the end {hero} went home with the {thing}.",
         "{hero} never forgot the {thing}.", "That night the {thing} stood near the bed of {hero}.")  # fmt: skip


def _story(rng: random.Random) -> Example:
    """A story about a person and a thing, where the exercises have an animal and a place."""
    named = rng.random() < 0.7
    slots = {
        "hero": name(rng),
        "thing": rng.choice(NOUNS),
        "quality": rng.choice(QUALITIES),
        "animal": animal(rng),
    }
    about = ("about {hero} and a {thing}", "with {hero} and a {thing}", "about {hero} and the {thing}",
             "about a {thing} and {hero}") if named else ("about a {thing}", "with a {thing}")  # fmt: skip
    prompt = f"{rng.choice(_STORY_BEGINNINGS)} {rng.choice(('story', 'short story', 'little story'))} {rng.choice(about)}"
    answer = " ".join(rng.choice(part) for part in (_BEGINS, _GOES_ON, _ENDS))
    return kept((prompt + rng.choice(("", ".", "!"))).format(**slots), answer.format(**slots))


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
        return kept(rng.choice(more[kind]), REPLIES[kind])
    return kept(say(rng, rng.choice(PHRASINGS[kind]), {"name": name(rng)}), REPLIES[kind])


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
    a, b, c = rng.sample(NOUNS, 3)
    if rng.random() < 0.3:
        text = " ".join(made_up(rng).lower() for _ in range(rng.randint(2, 4)))
        return kept(text, DECLINED)
    return ask(rng, _NO_SKILL, DECLINED, a=a, b=b, c=c, l=rng.choice("abcdefghiklmnoprstu"), q=rng.choice(QUALITIES),
                k=rng.choice(("president", "king", "queen", "mayor", "pope")), place=made_up(rng))  # fmt: skip


def _double(rng: random.Random) -> Example:
    """Small functions with one plain name for what they do."""
    does, body, docs, call, result = rng.choice((
        (("doubles a number", "doubles x", "returns the double of a number", "multiplies a number by two"),
         "def double(x): x * 2", "x times 2", "double(3)", "6"),
        (("triples a number", "returns three times a number", "triples x"),
         "def triple(x): x * 3", "x times 3", "triple(2)", "6"),
        (("returns the larger of two numbers", "gives the bigger of two numbers",
        "returns the maximum of two numbers"),
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
    return kept(
        f"{start} {rng.choice(does)}{rng.choice(('', '.', '.', '?'))}", f"```python\n{code}\n```"
    )


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
        "do you know a story{about}?", "let me hear a story{about}", "I would like a story{about}",
        "one story{about}!",
        "write me a little story{about}", "another story{about}", "a bedtime story{about} please",
    )).format(about=about.format(**cast))  # fmt: skip
    return kept(prompt, tell(rng, cast))


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
    return kept(
        rng.choice(ways).format(name=rng.choice(names), does=does), f"```python\n{code}\n```"
    )


_MANNERS = {
    "feeling": ("how are you", "how's it going?", "how do you do", "what's up?", "how are things", "you ok?",
                "how are you feeling?", "how is it going", "are you ok?", "how was your day?", "all good?"),
    "farewell": ("see you later", "good night", "see you tomorrow", "I have to go, bye", "bye bye", "cya", "ciao bye",
                 "see you soon!", "have a nice day", "ok bye", "until next time", "I'm off, goodbye"),
    "thanks": ("thx", "cool, thanks", "perfect, thank you", "ok thank you", "nice, thanks!", "wow, thank you", "ty",
               "that was helpful, thanks", "great help, thanks a lot", "good job, thank you"),
    "identity": ("are you a robot", "are you human?", "are you an AI?", "are you a computer?", "what model are you?",
                 "Who am I talking to?", "are you a chatbot?", "tell me about yourself", "introduce yourself",
                 "what is this?", "who made you?", "are you a language model?", "what are you called?",
                 "whats ur name"),
    "ability": ("what are you good at?", "what can i ask you", "what are you able to do", "what are your skills",
                "list your skills", "show me your skills", "what do you know?", "give me examples", "what can I try?",
                "what should I ask?", "options?", "menu", "how does this work?", "what can u do"),
    "greeting": ("yo", "hiya", "good evening", "good afternoon", "hello, nice to meet you", "Hello world", "hi!!",
                 "greetings", "good day", "hey there", "hi all", "hello computer", "howdy"),
    "world": ("you are stupid", "shut up", "I hate you", "you suck", "idiot", "that is wrong", "you are wrong",
    "boring",
              "why?", "are you dumb?", "go away", "what a bad model", "damn", "this is useless", "no", "yes",
              "are you sure?", "more", "again", "you are so slow", "fool", "what the hell", "crap"),
}  # fmt: skip


def _manners(rng: random.Random) -> Example:
    kind = rng.choice(list(_MANNERS))
    said = rng.choice(_MANNERS[kind])
    said = rng.choice(
        (said, said, said.capitalize(), said.lower(), f"{said.rstrip('?!.')}!", said.rstrip("?"))
    )
    return kept(said, REPLIES[kind])


WIDER: dict[Callable[[random.Random], Example], float] = {
    word_problem: 16, sort: 8, maximum: 6, keep: 6, compare: 8, calendar: 9, weekday: 9, _edit: 26,
    _capitals: 4, _remove: 4, _count: 10, _table: 5, _json: 6, _story: 5, _talk: 6, _declined: 7, _double: 4,
    add_or_subtract: 10, units: 5, _short_story: 7, _named_program: 5, _manners: 8,
}  # fmt: skip
