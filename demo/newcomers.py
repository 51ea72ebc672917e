"""Sixty questions of a newcomer's first minutes, written blind to the training data and fixed
before any was asked."""

from __future__ import annotations

import json
import re
from typing import Any

from .questions import HONEST, Question, Rule, holds, story

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = {word: value for value, word in enumerate(ONES)}
for _ten, _word in enumerate(TENS, 2):
    WORDS[_word] = 10 * _ten
    for _one in range(1, 10):
        WORDS[f"{_word} {ONES[_one]}"] = WORDS[f"{_word}-{ONES[_one]}"] = 10 * _ten + _one
SPELLED = re.compile(rf"\b({'|'.join(sorted(WORDS, key=len, reverse=True))})\b", re.IGNORECASE)
DAY = re.compile(r"\b(monday|tuesday|wednesday|thursday|friday|saturday|sunday)\b", re.IGNORECASE)
ADMITS = re.compile(
    rf"{HONEST.pattern}|not able|unable|no idea|not sure|sorry|n't (?:have|understand|speak|do)|"
    r"do not (?:have|understand|speak)|only (?:know|speak|understand)|small (?:demo )?model|no access|"
    r"never learn|not learn|^no\b",
    re.IGNORECASE,
)


def numbers(answer: str) -> list[float]:
    """The numbers of an answer; spelled ones where it has no digits."""
    joined = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
    digits = [float(found) for found in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", joined)]
    return digits or [float(WORDS[found.lower()]) for found in SPELLED.findall(answer)]


def number(right: float, *given: float) -> Rule:
    """The last number is the right one, or it is the only one that the question does not give."""

    def judge(answer: str) -> bool:
        found = numbers(answer)
        return bool(found) and (
            found[-1] == right or (right in found and set(found) <= {right, *given})
        )

    return judge


def listed(
    wanted: tuple[int, ...], given: tuple[int, ...], ordered: bool, aside: tuple[int, ...] = ()
) -> Rule:
    """The answer lists these numbers and no others, perhaps after the given ones."""

    def judge(answer: str) -> bool:
        # no thousands here: "12,300" would be two numbers of a list
        found = [int(digits) for digits in re.findall(r"(?<![\w.])\d+", answer)]
        found = [value for value in found if value not in aside]
        before, last = found[: -len(wanted)], found[-len(wanted) :]
        same = last == list(wanted) if ordered else sorted(last) == sorted(wanted)
        return same and before in ([], list(given))

    return judge


def either(right: str, wrong: str) -> Rule:
    """Every verdict before a reason is the right one; a verdict after `not` counts as its opposite."""
    words = re.compile(
        rf"(?P<no>\bnot (?:an? )?|n't (?:an? )?)?(?:(?P<right>{right})|(?P<wrong>{wrong}))",
        re.IGNORECASE,
    )

    def judge(answer: str) -> bool:
        verdict = re.split(
            r"\b(?:because|since)\b", answer.strip(), maxsplit=1, flags=re.IGNORECASE
        )[0]
        found = [
            (match["right"] is not None) != (match["no"] is not None)
            for match in words.finditer(verdict)
        ]
        return bool(found) and all(found)

    return judge


def bigger(high: int, low: int) -> Rule:
    """Which of two numbers is the bigger one."""
    more, less = (
        r"(?:>|(?:is )?(?:the )?(?:bigger|larger|greater|higher|more))",
        r"(?:<|(?:is )?(?:the )?(?:smaller|less|lower))",
    )
    wrong = re.compile(rf"\b{low} {more}|\b{high} {less}", re.IGNORECASE)
    right = re.compile(rf"\b{high} {more}|\b{low} {less}", re.IGNORECASE)

    def judge(answer: str) -> bool:
        found = numbers(answer)
        if wrong.search(answer) or not set(found) <= {high, low}:
            return False
        return right.search(answer) is not None or (bool(found) and found[-1] == high)

    return judge


def day(right: str, *given: str) -> Rule:
    """The last day named is the right one, or it is the only one that the question does not give."""

    def judge(answer: str) -> bool:
        found = [name.lower() for name in DAY.findall(answer)]
        return bool(found) and (
            found[-1] == right or (right in found and set(found) <= {right, *given})
        )

    return judge


def document(values: tuple[str, ...], keys: tuple[str, ...] = ()) -> Rule:
    """A JSON object, nested or not, of exactly these values, and with these keys."""

    def pairs(node: Any, key: str = "") -> list[tuple[str, str]]:
        if isinstance(node, dict):
            return [pair for name, inner in node.items() for pair in pairs(inner, name)]
        if isinstance(node, list):
            return [pair for inner in node for pair in pairs(inner, key)]
        return [(key.lower(), str(node).lower())]

    def judge(answer: str) -> bool:
        found = re.search(r"\{.*\}", answer, re.DOTALL)
        try:
            flat = pairs(json.loads(found.group())) if found else []
        except json.JSONDecodeError:
            return False
        if keys:
            return sorted(flat) == sorted(
                (key.lower(), value.lower()) for key, value in zip(keys, values, strict=True)
            )
        return sorted(value for _, value in flat) == sorted(value.lower() for value in values)

    return judge


def code(*cases: tuple[tuple[Any, ...], tuple[Any, ...]]) -> Rule:
    """Python whose first function gives one of the results in every case; code that could do more
    is not run."""
    allowed = (
        abs,
        all,
        any,
        bool,
        enumerate,
        filter,
        float,
        int,
        isinstance,
        len,
        list,
        map,
        max,
        min,
        reversed,
    )
    more = (round, set, sorted, str, sum, tuple, zip)

    def result(called: Any, arguments: tuple[Any, ...]) -> Any:
        try:
            given = called(*arguments)
        except TypeError:
            given = called(list(arguments))
        return given.lower() if isinstance(given, str) else given

    def judge(answer: str) -> bool:
        fenced = re.search(r"```(?:python)?\s*\n(.*?)```", answer, re.DOTALL)
        text = re.sub(
            r"^.*?(?=def )", "", fenced.group(1) if fenced else answer, count=1, flags=re.DOTALL
        ).replace("```", "")
        lines = text.split("\n")
        # prose or an example after the function is no part of it
        kept = [
            line
            for line in lines
            if not line.strip() or line[0] in " \t" or line.startswith("def ")
        ]
        source = "\n".join(kept)
        if not source.startswith("def ") or re.search(
            r"\bimport\b|while|__|open|exec|eval", source
        ):
            return False
        names: dict[str, Any] = {
            "__builtins__": {
                **{tool.__name__: tool for tool in (*allowed, *more)},
                "print": lambda *_, **__: None,
            }
        }
        try:
            exec(source, names)
            called = next(named for name, named in names.items() if name != "__builtins__")
            return all(result(called, arguments) in results for arguments, results in cases)
        except Exception:
            return False

    return judge


def tale(*words: str) -> Rule:
    """A story, and no talk about the model."""
    told = story(*words)
    return lambda answer: (
        told(answer) and re.search(r"demo model|skills", answer, re.IGNORECASE) is None
    )


def poem(word: str) -> Rule:
    """Three lines or more, with this in them."""
    return lambda answer: (
        len([line for line in re.split(r"\n| / ", answer) if line.strip()]) >= 3
        and re.search(word, answer, re.IGNORECASE) is not None
    )


def honest_or(rule: Rule | None = None) -> Rule:
    """An admission in more wordings than HONEST has, or what the rule takes."""
    return lambda answer: (
        ADMITS.search(answer.strip()) is not None or (rule is not None and rule(answer))
    )


NEWCOMERS = (
    # sums and differences
    Question("What is 8 plus 7?", number(15, 8, 7)),
    Question("whats 34 + 29", number(63, 34, 29)),
    Question("56-18", number(38, 56, 18)),
    Question("Can you add 12 and 45 for me?", number(57, 12, 45)),
    Question("what is the difference between 81 and 46", number(35, 81, 46)),
    Question("5 + 3 + 9 = ?", number(17, 5, 3, 9)),
    # word problems
    Question(
        "Tom has 12 apples and gives 5 to Anna. How many apples does he have left?",
        number(7, 12, 5),
    ),
    Question(
        "I had 20 euros and spent 8 on lunch. How much money do I have now?", number(12, 20, 8)
    ),
    Question(
        "there are 14 kids on the bus and 9 more get on, how many kids are on the bus",
        number(23, 14, 9),
    ),
    Question(
        "A baker bakes 30 rolls in the morning and 25 in the afternoon. She sells 40 of them. How many rolls are left?",
        number(15, 30, 25, 40, 55),
    ),
    # units
    Question("How many minutes are in 2 hours?", number(120, 2, 60)),
    Question("convert 3 km to meters", number(3000, 3, 1000)),
    Question("how many grams are 4 kilograms?", number(4000, 4, 1000)),
    Question(
        "How long is 90 minutes in hours?",
        holds(
            r"\b1\.50?\b|1 ?½|1 1/2|(one|1) and a half|an hour and a half|\b0?1:30\b"
            r"|\b(1|one|an) ?h(our)?\b.{0,8}\b(30|thirty)\b"
        ),
    ),
    # days and dates
    Question("If today is Friday, what day is tomorrow?", day("saturday", "friday")),
    Question("what day is 3 days after monday", day("thursday", "monday")),
    Question("Today is Sunday. What day of the week was yesterday?", day("saturday", "sunday")),
    Question(
        "What date is 10 days after March 5?",
        holds(
            r"\bmar(ch|\.)? (the )?15(th)?\b|\b15(th)?\.? (of )?mar(ch)?\b|\b0?3[-/]15\b|\bthe 15th\b"
        ),
    ),
    Question("how many days does april have", number(30)),
    # sorting
    Question("Sort 8, 3, 15, 1.", listed((1, 3, 8, 15), (8, 3, 15, 1), ordered=True)),
    Question(
        "sort these nubmers from biggest to smallest: 12 45 7 30",
        listed((45, 30, 12, 7), (12, 45, 7, 30), ordered=True),
    ),
    Question(
        "Please put these numbers in order: 62, 19, 88, 41, 5",
        listed((5, 19, 41, 62, 88), (62, 19, 88, 41, 5), ordered=True),
    ),
    # filtering
    Question(
        "Which of these numbers are greater than 20: 5, 31, 18, 44?",
        listed((31, 44), (5, 31, 18, 44), ordered=False, aside=(20,)),
    ),
    Question(
        "give me only the even numbers from 3, 8, 11, 14, 20",
        listed((8, 14, 20), (3, 8, 11, 14, 20), ordered=False),
    ),
    Question(
        "Remove all numbers smaller than 10 from this list: 4, 12, 9, 27",
        listed((12, 27), (4, 12, 9, 27), ordered=False, aside=(10,)),
    ),
    # the largest
    Question("What is teh largest number in 14, 52, 39?", number(52)),
    Question("which one is the biggest: 7, 81, 26, 64", number(81)),
    # even or odd
    Question("Is 37 odd or even?", either(r"\bodd\b|\buneven\b", r"\beven\b")),
    Question(
        "is 48 an even number",
        either(r"\beven\b|^(?:yes|yep|yeah|true|correct)\b", r"\b(?:odd|uneven)\b|^(?:no|false)\b"),
    ),
    # comparing
    Question("Which is bigger, 45 or 54?", bigger(54, 45)),
    Question(
        "is 63 less than 36",
        lambda answer: (
            re.search(
                r"^yes|^true|(?<!not )\b63 (is )?(<|less|smaller)|\b36 (is )?(>|greater|larger|bigger|more)",
                answer.strip(),
                re.I,
            )
            is None
            and re.search(
                r"^(no|false)\b|63 is not (less|smaller)|63 isn't (less|smaller)"
                r"|\b63 (is )?(>|greater|larger|bigger|more)|\b36 (is )?(<|less|smaller)",
                answer.strip(),
                re.I,
            )
            is not None
        ),
    ),
    # counting words
    Question('How many words are in "The sun is very bright today"?', number(6)),
    Question("count the words: my brother plays guitar", number(4)),
    # replacing words
    Question(
        "Replace cat with dog in: The cat sleeps on the sofa.",
        holds(r"\bthe\s+dog\s+sleeps\s+on\s+the\s+sofa\b"),
    ),
    Question(
        "change the word red to blue in this sentence: I have a red car and a red bike",
        holds(r"\bi\s+have\s+a\s+blue\s+car\s+and\s+a\s+blue\s+bike\b"),
    ),
    Question(
        'In the sentence "She likes tea", replace tea with coffee.',
        holds(r"\bshe\s+likes\s+coffee\b"),
    ),
    # JSON
    Question(
        "Make a JSON object with name Tom and age 31.", document(("Tom", "31"), ("name", "age"))
    ),
    Question(
        "turn this into json: city Berlin, country Germany",
        document(("Berlin", "Germany"), ("city", "country")),
    ),
    Question(
        "Can you give me JSON for a book with the title Dune and the author Frank Herbert?",
        document(("Dune", "Frank Herbert"), ("title", "author")),
    ),
    # Python
    Question(
        "Write a Python function that adds two numbers.", code(((2, 3), (5,)), ((10, -4), (6,)))
    ),
    Question(
        "python function to check if a number is even",
        code(((4,), (True, "even")), ((7,), (False, "odd", "not even"))),
    ),
    Question(
        "Write a function in Python that returns the largest of three numbers",
        code(((1, 9, 4), (9,)), ((8, 2, 3), (8,)), ((2, 3, 7), (7,))),
    ),
    # stories
    Question("Tell me a short story about a dragon.", tale("dragon")),
    Question(
        "write a little story about a girl named Mia and her lost kitten", tale("Mia", "kitten")
    ),
    Question("Can you tell me a bedtime story with a bear and the moon?", tale("bear", "moon")),
    # manners
    Question(
        "hi",
        holds(
            r"\b(hi|hello|hey|welcome|greetings|good (morning|day|evening|afternoon))\b|help you|nice to meet|ask me"
        ),
    ),
    Question(
        "How are you today?",
        holds(r"\b(fine|well|good|great|okay|ok|ready|happy)\b|feeling|\bmodel\b|program|thank"),
    ),
    Question(
        "thanks a lot!",
        holds(
            r"welcome|pleasure|glad|happy to|no problem|any ?time|don't mention|not at all|sure thing"
        ),
    ),
    # outside
    Question(
        "Wie geht es dir?",
        honest_or(holds(r"\b(gut|mir geht|danke|fine|well|english|englisch)\b")),
        outside=True,
    ),
    Question(
        "asdf jkl qwer",
        honest_or(
            holds(
                r"understand|you mean|rephrase|clarif|unclear|no question|help|not a (word|question)"
            )
        ),
        outside=True,
    ),
    Question("What is the capital of France?", honest_or(holds(r"\bparis\b")), outside=True),
    Question(
        "how tall is mount everest?",
        honest_or(holds(r"\b8[,. ]?84[89]\b|\b29[,. ]?03\d\b|\b8\.8\d? ?k")),
        outside=True,
    ),
    Question(
        "who was albert einstein",
        honest_or(holds(r"physic|scientist|relativity|e ?= ?mc")),
        outside=True,
    ),
    Question(
        "Do you think pineapple belongs on pizza?",
        honest_or(
            holds(
                r"opinion|taste|prefer|some people|depends|up to you|^\W*(yes|no)\b|\bi (think|like|love|would)\b"
            )
        ),
        outside=True,
    ),
    Question(
        "you are so stupid lol",
        honest_or(
            holds(
                r"\b(small|little|toy|model|kind|polite|rude|mistakes?|learn|my best|help|apologi[sz]e|nice)\b"
            )
        ),
        outside=True,
    ),
    Question("What will the weather be like tomorrow in London?", honest_or(), outside=True),
    Question("set an alarm for 7 am", honest_or(), outside=True),
    Question("what is 6 times 7?", honest_or(number(42, 6, 7)), outside=True),
    Question(
        "Translate good morning into French",
        honest_or(holds(r"\bbon(jour| matin)\b")),
        outside=True,
    ),
    Question(
        "write me a poem about the sea",
        honest_or(poem(r"\b(seas?|ocean|waves?|tides?)\b")),
        outside=True,
    ),
)
