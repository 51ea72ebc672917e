"""The line below an answer that is being written: true of the text, and a sign of life."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tests.web.node import Node

IMPORTS = """import { continuable, continuationOf, measured, noteOf, progressOf, writerOf, writingOf }
    from "./../../serve/page/chat.js";
    import { Answer } from "./../../serve/page/answer.js";
    import { refuses, troubleOf } from "./../../serve/page/signs.js";"""
HANDLE = """
    refuses(ask.refuses ?? false);
    if (ask.link) return troubleOf(...ask.link);
    if (ask.node && ask.by) return writerOf(ask.node);
    if (ask.node) return [noteOf(ask.node), continuable(ask.node)];
    if (ask.more) return continuationOf(ask.more, ask.alone);
    if (ask.measured) return measured(ask.measured);
    const live = new Answer(ask.before, ask.settled);
    for (const chunk of ask.chunks) live.take(chunk);
    if (ask.ends) { // as the page settles an answer
        const node = { text: live.text, verified: live.isSettled, settled: live.settled.length };
        Object.assign(node, { reason: ask.ends, stream: "s", usage: ask.usage });
        return [measured(node), noteOf(node)];
    }
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


def test_a_continuation_says_that_it_drops_what_is_not_verified(node: Node) -> None:
    """Behind Stop while the verifier was away, what the device had written went without a word."""
    stopped = {"text": "Hello", "verified": False, "settled": 2, "reason": "stopped"}
    told = node.ask({"more": stopped, "alone": False})
    assert told == "Goes on behind what the verifier has checked: the rest is written anew"
    assert node.ask({"more": stopped, "alone": True}) == "", "nobody verifies, and all is kept"
    assert node.ask({"more": {**stopped, "verified": True}, "alone": False}) == ""


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


def test_no_check_is_promised_while_the_verifier_refuses(node: Node) -> None:
    """It said "waiting for the verifier's check", which cannot come."""

    def note(refuses: bool, **more: Any) -> str:
        answer = {"text": "Hello", "reason": "eos", "verified": False, "stream": "s", **more}
        (told, _) = node.ask({"node": answer, "refuses": refuses})
        return str(told)

    for more in ({}, {"settled": 2}, {"stale": True}, {"text": ""}):
        assert "waiting" in note(False, **more) or "asked again when" in note(False, **more)
        assert "waiting" not in note(True, **more)
        assert "when the verifier is back" not in note(True, **more)
    assert note(True) == (
        "written by this device alone: not checked, for the verifier refuses this device"
    )


def test_the_reason_why_nothing_is_verified_is_on_the_page(node: Node) -> None:
    assert node.ask({"link": ["refused", "another tokenizer (use its bundle)"]}) == (
        "The verifier refuses this device: another tokenizer (use its bundle)."
        " Until that is changed it checks nothing."
    )
    assert node.ask({"link": ["offline", "nothing listens there"]}) == (
        "The verifier is not there: nothing listens there"
    )
    assert node.ask({"link": ["late", ""]}) == "No word from the verifier"
    assert node.ask({"link": ["online", ""]}) == ""


def test_an_answer_that_the_endpoint_has_forgotten_says_what_of_it_is_verified(node: Node) -> None:
    """It said "no longer kept: ask again", and offered nothing."""
    cut = "cut off, for the endpoint has forgotten the rest: Continue goes on"
    forgotten = {"verified": False, "lost": True, "stream": "s"}
    for settled, said_of_it in (
        (5, "what stands here is verified"),
        (2, "the last 3 characters were written by this device alone: not checked"),
        (0, "written by this device alone: not checked"),
    ):
        told = ended(node, "Hello", "lost", **forgotten, settled=settled)
        assert told == [f"{cut}; {said_of_it}", True]


def test_one_that_could_not_be_continued_can_be_another_time(node: Node) -> None:
    forgotten = {"verified": False, "lost": True, "stream": "s", "settled": 5}
    assert ended(node, "Hello", "lost", **forgotten, error="no answer") == ["no answer", True]


def test_the_targets_own_text_is_the_targets_also_where_its_end_is_missing(node: Node) -> None:
    half = {"text": "Hello", "model": "Qwen", "verified": False}
    assert node.ask({"by": True, "node": {**half, "settled": 5}}) == "Qwen"
    assert node.ask({"by": True, "node": {**half, "settled": 2}}) == "Qwen, and this device"
    assert node.ask({"by": True, "node": half}) == "This device, for Qwen"


