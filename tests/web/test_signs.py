"""Signs of life of an answer, in virtual time: whatever arrives when, the reader sees something new
within a second."""

from __future__ import annotations

import random

import pytest

from edge_client.cli import offline_check
from edge_client.screen.words import waiting
from tests.web.node import Node

IMPORTS = 'import { checkedBy, LOOK_SECONDS, said, Signs } from "./../../serve/page/signs.js";'
HANDLE = """
    if (ask.says) {
      checkedBy(ask.by);
      return said(ask.says);
    }
    const signs = new Signs(0);
    const other = new Signs(0); // of another answer
    Signs.heardAt = -Infinity; // the page has just been opened
    const seen = [];
    let number = 0;
    let [words, drawn] = ["", 0];
    let look = 0;
    for (const [at, changed] of [...ask.chunks, [ask.until, false]]) {
      for (; look < at; look += LOOK_SECONDS * ask.slow) {
        words = signs.words(look, ask.online ?? true);
        seen.push([look, `${drawn} ${words}`]);
      }
      (ask.beside ? other : signs).heard(at, changed);
      if (changed) seen.push([at, `${drawn = ++number} ${words}`]);
    }
    return seen;
"""
SECOND = 1.0


def longest_still(seen: list[list[object]], until: float) -> float:
    """The longest time for which the screen was the same."""
    longest = changed = 0.0
    last: object = None
    for at, screen in [*seen, [until, None]]:
        assert isinstance(at, int | float)
        if screen != last:
            longest = max(longest, at - changed)
            changed = at
            last = screen
    return longest


@pytest.mark.parametrize("slow", [1.0, 1.4])
def test_the_page_shows_something_new_each_second(node: Node, slow: float) -> None:
    """Also where the browser calls the timer late."""
    rng = random.Random(1)
    for _ in range(100):
        chunks = []
        at = 0.0
        while at < 60:
            at += rng.choice([0.05, 0.69, 0.71, 0.99, 1.0, 3.0, rng.uniform(0, 12)])
            chunks.append([at, rng.random() < 0.7])
        seen = node.ask({"chunks": chunks, "until": at, "slow": slow})
        assert longest_still(seen, at) < SECOND


def test_what_is_said_tells_silence_from_work_without_text(node: Node) -> None:
    seen = node.ask({"chunks": [], "until": 3.1, "slow": 1})
    assert seen[-1][1] == "0 no word for 3 s"
    beats = [[at / 2, False] for at in range(1, 7)]
    seen = node.ask({"chunks": beats, "until": 3.1, "slow": 1})
    assert seen[-1][1] == "0 the verifier is at work, 3 s"


def test_a_verifier_that_works_on_another_answer_is_not_silent(node: Node) -> None:
    """While it checked one of another conversation, the page had no word of it."""
    beats = [[at / 2, False] for at in range(1, 7)]
    seen = node.ask({"chunks": beats, "until": 3.1, "slow": 1, "beside": True})
    assert seen[-1][1] == "0 the verifier is at work, 3 s"


def test_what_this_device_says_of_a_lost_verifier_is_no_work_of_the_verifier(node: Node) -> None:
    beats = [[at / 2, False] for at in range(1, 7)]
    seen = node.ask({"chunks": beats, "until": 3.1, "slow": 1, "online": False})
    assert seen[-1][1] == "0 no word for 3 s"


def test_an_upstream_is_called_so(node: Node) -> None:
    assert node.ask({"says": "the verifier's check", "by": "upstream"}) == "the upstream's check"
    assert node.ask({"says": "the verifier's check", "by": "verifier"}) == "the verifier's check"


def test_so_does_the_terminal() -> None:
    for pause in (1 / 12, offline_check._TICK_SECONDS):
        for shift in range(10):
            times = [(shift / 10 + number) * pause for number in range(int(20 / pause))]
            seen: list[list[object]] = [[at, waiting(at)] for at in times]
            assert longest_still(seen, times[-1]) < SECOND
