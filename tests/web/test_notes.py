"""The line below an answer that is being written: true of the text, and a sign of life."""

from __future__ import annotations

from typing import Any

from tests.web.node import Node

IMPORTS = """import { continuable, noteOf, progressOf, writingOf } from "./../../serve/page/chat.js";
    import { Answer } from "./../../serve/page/answer.js";"""
HANDLE = """
    if (ask.node) return [noteOf(ask.node), continuable(ask.node)];
    const live = new Answer(ask.before);
    for (const chunk of ask.chunks) live.take(chunk);
    live.sign = ask.sign;
    if (ask.model) return writingOf({ model: ask.model }, live);
    return progressOf({ reading: ask.reading }, live);
"""


def said(node: Node, *texts: tuple[str, int], **more: Any) -> str:
    chunks = [
        {"choices": [{"delta": {"content": text}, "moa": {"verified": verified}}]}
        for text, verified in texts
    ]
    return str(node.ask({"chunks": chunks, "sign": "", "reading": None, **more}))


def test_nothing_is_said_of_verified_text_that_comes(node: Node) -> None:
    assert said(node, ("Hello", 5)) == ""


def test_what_is_not_verified_is_counted(node: Node) -> None:
    assert said(node, ("Hello", 5), (", Ada", 5)) == "5 characters not verified yet"


def test_silence_is_counted_in_seconds_with_text_and_without(node: Node) -> None:
    assert said(node, sign="no word for 4 s") == "no word for 4 s"
    told = said(node, ("Hé👩", 1), sign="no word for 2 s")
    assert told == "2 characters not verified yet; no word for 2 s"


def test_a_prompt_that_is_read_says_how_far(node: Node) -> None:
    reading = {"done": 512, "total": 2060}
    assert said(node, reading=reading) == "reading the prompt, 512 of 2060 tokens"
    assert said(node, ("Hello", 5), reading=reading) == ""
    assert said(node, reading={"done": 0, "total": 2060}) == "", "many engines do not tell"


def test_a_check_says_what_the_verifier_reads(node: Node) -> None:
    check = {"checked": 40, "of": 500, "reading": False, "sign": "the verifier is at work, 2 s"}
    (told, _) = node.ask({"node": {"verified": False, "text": "Hello", "check": check}})
    assert told == "checking, 40 of 500 characters; the verifier is at work, 2 s"
    check["reading"] = "reading, 3 of 9 tokens"
    (told, _) = node.ask({"node": {"verified": False, "text": "Hello", "check": check}})
    assert told == "checking: reading, 3 of 9 tokens; the verifier is at work, 2 s"


def test_so_does_that_of_an_answer_that_is_continued(node: Node) -> None:
    reading = {"done": 512, "total": 2060}
    told = said(node, reading=reading, before="Hello")
    assert told == "reading the prompt, 512 of 2060 tokens"
    assert said(node, (", Ada", 5), reading=reading, before="Hello") == ""


def test_the_models_name_stands_over_its_own_text(node: Node) -> None:
    assert said(node, model="Qwen") == "Qwen"
    assert said(node, ("Hello", 5), model="Qwen") == "Qwen"
    assert said(node, ("Hello", 5), (", Ada", 5), model="Qwen") == "Qwen, and this device"
    assert said(node, ("Hello", 0), model="Qwen") == "This device, for Qwen"


def ended(node: Node, text: str, reason: str, **more: Any) -> list[Any]:
    """The line below an answer that has ended so, and whether it can be continued."""
    told: list[Any] = node.ask({"node": {"text": text, "reason": reason, "usage": None, **more}})
    return told


def test_an_answer_that_was_cut_or_stopped_can_be_continued(node: Node) -> None:
    usage = {"tokens": 8}
    assert ended(node, "Hello", "length", verified=True, usage=usage) == [
        "cut at 8 tokens: Continue goes on",
        True,
    ]
    assert ended(node, "Hello", "stopped", verified=True) == ["stopped", True]
    assert ended(node, "Hello", "eos", verified=True) == ["", False]


def test_so_can_one_whose_end_nobody_will_check(node: Node) -> None:
    half = {"verified": False, "settled": 2, "stream": "s"}
    assert ended(node, "Hello", "stopped", **half) == [
        "stopped; the last 3 characters were written by this device alone: not checked",
        True,
    ]
    assert ended(node, "Hello", "link", **half, left=True)[1]
    waits = ended(node, "Hello", "length", **half)
    assert waits == [
        "cut at the longest answer of the settings; the last 3 characters were written by this"
        " device alone: waiting for the verifier's check",
        False,
    ]
