"""The exercises that the demo pair is trained on: each skill writes prompts with answers and checks
any reply."""

from . import arithmetic, calendar, digits, functions, lists, story, text
from .base import Example, Skill, Task
from .fresh import FRESH
from .talk import TALK

SKILLS: dict[str, Skill] = {
    skill.name: skill
    for group in (arithmetic, calendar, lists, digits, text, story, functions)
    for skill in group.SKILLS
}
"""Every skill by its name."""


def is_right(example: Example, reply: str) -> bool:
    """Whether a reply to an exercise, to small talk or to a fresh skill's exercise is right."""
    return {**SKILLS, **FRESH, TALK.name: TALK}[example.skill].check(example, reply)


__all__ = ["FRESH", "SKILLS", "TALK", "Example", "Skill", "Task", "is_right"]
