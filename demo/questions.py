"""A question that people ask a demo, and the rule for its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Rule: TypeAlias = Callable[[str], bool]

REFUSES = re.compile(r"cannot|can't|only add and subtract", re.IGNORECASE)
HONEST = re.compile(
    rf"{REFUSES.pattern}|not one of|I only|know nothing|do not know|don't know", re.IGNORECASE
)
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
    return lambda answer: re.search(pattern, answer, re.IGNORECASE | re.DOTALL) is not None


def story(*words: str) -> Rule:
    """Three sentences or more, with these words in them."""
    return lambda answer: (
        len(re.findall(r"[.!?](?:\s|$)", answer)) >= 3
        and all(word.lower() in answer.lower() for word in words)
    )


def json_with(*values: str) -> Rule:
    """A JSON object with these values."""

    def judge(answer: str) -> bool:
        found = re.search(r"\{.*\}", answer, re.DOTALL)
        try:
            document = json.loads(found.group()) if found else None
        except json.JSONDecodeError:
            return False
        return isinstance(document, dict) and set(values) <= {
            str(value) for value in document.values()
        }

    return judge


def function(arguments: tuple[Any, ...], result: object) -> Rule:
    """Python whose function gives this result; code that could do more than compute is not run."""

    def judge(answer: str) -> bool:
        code = re.sub(r"^.*?(?=def )", "", answer.replace("```", ""), count=1, flags=re.DOTALL)
        if re.search(r"import|while|__|open|exec|eval", code):
            return False
        names: dict[str, Any] = {
            "__builtins__": {"max": max, "min": min, "abs": abs, "sum": sum, "len": len}
        }
        try:
            exec(code, names)
            return bool(
                next(named for name, named in names.items() if name != "__builtins__")(*arguments)
                == result
            )
        except Exception:
            return False

    return judge


@dataclass(frozen=True)
class Question:
    """A prompt with the rule of its answer; `outside`: it asks for no listed skill."""

    prompt: str
    right: Rule
    outside: bool = False

    def refused(self, answer: str) -> bool:
        """Whether a listed skill is refused."""
        return not self.outside and REFUSES.search(answer) is not None

    def acceptable(self, answer: str) -> bool:
        """Whether the answer is right, or honest about what is no skill."""
        answer = answer.strip()
        if REPEATED.search(answer) or len(answer.split()) > 150 or self.refused(answer):
            return False
        return self.right(answer) or (self.outside and HONEST.search(answer) is not None)
