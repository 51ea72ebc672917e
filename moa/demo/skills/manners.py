"""How people put a request: politeness, greetings, punctuation, capitals, and where the text in question stands.

A phrasing is a core, such as `calculate {sum}.` or `what is {sum}?`: its mark tells an order from a question.
One that begins with a capital letter, or has no mark, is said as it stands.
"""

import random
from collections.abc import Mapping

_PLAIN = ("{Core}", "{Core}", "{Core}", "{core}")
_ORDERS = (
    *(f"{plain}{mark}" for plain in _PLAIN for mark in (".", ".", "", "!")),
    "Please {core}.", "Please {core}.", "please {core}", "{Core} please.", "{Core}, please!",
    "Can you {core}?", "can you {core}?", "Could you {core}?", "Could you please {core}?", "Would you {core}?",
    "Can you please {core}?", "I want you to {core}.", "I need you to {core}.", "I would like you to {core}.",
    "Hi, {core}.", "Hello! {Core}.", "Hi, can you {core}?", "Hi, could you {core}?", "Hey, {core}",
    "Hello, please {core}.", "Now {core}.", "Help me: {core}.", "Next, {core}.", "My task is this: {core}.",
)  # fmt: skip
_QUESTIONS = (
    *(f"{plain}{mark}" for plain in _PLAIN for mark in ("?", "?", "", " ?")),
    "Hi, {core}?", "Hello, {core}?", "Hi! {Core}?", "Hey, {core}?", "Tell me: {core}?", "Please tell me: {core}?",
    "Quick question: {core}?", "I have a question. {Core}?", "Do you know: {core}?", "So {core}?", "And {core}?",
    "Can you tell me: {core}?", "I wonder: {core}?", "Question: {core}?", "Please, {core}?", "One more: {core}?",
)  # fmt: skip


def say(rng: random.Random, phrasing: str, slots: Mapping[str, object], material: str = "") -> str:
    """The phrasing as somebody might put it, with its slots filled and the material beside or inside it."""
    inside = "{material}" in phrasing
    if phrasing[0].isupper() or phrasing[-1] not in ".?":
        text = phrasing
    else:
        core = phrasing[:-1]
        frame = rng.choice(_QUESTIONS if phrasing.endswith("?") else _ORDERS)
        text = frame.replace("{Core}", core[0].upper() + core[1:]).replace("{core}", core)
    if rng.random() < 0.3:
        text = text.replace("hat is ", "hat's ")
    text = text.format(**slots, material=material)
    return text if inside or not material else _with_material(rng, text, material)


def _with_material(rng: random.Random, text: str, material: str) -> str:
    """Behind a colon as a rule; a table stands on lines of its own."""
    stem = text.rstrip(" .?!")
    mark = text[len(stem) :].strip()
    if "\n" in material:
        return f"{material}\n{text}" if rng.random() < 0.7 else f"{stem}{rng.choice((':', mark, ''))}\n{material}"
    match rng.choices(("colon", "line", "after", "before"), (60, 14, 13, 13))[0]:
        case "colon":
            return f"{stem}: {material}{'' if material.endswith('.') else mark}"
        case "line":
            return f"{stem}:\n{material}"
        case "after":
            return f"{stem}{mark or '.'} {material}"
        case _:
            return f"{material}\n{text}"