def below(node: Node, **more: Any) -> str:
    """The line of figures below an answer that has ended."""
    return str(node.ask({"measured": more}))


def test_an_answer_that_has_ended_says_its_length_and_that_it_is_verified(node: Node) -> None:
    usage = {"tokens": 433, "speed": 43.3, "total": 500, "context": 2048}
    figures = "43 tokens/s · 500 of 2048 tokens of context"
    assert (
        below(node, text="Hello", usage=usage, verified=True) == f"433 tokens, verified · {figures}"
    )
    assert below(node, text="Hello", usage=usage, verified=False) == f"433 tokens · {figures}"
    assert below(node, text="Hello", usage={"tokens": 2}, verified=True) == "2 tokens, verified"
    assert below(node, text="Hé👩", verified=True) == "3 characters, verified", "nobody has counted"
    rest = {"speed": 3.25, "total": 60, "context": 99}
    assert below(node, text="Hello", usage=rest, verified=True) == (
        "5 characters, verified · 3.3 tokens/s · 60 of 99 tokens of context"
    ), "of the rest of an answer the tokens are not those of all of it"
    assert below(node, text="", verified=True) == "", "nothing was written"
    assert "verified" not in below(node, text="Hello", verified=True, error="no answer: gone")


class Stream:
    """A stream of random chunks, and what of its text is verified."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.before = self.chance.choice(["", "", "Once é"])
        """What was there before, verified or not."""
        self.settled = self.chance.choice([len(self.before), len(self.before), 0])
        self.sure = [at < self.settled for at in range(len(self.before))]
        """Of each character whether it is verified."""
        self.chunks: list[Any] = []

    @property
    def firsts(self) -> int:
        """Characters before the first one that is not verified."""
        return [*self.sure, False].index(False)

    def corrected(self) -> None:
        """A chunk that may withdraw text, and says how much is verified from the beginning."""
        begin = len(self.before)
        marks = {}
        if self.chance.random() < 0.3:
            kept = self.chance.randrange(max(self.firsts, begin), len(self.sure) + 1)
            marks["cut"] = kept - begin
            del self.sure[kept:]
        text = self._text()
        self.sure += [False] * len(text)
        verified = self.chance.randrange(max(self.firsts, begin), len(self.sure) + 1)
        marks["verified"] = verified - begin
        if self.settled == begin:  # else nothing is verified behind what is not
            self.sure = [at < verified for at in range(len(self.sure))]
        self._add(text, marks)

    def marked(self) -> None:
        """A chunk of a stream that stays as it is: only what the device wrote alone has a mark."""
        text = self._text()
        is_alone = self.chance.random() < 0.2
        self.sure += [not is_alone] * len(text)
        self._add(text, {"unverified": True} if is_alone else {})

    def end(self, *, verified: bool) -> None:
        """With it all is verified, or what is known to be."""
        moa = {"reason": "eos", "all_verified": verified}
        self.chunks.append({"choices": [{"delta": {}, "finish_reason": "stop", "moa": moa}]})

    def _text(self) -> str:
        return "é👩 x"[: self.chance.randrange(4)]

    def _add(self, text: str, marks: dict[str, Any]) -> None:
        self.chunks.append({"choices": [{"delta": {"content": text}, "moa": marks}]})


@pytest.mark.parametrize("seed", range(100))
def test_an_answer_is_called_verified_where_all_of_it_is(node: Node, seed: int) -> None:
    """In each mode, stopped anywhere or ended, behind text that was verified before or was not."""
    stream = Stream(seed)
    for _ in range(stream.chance.randrange(8)):
        (stream.corrected if seed % 2 else stream.marked)()
    is_verified = all(stream.sure)
    reason = stream.chance.choice(["eos", "stopped"])
    if reason == "eos":
        is_verified = stream.chance.random() < 0.5
        stream.end(verified=is_verified)
        is_verified = is_verified and stream.settled == len(stream.before)
    usage = {"tokens": 7} if stream.chance.random() < 0.5 else None
    ask = {"before": stream.before, "settled": stream.settled, "chunks": stream.chunks}
    told, note = node.ask({**ask, "ends": reason, "usage": usage})
    length = "7 tokens" if usage else f"{len(stream.sure)} characters"
    if usage or stream.sure:
        assert told == length + (", verified" if is_verified else "")
    else:
        assert told == "", "nothing was written"
    says_what_is_not = re.search("not verified|this device alone|nothing", note)
    assert bool(says_what_is_not) == (not is_verified), note
