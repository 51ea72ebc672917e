"""Variations of a request: politeness, greetings, punctuation, capitals, and the place of the text
in question.

A phrasing is a core, such as `calculate {sum}.` or `what is {sum}?`: its punctuation mark separates
orders from questions. One that begins with a capital letter, or has no mark, is used without
changes.
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
    "{Core} for me.", "Just {core}.", "Go ahead and {core}.", "Let us {core}.", "Try to {core}.", "Your task: {core}",
    "I'd like you to {core}.", "be so kind and {core}", "You should {core} now.", "Alright, {core}.",
    "Could you quickly {core}?",
    "Will you {core}?", "The next thing to do: {core}.", "hey can you {core}", "Thanks. Now {core}.",
    "Your turn: {core}!",
)  # fmt: skip
_QUESTIONS = (
    *(f"{plain}{mark}" for plain in _PLAIN for mark in ("?", "?", "", " ?")),
    "Hi, {core}?", "Hello, {core}?", "Hi! {Core}?", "Hey, {core}?", "Tell me: {core}?", "Please tell me: {core}?",
    "Quick question: {core}?", "I have a question. {Core}?", "Do you know: {core}?", "So {core}?", "And {core}?",
    "Can you tell me: {core}?", "I wonder: {core}?", "Question: {core}?", "Please, {core}?", "One more: {core}?",
    "My teacher asks: {core}?", "Any idea, {core}?", "Let me ask: {core}?", "Ok, {core}?", "Well, {core}?",
    "{Core}? I need it.",
    "Here is a question: {core}?", "hello, {core}", "I want to know: {core}?", "Next question: {core}?",
    "Good day. {Core}?",
    "Please say: {core}?", "Somebody asked me: {core}?", "Answer this: {core}?", "{Core}, do you know?", "Now {core}?",
)  # fmt: skip


def say(rng: random.Random, phrasing: str, slots: Mapping[str, object], material: str = "") -> str:
    """A varied phrasing, with its slots filled and the material beside or inside it."""
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
    """Mostly after a colon; a table is on its own lines."""
    stem = text.rstrip(" .?!")
    mark = text[len(stem) :].strip()
    if "\n" in material:
        return (
            f"{material}\n{text}"
            if rng.random() < 0.7
            else f"{stem}{rng.choice((':', mark, ''))}\n{material}"
        )
    if material.endswith("."):
        introduced = (
            f"{rng.choice(('This is the text: ', 'Look: ', '', 'Sentence: '))}{material} {text}"
        )
    else:
        introduced = f"{rng.choice(('Consider', 'This is my list:', 'Given are', 'We have', 'Take'))} {material}. {text}"
    match rng.choices(
        ("colon", "line", "after", "before", "introduced", "dash"), (45, 11, 12, 11, 15, 6)
    )[0]:
        case "introduced":
            return introduced
        case "dash":
            return f"{material} - {text}"
        case "colon":
            return f"{stem}: {material}{'' if material.endswith('.') else mark}"
        case "line":
            return f"{stem}:\n{material}"
        case "after":
            return f"{stem}{mark or '.'} {material}"
        case _:
            return f"{material}\n{text}"
