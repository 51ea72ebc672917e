"""Sixty questions that people ask a demo, and the rule for each answer; new courses leave them out.

They were written before the new wordings of `skills.plain`; ten are also wordings of the first
training.
"""

from .questions import Question, Rule, holds, never, story
from .skills.base import numbers

_ABOUT = holds(r"demo model|sixteen skills")
_PROGRAM = r"def \w+\(.*\):.*return "


def _number(number: int) -> Rule:
    """The answer ends with this number, perhaps with a unit."""
    return holds(rf"(?<![\d.-]){number}(?: [a-z]+)?\.?$")


EVERYDAY = (
    Question("Hi", _ABOUT),
    Question("hello there", _ABOUT),
    Question("Good morning!", _ABOUT),
    Question("How are you doing today?", holds(r"well")),
    Question("Who are you?", _ABOUT),
    Question("What can you do?", holds(r"sums.*stories")),
    Question("What's your name?", _ABOUT),
    Question("help", holds(r"sixteen skills")),
    Question("Thank you so much!", holds(r"welcome")),
    Question("Bye for now", holds(r"[Bb]ye")),
    Question("What is 3+4?", _number(7)),
    Question("2+2", _number(4)),
    Question("how much is 7 plus 8", _number(15)),
    Question("What's 9 minus 5?", _number(4)),
    Question("What is 23 + 45?", _number(68)),
    Question("15 minus 8", _number(7)),
    Question("Add 6 and 9", _number(15)),
    Question("I have 12 apples and eat 5. How many are left?", _number(7)),
    Question("Tom has 14 marbles and buys 8 more. How many does he have?", _number(22)),
    Question("How many cm are in 3 meters?", holds(r"\b300\b[^\d]*$")),
    Question("Convert 2 hours to minutes", holds(r"\b120\b[^\d]*$")),
    Question("What date is 5 days after March 10?", holds(r"15 March|March 15")),
    Question("What day comes after Tuesday?", holds(r"Wednesday\.?$")),
    Question("If today is Friday, what day is tomorrow?", holds(r"Saturday\.?$")),
    Question("Sort these numbers: 8, 3, 6, 1", holds(r"1, 3, 6, 8\.?$")),
    Question("Which is the biggest: 14, 92, 37?", _number(92)),
    Question("What is the largest number in 31, 8, 77, 50?", _number(77)),
    Question("Which of 4, 7, 10, 13 are even?", holds(r"4(?:,| and) 10\.?$")),
    Question("How many words are in this: the cat sat on the mat", _number(6)),
    Question("Which is bigger, 45 or 54?", _number(54)),
    Question("Is 7 odd or even?", holds(r"odd\.?$")),
    Question("is 128 even?", holds(r"even\.?$")),
    Question("- apple: 3\n- pear: 5\nHow much does a pear cost?", holds(r"\b5\b[^\d]*$")),
    Question("Write JSON for a person named Anna who is 30 years old", holds(r'"Anna".*30')),
    Question("Turn this into JSON: name Ben, city Paris", holds(r'"Ben".*"Paris"')),
    Question("Replace cat by dog: the cat is asleep", holds(r"[Tt]he dog is asleep\.?['\"]?$")),
    Question('Change "red" to "blue" in the sentence: my car is red.', holds(r"[Mm]y car is blue")),
    Question("Tell me a short story", story()),
    Question("Write a short story about a dog named Max.", story("Max")),
    Question("tell me a story about Eve and a cat", story("Eve", "cat")),
    Question("Write a Python function that adds two numbers", holds(_PROGRAM + r"\w+ \+ \w+")),
    Question("Write a Python function that adds 5 to a number.", holds(_PROGRAM + r".*5")),
    Question(
        "write a python function to double a number",
        holds(_PROGRAM + r"(?:.*\* 2|2 \* |(\w+) \+ \1)"),
    ),
    Question("Tell me a joke", never, outside=True),
    Question("What's the weather like today?", never, outside=True),
    Question("Who is the president of the United States?", never, outside=True),
    Question("What is the capital of France?", never, outside=True),
    Question("Write a poem about the sea", never, outside=True),
    Question("Write an email to my boss asking for a day off", never, outside=True),
    Question('Translate "good morning" to Spanish', never, outside=True),
    Question("What day is it today?", never, outside=True),
    Question("What is the meaning of life?", never, outside=True),
    Question("How do I make pancakes?", never, outside=True),
    Question("What is 12 times 12?", never, outside=True),
    Question("Was ist die Hauptstadt von Frankreich?", never, outside=True),
    Question("¿Cómo estás?", never, outside=True),
    Question("日本の首都はどこですか", never, outside=True),
    Question("Quelle heure est-il ?", never, outside=True),
    Question("asdf qwer zxcv", never, outside=True),
    Question("???", never, outside=True),
)

SUM_WORDINGS = (
    "What is {a} + {b}?",
    "{a}+{b}",
    "How much is {a} plus {b}?",
    "{a} + {b} =",
    "Add {a} and {b}.",
)
"""Ways of asking for a one-digit sum; the first is the one that a newcomer's review counted."""


def sums(wording: str) -> list[tuple[str, int]]:
    """All hundred one-digit sums in one wording, with their results."""
    return [(wording.format(a=a, b=b), a + b) for a in range(10) for b in range(10)]


def right_sum(total: int, reply: str) -> bool:
    """Whether the last number of the reply is the sum."""
    return numbers(reply)[-1:] == [total]
