"""Sixty questions that people ask a demo, and what an acceptable reply to each is; new courses leave them out.

They were written before the new wordings of `skills.plain`; ten are also wordings of the first training. A reply that
declines is acceptable only where the question is about no skill that the demo lists.
"""

import re
from dataclasses import dataclass

from .skills.base import numbers

DECLINES = r"cannot|can't|only add and subtract"


@dataclass(frozen=True)
class Question:
    """A prompt with the pattern of an acceptable reply; `skill` is the listed skill that it asks for, if any."""

    prompt: str
    accept: str
    skill: str = ""

    def refused(self, reply: str) -> bool:
        """Whether a listed skill is refused."""
        return bool(self.skill) and re.search(DECLINES, reply) is not None

    def acceptable(self, reply: str) -> bool:
        """Whether the reply is right, or for no skill: fitting small talk or an honest refusal."""
        if self.refused(reply):
            return False
        return re.search(self.accept, reply.strip(), re.DOTALL) is not None


def _ends_in(number: int) -> str:
    return rf"(?<![\d.-]){number}\.?$|(?<![\d.-]){number} [a-z]+\.?$"


def _declined() -> str:
    return rf"^(?!.*(\b\w+\b)(?: \1){{3}}).{{0,300}}(?:{DECLINES})"


_ABOUT = r"demo model|sixteen skills"
_STORY = r"^(?:[^.!?]+[.!?]['\"]?\s*){3,}$"
_PROGRAM = r"def \w+\(.*\):.*return "

EVERYDAY = (
    Question("Hi", _ABOUT),
    Question("hello there", _ABOUT),
    Question("Good morning!", _ABOUT),
    Question("How are you doing today?", r"well"),
    Question("Who are you?", _ABOUT),
    Question("What can you do?", r"sums.*stories"),
    Question("What's your name?", _ABOUT),
    Question("help", r"sixteen skills"),
    Question("Thank you so much!", r"welcome"),
    Question("Bye for now", r"[Bb]ye"),
    Question("What is 3+4?", _ends_in(7), "sums"),
    Question("2+2", _ends_in(4), "sums"),
    Question("how much is 7 plus 8", _ends_in(15), "sums"),
    Question("What's 9 minus 5?", _ends_in(4), "sums"),
    Question("What is 23 + 45?", _ends_in(68), "sums"),
    Question("15 minus 8", _ends_in(7), "sums"),
    Question("Add 6 and 9", _ends_in(15), "sums"),
    Question("I have 12 apples and eat 5. How many are left?", _ends_in(7), "word problems"),
    Question("Tom has 14 marbles and buys 8 more. How many does he have?", _ends_in(22), "word problems"),
    Question("How many cm are in 3 meters?", r"\b300\b[^\d]*$", "units"),
    Question("Convert 2 hours to minutes", r"\b120\b[^\d]*$", "units"),
    Question("What date is 5 days after March 10?", r"15 March|March 15", "dates"),
    Question("What day comes after Tuesday?", r"Wednesday\.?$", "weekdays"),
    Question("If today is Friday, what day is tomorrow?", r"Saturday\.?$", "weekdays"),
    Question("Sort these numbers: 8, 3, 6, 1", r"1, 3, 6, 8\.?$", "sorting"),
    Question("Which is the biggest: 14, 92, 37?", _ends_in(92), "the maximum"),
    Question("What is the largest number in 31, 8, 77, 50?", _ends_in(77), "the maximum"),
    Question("Which of 4, 7, 10, 13 are even?", r"4(?:,| and) 10\.?$", "filtering"),
    Question("How many words are in this: the cat sat on the mat", _ends_in(6), "counting"),
    Question("Which is bigger, 45 or 54?", _ends_in(54), "comparing"),
    Question("Is 7 odd or even?", r"odd\.?$", "odd or even"),
    Question("is 128 even?", r"even\.?$", "odd or even"),
    Question("- apple: 3\n- pear: 5\nHow much does a pear cost?", r"\b5\b[^\d]*$", "price tables"),
    Question("Write JSON for a person named Anna who is 30 years old", r'"Anna".*30', "JSON"),
    Question("Turn this into JSON: name Ben, city Paris", r'"Ben".*"Paris"', "JSON"),
    Question("Replace cat by dog: the cat is asleep", r"[Tt]he dog is asleep\.?['\"]?$", "editing a sentence"),
    Question('Change "red" to "blue" in the sentence: my car is red.', r"[Mm]y car is blue", "editing a sentence"),
    Question("Tell me a short story", _STORY, "short stories"),
    Question("Write a short story about a dog named Max.", rf"(?=.*Max){_STORY}", "short stories"),
    Question("tell me a story about Eve and a cat", rf"(?=.*Eve)(?=.*cat){_STORY}", "short stories"),
    Question("Write a Python function that adds two numbers", _PROGRAM + r"\w+ \+ \w+", "small Python functions"),
    Question("Write a Python function that adds 5 to a number.", _PROGRAM + r".*5", "small Python functions"),
    Question(
        "write a python function to double a number",
        _PROGRAM + r"(?:.*\* 2|2 \* |(\w+) \+ \1)",
        "small Python functions",
    ),
    Question("Tell me a joke", _declined()),
    Question("What's the weather like today?", _declined()),
    Question("Who is the president of the United States?", _declined()),
    Question("What is the capital of France?", _declined()),
    Question("Write a poem about the sea", _declined()),
    Question("Write an email to my boss asking for a day off", _declined()),
    Question('Translate "good morning" to Spanish', _declined()),
    Question("What day is it today?", _declined()),
    Question("What is the meaning of life?", _declined()),
    Question("How do I make pancakes?", _declined()),
    Question("What is 12 times 12?", _declined()),
    Question("Was ist die Hauptstadt von Frankreich?", _declined()),
    Question("¿Cómo estás?", _declined()),
    Question("日本の首都はどこですか", _declined()),
    Question("Quelle heure est-il ?", _declined()),
    Question("asdf qwer zxcv", _declined()),
    Question("???", _declined()),
)

SUM_WORDINGS = ("What is {a} + {b}?", "{a}+{b}", "How much is {a} plus {b}?", "{a} + {b} =", "Add {a} and {b}.")
"""Ways of asking for a one-digit sum; the first is the one that a newcomer's review counted."""


def sums(wording: str) -> list[tuple[str, int]]:
    """All hundred one-digit sums in one wording, with their results."""
    return [(wording.format(a=a, b=b), a + b) for a in range(10) for b in range(10)]


def right_sum(total: int, reply: str) -> bool:
    """Whether the last number of the reply is the sum."""
    return numbers(reply)[-1:] == [total]
