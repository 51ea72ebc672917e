"""The line below an answer that is being written: true of the text, and a sign of life."""

from __future__ import annotations

from typing import Any

from tests.web.node import Node

IMPORTS = """import { progressOf, writingOf } from "./../../serve/page/chat.js";
    import { Answer } from "./../../serve/page/answer.js";"""
HANDLE = """
    const live = new Answer();
    for (const chunk of ask.chunks) live.take(chunk);
    live.quiet = ask.quiet;
    if (ask.model) return writingOf({ model: ask.model }, live);
    return progressOf({ reading: ask.reading }, live);
"""


def said(node: Node, *texts: tuple[str, int], **more: Any) -> str:
    chunks = [
        {"choices": [{"delta": {"content": text}, "moa": {"verified": verified}}]}
        for text, verified in texts
    ]
    return str(node.ask({"chunks": chunks, "quiet": 0, "reading": None, **more}))


def test_nothing_is_said_of_verified_text_that_comes(node: Node) -> None:
    assert said(node, ("Hello", 5)) == ""


def test_what_is_not_verified_is_counted(node: Node) -> None:
    assert said(node, ("Hello", 5), (", Ada", 5)) == "5 characters not verified yet"


def test_silence_is_counted_in_seconds_with_text_and_without(node: Node) -> None:
    assert said(node, quiet=4) == "no word for 4 s"
    assert said(node, ("Hé👩", 1), quiet=2) == "2 characters not verified yet; no word for 2 s"


def test_a_prompt_that_is_read_says_how_far(node: Node) -> None:
    reading = {"done": 512, "total": 2060}
    assert said(node, reading=reading) == "reading the prompt, 512 of 2060 tokens"
    assert said(node, ("Hello", 5), reading=reading) == ""


def test_the_models_name_stands_over_its_own_text(node: Node) -> None:
    assert said(node, model="Qwen") == "Qwen"
    assert said(node, ("Hello", 5), model="Qwen") == "Qwen"
    assert said(node, ("Hello", 5), (", Ada", 5), model="Qwen") == "Qwen, and this device"
    assert said(node, ("Hello", 0), model="Qwen") == "This device, for Qwen"
