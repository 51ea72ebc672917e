"""The embedded target answers every printed prompt right, and most other prompts that people may
try."""

import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest

from demo import held_out
from demo.corpus import talk
from demo.skills import Example, is_right
from edge_client.cli import bench, demo
from moa.demo import paths
from moa.target.torch_target import Target
from testing.speculator import GenerationSettings, Speculator

ROOT = Path(__file__).resolve().parents[2]

STORY = ("Ada", "fox", "garden")
PRINTED = {
    "Hello": Example("talk", "", "", ("Hello",)),
    "What is 17 plus 25?": Example("arithmetic", "", "42"),
    "What is 17 + 25 - 9?": Example("arithmetic", "", "33"),
    "Sort these numbers: 41, 12, 30.": Example("sort", "", "12, 30, 41"),
    "Write a function add_7 that returns x plus 7, with a doctest.": Example(
        "function", "", "", ("add", "7")
    ),
    "Write a short story about Ada, a fox and a garden.": Example("story", "", "", STORY),
    "Tell me a short story with Ada, a fox and a garden.": Example("story", "", "", STORY),
    "Make up a little story: the hero is Ben, the animal is a cat, the place is a forest.": Example(
        "story", "", "", ("Ben", "cat", "forest")
    ),
}
"""What we print as a prompt, and what a right answer is."""
TYPED = {
    "17 + 25": Example("arithmetic", "", "42"),
    "what's 17+25?": Example("arithmetic", "", "42"),
    "Hi": Example("talk", "", "", ("Hello",)),
    "thanks": Example("talk", "", "", ("welcome",)),
    "who are you?": Example("talk", "", "", ("demo model",)),
    "What can you do?": Example("talk", "", "", ("sixteen skills",)),
    "What is the capital of France?": Example("talk", "", "", ("cannot",)),
}
"""Prompts that new users type first."""


@pytest.fixture(scope="module")
def answered() -> Callable[[Sequence[str]], list[str]]:
    target = Target.load(str(paths().target), slots=16, capacity=640)

    def answer(asked: Sequence[str]) -> list[str]:
        ids = [held_out.encode(target.tokenizer, Example("", prompt, "")) for prompt in asked]
        replies = Speculator(target).generate(
            ids, GenerationSettings(max_new_tokens=256, shape=None)
        )
        return [
            target.tokenizer.decode(reply.ids, skip_special_tokens=True).strip()
            for reply in replies
        ]

    return answer


def test_every_printed_prompt_is_known() -> None:
    """But for those that go to another pair, which a command names."""
    pages = "\n".join(
        line
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if "--bundle" not in line
    )
    printed = set(
        re.findall(r'(?:generate\(|edge-client (?:generate|audit)[a-z -]* )"([^"]+)"', pages)
    )
    assert "What is 17 plus 25?" in printed
    assert {*printed, *bench._PROMPTS, *demo._PROMPTS, demo._CUT_PROMPT} == set(PRINTED)


@pytest.mark.parametrize("expected", [PRINTED, TYPED], ids=["printed", "typed"])
def test_prompts_of_ours_are_answered_right(
    expected: dict[str, Example], answered: Callable[[Sequence[str]], list[str]]
) -> None:
    replies = dict(zip(expected, answered(list(expected)), strict=True))
    assert {
        prompt: reply for prompt, reply in replies.items() if not is_right(expected[prompt], reply)
    } == {}


def test_skills_survive_ways_of_asking_that_training_lacked_and_small_talk_is_answered_as_it_was_taught(
    answered: Callable[[Sequence[str]], list[str]],
) -> None:
    asked = held_out.asked_prompts()[::4]
    said = list(islice(talk(1), 24))
    replies = answered([example.prompt for example in (*asked, *said)])
    wrong = [
        not is_right(example, reply)
        for example, reply in zip((*asked, *said), replies, strict=True)
    ]
    assert sum(wrong[: len(asked)]) <= 0.15 * len(asked)
    assert sum(wrong[len(asked) :]) <= 2
