"""What the page shows of an answer, held against a model of what the endpoint said and what the
device wrote, whatever happens in which order: nothing lost, nothing twice, and never called
verified what is not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moa.text_stream import common_prefix
from tests.web.node import Node

IMPORTS = (
    """import { Turn } from "./turn.js"; import { Answer } from "./../../serve/page/answer.js";"""
)
HANDLE = """
    let turn = new Turn(), answer = new Answer();
    const show = (chunk) => { if (chunk) answer.take(chunk); };
    return ask.map(([verb, about, more]) => {
      if (verb === "begins") turn.begins(about);
      else if (verb === "forget") turn.forget();
      else if (verb === "chunk") show(turn.take(about));
      else if (verb === "write") { turn.here(); show(turn.wrote(about, more, "")); }
      else if (verb === "leaves") show(turn.leaves("link", { completion_tokens: 1 }));
      else {
        turn = new Turn(structuredClone(turn.kept()));
        answer = new Answer();
        show(turn.replay());
      }
      const { ids, before } = turn.alone ? turn.here() : { ids: [], before: turn.text };
      if (ask.at(-1)[0] === "calls") return answer.calls;
      const whole = answer.done && answer.allVerified;
      return [answer.text, answer.verified, whole, turn.text, before, [...ids], turn.unseen];
    });
"""
LETTERS = ["a", "b", " ", "é", "👩", "\n"]


class Model:
    """The answer by its promises: the reader has the endpoint's text where that is longer or
    another one, else what the device wrote after it."""

    def __init__(self) -> None:
        self.shown = ""
        self.theirs = ""
        self.verified = 0
        self.own: list[tuple[int, int]] = []
        """Tokens of the device, and where each ends."""
        self.begin = 0

    def write(self, id: int, piece: str) -> None:
        if not self.own:
            self.begin = len(self.shown)
        self.shown += piece
        self.own.append((id, len(self.shown)))

    def hear(self, text: str, sure: int, *, ends: bool) -> None:
        self.theirs = text
        same = common_prefix(self.shown, text)
        if same < len(text) or (ends and len(self.shown) > same):
            self.shown = text
            self.own = []
            self.verified = min(self.verified, same)
        self.verified = max(sure, self.verified)


def told(content: str, verified: int, cut: int | None, *, ends: bool, sure: bool) -> dict[str, Any]:
    marks: dict[str, Any] = {"verified": verified}
    if cut is not None:
        marks["cut"] = cut
    choice: dict[str, Any] = {"delta": {"content": content}, "moa": marks, "finish_reason": None}
    if ends:
        choice["finish_reason"] = "stop"
        marks |= {"reason": "eos", "all_verified": sure}
    return {"choices": [choice]}


@pytest.mark.parametrize("seed", range(60))
def test_the_page_shows_what_was_said_and_written(node: Node, seed: int) -> None:
    rng = random.Random(seed)
    target = "".join(rng.choice(LETTERS) for _ in range(60))
    provisional = rng.random() < 0.3  # the endpoint is a device's, which may take text back
    model = Model()
    asked: list[Any] = []
    wanted: list[Any] = []
    done = False
    steps = 0
    while not done:
        steps += 1
        verb = rng.choice(["chunk", "chunk", "write", "write", "begins", "forget", "kill"])
        if steps > 80:
            verb = "chunk"
        match verb:
            case "begins":
                asked.append([verb, f"stream-{steps}", None])
                model.theirs = ""
            case "forget":
                asked.append([verb, None, None])
                model.theirs = ""
            case "kill":
                asked.append([verb, None, None])
            case "write":
                right = target[len(model.shown)] if len(model.shown) < len(target) else "!"
                piece = right if rng.random() < 0.8 else rng.choice([*LETTERS, "", "zz"])
                asked.append([verb, steps, piece])
                model.write(steps, piece)
            case _:
                same = common_prefix(model.theirs, target)
                cut = None
                if same < len(model.theirs):  # what it said without knowing better
                    cut = rng.randint(0, same)
                base = model.theirs[:cut]
                more = target[len(base) : len(base) + rng.randint(0, 9 if steps < 80 else 60)]
                if provisional and steps < 80 and rng.random() < 0.3:
                    more += "?"
                text = base + more
                right = common_prefix(text, target)
                sure = rng.randint(0, right) if provisional else right
                sure = max(sure, min(model.verified, right))
                ends = text == target and rng.random() < 0.7
                done = ends
                if ends:
                    sure = len(text)
                asked.append([verb, told(more, sure, cut, ends=ends, sure=True), None])
                model.hear(text, sure, ends=ends)
        own = [id for id, _ in model.own]
        before = model.shown[: model.begin] if own else model.shown
        unseen = [id for id, end in model.own if end > model.verified]
        shown = model.shown
        wanted.append([shown, model.verified, done, shown, before, own, unseen])
    assert wanted[-1][0] == target
    for step, (found, expected) in enumerate(zip(node.ask(asked), wanted, strict=True)):
        assert found == expected, asked[: step + 1]


def test_an_answer_that_was_left_unverified_is_checked_later(node: Node) -> None:
    said = [told("Hello", 5, None, ends=False, sure=True)]
    said += [told("Hello, Ada", 10, None, ends=True, sure=True)]
    steps = [["begins", "one", None], ["chunk", said[0], None], ["write", 7, ", Bob"]]
    steps += [["leaves", None, None], ["kill", None, None], ["begins", "two", None]]
    found = node.ask([*steps, ["chunk", said[1], None]])
    assert found[3][:3] == ["Hello, Bob", 5, False]
    assert found[4][:2] == ["Hello, Bob", 5]
    assert found[-1][:3] == ["Hello, Ada", 10, True]


def test_calls_reach_the_page_also_of_a_turn_that_is_taken_up(node: Node) -> None:
    call = {
        "index": 0,
        "id": "c",
        "type": "function",
        "function": {"name": "add", "arguments": "{}"},
    }
    told = {"choices": [{"delta": {"tool_calls": [call]}, "moa": {"verified": 0}}]}
    end = {"choices": [{"delta": {}, "finish_reason": "tool_calls", "moa": {"reason": "eos"}}]}
    kept = [{"id": "c", "name": "add", "arguments": "{}"}]
    script: list[Any] = [["begins", "s"], ["chunk", told], ["chunk", end]]
    assert node.ask([*script, ["calls"]])[-2] == kept
    assert node.ask([*script, ["reload"], ["calls"]])[-1] == kept, "stored with the turn"
