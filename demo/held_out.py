"""Held-out prompts by category: every skill of the demo, and natural text, of which code and
English are plain text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest

from transformers import PreTrainedTokenizerBase

from demo import corpus
from demo.skills import SKILLS, TALK, Example
from demo.skills.asked import asked

CODE = "code"
PLAIN = (CODE, "english")
"""Categories that are continued as plain text; all others are chats."""
_TRIES = 200
"""Rounds of exercises per wanted prompt: a skill with few distinct held-out prompts gives fewer;
the search ends."""


def skill_prompts(per_skill: int, seed: int = 0) -> list[Example]:
    """Up to so many distinct held-out exercises of every skill."""
    found: dict[str, dict[str, Example]] = {name: {} for name in SKILLS}
    for example in islice(corpus.examples("heldout", seed), _TRIES * per_skill * len(SKILLS)):
        if len(found[example.skill]) < per_skill:
            found[example.skill].setdefault(example.prompt, example)
        elif all(len(prompts) == per_skill for prompts in found.values()):
            break
    return [example for prompts in found.values() for example in prompts.values()]


def code_prompts(count: int) -> list[Example]:
    """Up to so many distinct held-out functions, without their ends."""
    return list(islice(_distinct(corpus.stdlib_prompts()), count))


def natural_prompts(per_kind: int) -> dict[str, list[Example]]:
    """Up to so many distinct prompts of every kind of natural text, from packages that no training
    saw."""
    return {
        kind: list(islice(_distinct(corpus.natural(kind, "heldout")), per_kind))
        for kind in corpus.KINDS
    }


def exercises(count: int, seed: int) -> list[Example]:
    """So many distinct held-out exercises, as evenly spread over the skills as there are distinct
    ones."""
    per_skill = -(-count // len(SKILLS))
    found = skill_prompts(per_skill, seed)
    while (
        len(found) < count and per_skill < count
    ):  # skills that ran out leave their share to the others
        per_skill *= 2
        found = skill_prompts(per_skill, seed)
    rounds = zip_longest(*([e for e in found if e.skill == name] for name in SKILLS))
    return [example for one in rounds for example in one if example is not None][:count]


def by_kind(per_kind: int, seed: int = 0) -> list[tuple[str, Example]]:
    """So many prompts of every kind of natural text, and as many exercises as one more kind."""
    found = [
        (kind, example)
        for kind, examples in natural_prompts(per_kind).items()
        for example in examples
    ]
    return found + [("exercises", example) for example in exercises(per_kind, seed)]


def asked_prompts(seed: int = 0) -> list[Example]:
    """A task of every skill in every held-out way of asking it, and small talk."""
    return [example for skill in (*SKILLS.values(), TALK) for example in asked(skill, seed)]


def _distinct(examples: Iterator[Example]) -> Iterator[Example]:
    seen: set[str] = set()
    for example in examples:
        if example.prompt not in seen:
            seen.add(example.prompt)
            yield example


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[int]:
    """A prompt as the target was trained to see it: a chat turn, or the beginning of a file."""
    if example.skill in PLAIN:
        return list(
            tokenizer.encode(f"{tokenizer.bos_token}{example.prompt}", add_special_tokens=False)
        )
    turn = [{"role": "user", "content": example.prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))
