"""The demo pair's text: skill exercises, small talk, requests that mix skills, and natural text;
train and held-out."""

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

from . import natural as text
from .natural import Split, split_of
from .skills import SKILLS, TALK, Example, Skill
from .skills.plain import PLAIN
from .skills.wider import WIDER

Kind = Literal["code", "english", "mixed"]
KINDS: tuple[Kind, ...] = ("code", "english", "mixed")
"""Kinds of natural text, beside the exercises."""


def _drawn(skill: Skill, split: Split, rng: random.Random) -> Example:
    example = skill.make(rng)
    while split_of(example.prompt) != split:
        example = skill.make(rng)
    return example


def examples(
    split: Split, seed: int, more: Collection[str] = (), times: int = 3
) -> Iterator[Example]:
    """Endless exercises, every skill once per round in random order; those named in `more` so many
    times."""
    rng = random.Random(f"{split}-{seed}")
    skills = [skill for name, skill in SKILLS.items() for _ in range(times if name in more else 1)]
    while True:
        rng.shuffle(skills)
        for skill in skills:
            yield _drawn(skill, split, rng)


def talk(seed: int) -> Iterator[Example]:
    """Endless small talk for training. Nothing is held out: greetings have too few forms."""
    rng = random.Random(f"talk-{seed}")
    while True:
        yield TALK.make(rng)


def plain(seed: int) -> Iterator[Example]:
    """Endless turns in the words of people who do not know the exercises, for training."""
    return _drawn_by_weight(PLAIN, random.Random(f"plain-{seed}"))


def wider(seed: int) -> Iterator[Example]:
    """The same with words beyond the exercises' lists."""
    return _drawn_by_weight(WIDER, random.Random(f"wider-{seed}"))


def _drawn_by_weight(
    makers: Mapping[Callable[[random.Random], Example], float], rng: random.Random
) -> Iterator[Example]:
    while True:
        yield rng.choices(list(makers), list(makers.values()))[0](rng)


_PAIRS = (
    "1. {}\n2. {}", "1. {}\n2. {}", "1) {}\n2) {}", "First: {}\nThen: {}", "{}\n\nAnd then: {}",
    "Two questions. {}\n{}",
    "I have two tasks for you.\n- {}\n- {}", "{}\nAfter that: {}", "Do both:\n{}\n{}", "{}\nAlso: {}",
)  # fmt: skip


def mixed(split: Split, seed: int) -> Iterator[Example]:
    """Endless requests for two different skills at once; both parts are of the split."""
    rng = random.Random(f"mixed-{split}-{seed}")
    while True:
        first, second = (
            _drawn(skill, split, rng) for skill in rng.sample(list(SKILLS.values()), 2)
        )
        prompt = rng.choice(_PAIRS).format(first.prompt, second.prompt)
        yield Example("mixed", prompt, f"1. {first.answer}\n2. {second.answer}")


def natural(kind: Kind, split: Split) -> Iterator[Example]:
    """Prompts of a kind of natural text with their continuations; whole packages are held out from
    training."""
    match kind:
        case "code":
            return (Example(kind, *parts) for parts in text.functions(text.code(split)))
        case "english":
            return (Example(kind, *parts) for parts in text.passages(text.english(split)))
        case "mixed":
            return mixed(split, 0)


def messages(example: Example) -> list[dict[str, str]]:
    """The exercise as a chat."""
    return [
        {"role": "user", "content": example.prompt},
        {"role": "assistant", "content": example.answer},
    ]


def stdlib_text(split: Split = "train") -> Iterator[str]:
    """The standard library's source files of a split, in a fixed shuffled order."""
    return text.files(text.STDLIB, split)


def stdlib_prompts(lines: int = 8) -> Iterator[Example]:
    """Held-out functions of the standard library, to be continued as plain text."""
    return (Example("code", *parts) for parts in text.functions(stdlib_text("heldout"), lines))
