"""The exercises that the demo pair is trained on: each skill writes prompts with answers and checks any reply."""

from . import arithmetic, calendar, digits, functions, lists, story, text
from .base import Example, Skill

SKILLS: dict[str, Skill] = {
    skill.name: skill
    for group in (arithmetic, calendar, lists, digits, text, story, functions)
    for skill in group.SKILLS
}
"""Every skill by its name."""

__all__ = ["SKILLS", "Example", "Skill"]
