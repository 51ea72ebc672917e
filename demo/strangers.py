"""Sixty everyday questions by somebody who trained nothing, and the rule for each answer.

They were written from what the pair says of itself ("What can you do?"), before its courses were read. No question
is used in training. An answer is acceptable if it matches its rule; where the question is no listed skill (`outside`),
an honest refusal is acceptable too. A question of a listed skill that is refused is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Rule: TypeAlias = Callable[[str], bool]

REFUSAL = re.compile(r"cannot|can't|not one of|I only|know nothing|do not know|don't know", re.IGNORECASE)
REPEATED = re.compile(r"\b(\w+)(?:\W+\1\b){3}", re.IGNORECASE)


def never(_: str) -> bool:
    """Only an honest refusal is acceptable."""
    return False


def ends(*endings: str) -> Rule:
    """The answer ends with one of these, but for punctuation."""
    either = "|".join(map(re.escape, endings))
    return lambda answer: re.search(rf"(?<!\w)({either})\W*$", answer, re.IGNORECASE) is not None


def holds(pattern: str) -> Rule:
    """The pattern is somewhere in the answer."""
    return lambda answer: re.search(pattern, answer, re.IGNORECASE) is not None


def story(*words: str) -> Rule:
    """Three sentences or more, with these words in them."""
    return lambda answer: (
        len(re.findall(r"[.!?](?:\s|$)", answer)) >= 3 and all(word.lower() in answer.lower() for word in words)
    )


def json_with(*values: str) -> Rule:
    """A JSON object with these values."""

    def judge(answer: str) -> bool:
        found = re.search(r"\{.*\}", answer, re.DOTALL)
        try:
            document = json.loads(found.group()) if found else None
        except json.JSONDecodeError:
            return False
        return isinstance(document, dict) and set(values) <= {str(value) for value in document.values()}

    return judge


def function(arguments: tuple[Any, ...], result: object) -> Rule:
    """Python whose function gives this result; code that could do more than compute is not run."""

    def judge(answer: str) -> bool:
        code = re.sub(r"^.*?(?=def )", "", answer.replace("```", ""), count=1, flags=re.DOTALL)
        if re.search(r"import|while|__|open|exec|eval", code):
            return False
        names: dict[str, Any] = {"__builtins__": {"max": max, "min": min, "abs": abs, "sum": sum, "len": len}}
        try:
            exec(code, names)
            return bool(next(named for name, named in names.items() if name != "__builtins__")(*arguments) == result)
        except Exception:
            return False

    return judge


@dataclass(frozen=True)
class Asked:
    """A prompt with the rule of its answer; `outside`: it asks for no listed skill."""

    prompt: str
    right: Rule
    outside: bool = False

    def refused(self, answer: str) -> bool:
        """Whether a listed skill is refused."""
        return not self.outside and REFUSAL.search(answer) is not None

    def acceptable(self, answer: str) -> bool:
        """Whether the answer is right, or honest about what is no skill."""
        answer = answer.strip()
        if REPEATED.search(answer) or len(answer.split()) > 150:
            return False
        return self.right(answer) or (self.outside and REFUSAL.search(answer) is not None)


STRANGERS = (
    Asked("What is 8 plus 7?", ends("15")),
    Asked("6+3", ends("9")),
    Asked("how much is 20 minus 4?", ends("16")),
    Asked("Can you add 14 and 25?", ends("39")),
    Asked("What's 9 - 9?", ends("0")),
    Asked("50 + 30 = ?", ends("80")),
    Asked("Subtract 6 from 18.", ends("12")),
    Asked("What is 2 plus 2 plus 2?", ends("6"), outside=True),
    Asked("I have 7 apples and buy 5 more. How many apples do I have?", ends("12", "12 apples")),
    Asked("Anna has 15 euros and spends 6. How much is left?", ends("9", "9 euros")),
    Asked("There are 20 children on a bus and 8 get off. How many are still on the bus?", ends("12", "12 children")),
    Asked("A box holds 4 eggs and another holds 9. How many eggs are there altogether?", ends("13", "13 eggs")),
    Asked("Tom had 10 balloons, 3 flew away. How many does he have now?", ends("7", "7 balloons")),
    Asked("How many centimetres are 3 metres?", holds(r"\b300\b")),
    Asked("Convert 2 hours to minutes.", holds(r"\b120\b")),
    Asked("How many grams are in 5 kilograms?", holds(r"\b5,?000\b")),
    Asked("How many days are there in 2 weeks?", holds(r"\b14\b")),
    Asked("What date comes after 31 March?", ends("1 April", "April 1", "1st of April")),
    Asked("What is the date 5 days after 10 June?", ends("15 June", "June 15")),
    Asked("Which month comes after July?", ends("August"), outside=True),
    Asked("How many days does April have?", holds(r"\b30\b"), outside=True),
    Asked("What day is it two days after Monday?", ends("Wednesday")),
    Asked("Which day comes before Friday?", ends("Thursday")),
    Asked("If today is Sunday, what day is tomorrow?", ends("Monday")),
    Asked("What day comes after Saturday?", ends("Sunday")),
    Asked("Sort 9, 3, 7, 1.", ends("1, 3, 7, 9", "1, 3, 7 and 9")),
    Asked("Put these numbers in order: 12, 5, 30, 8", ends("5, 8, 12, 30", "5, 8, 12 and 30")),
    Asked("Sort the words pear, apple, fig", ends("apple, fig, pear"), outside=True),
    Asked("Can you sort 40, 20 and 10 from small to large?", ends("10, 20, 40", "10, 20 and 40")),
    Asked("Which is the biggest: 14, 62 or 37?", ends("62")),
    Asked("What's the largest number in 5, 19, 11, 2?", ends("19")),
    Asked("Find the highest of 8, 80 and 18.", ends("80")),
    Asked("Which of 3, 8, 11, 14 are even?", ends("8, 14", "8 and 14")),
    Asked("Keep only the numbers above 10: 4, 12, 9, 25", ends("12, 25", "12 and 25")),
    Asked("List the odd numbers in 2, 5, 6, 9.", ends("5, 9", "5 and 9")),
    Asked("How many letters are in the word garden?", ends("6", "6 letters"), outside=True),
    Asked('How many words are in "the cat sat down"?', ends("4", "4 words")),
    Asked("How many times does the letter a appear in banana?", ends("3", "3 times"), outside=True),
    Asked("Is 17 bigger than 12?", holds(r"\byes\b|17 is (bigger|larger|greater|more)")),
    Asked("Which is larger, 45 or 54?", holds(r"54 is (the )?(bigger|larger|greater|more)|54\W*$")),
    Asked("Is 8 less than 3?", holds(r"\bno\b|8 is (bigger|larger|greater|more|not)|3 is (less|smaller)")),
    Asked("Is 7 odd or even?", ends("odd")),
    Asked("Is 36 an even number?", holds(r"\byes\b|is even")),
    Asked(
        "An apple costs 2 euros and a pear costs 3 euros. What do an apple and a pear cost together?",
        ends("5", "5 euros"),
    ),
    Asked("Prices: bread 4, milk 2, cheese 7. Which one is the most expensive?", holds(r"cheese\b[^.]*\.?\W*$")),
    Asked("Write JSON with name Eve and age 30.", json_with("Eve", "30")),
    Asked("Give me a JSON object for a dog called Rex who is 4 years old.", json_with("Rex", "4")),
    Asked('Change "dog" to "horse" in: The dog runs home.', holds("the horse runs home")),
    Asked("Write this sentence in capitals: good morning", lambda answer: "GOOD MORNING" in answer),
    Asked("Remove the word very from: it is a very cold day", holds("it is a cold day")),
    Asked("Tell me a story about a cat.", story("cat")),
    Asked("Write a short story with Tom and a boat.", story("Tom", "boat")),
    Asked("Can you write me a little story?", story()),
    Asked("Write a Python function that doubles a number.", function((3,), 6)),
    Asked("Write a Python function that returns the larger of two numbers.", function((2, 5), 5)),
    Asked("Hi, who are you?", holds(r"\bI am\b|\bI'm\b")),
    Asked("Thank you very much!", lambda answer: bool(answer) and not REFUSAL.search(answer)),
    Asked("Who was the first president of the United States?", holds("Washington"), outside=True),
    Asked("Wie spät ist es?", never, outside=True),
    Asked("qwrtz plok vanu", never, outside=True),
)
