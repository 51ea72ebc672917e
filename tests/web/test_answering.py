"""One answer of the browser's device in virtual time: an endpoint that is gone, silent, busy, new
or refuses, and a page that is killed, cost no text, and nobody waits longer than is promised."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.web.node import Node

IMPORTS = 'import { play } from "./../../../tests/web/world.js";'
HANDLE = "return play(ask);"
TEXT = "".join(chr(97 + at % 26) for at in range(200))
OFFLINE_AFTER = 1.0
SILENT = 2.5
"""Seconds without a sign after which a connection is late."""


class Page:
    """The text of an answer as `edge_client/serve/page/answer.js` has it."""

    def __init__(self, told: list[Any]) -> None:
        self.text = ""
        self.verified = 0
        self.links: list[str] = []
        self.notices: list[str] = []
        self.grew: list[float] = []
        """When text came."""
        self.cuts = 0
        self.end: dict[str, Any] | None = None
        for at, chunk in told:
            self._take(at, chunk)

    def _take(self, at: float, chunk: dict[str, Any]) -> None:
        if chunk.get("kill"):
            self.text = ""
            self.end = None
        news = chunk.get("moa", {})
        if "link" in news:
            self.links.append(news["link"])
        if "notice" in news:
            self.notices.append(news["notice"])
        for choice in chunk.get("choices", []):
            marks = choice["moa"]
            if "cut" in marks:
                assert marks["cut"] >= 0
                self.cuts += 1
                self.text = self.text[: marks["cut"]]
            content = choice["delta"].get("content", "")
            self.text += content
            if content:
                self.grew.append(at)
            self.verified = marks["verified"]
            assert self.text[: self.verified] == TEXT[: self.verified], (
                "never called verified what the target did not say"
            )
            if choice.get("finish_reason"):
                self.end = marks


def play(node: Node, script: list[Any], until: float = 200.0, **how: Any) -> tuple[Page, Any]:
    found = node.ask({"text": TEXT, "script": script, "until": until, **how})
    page = Page(found["told"])
    assert page.text == found["text"]
    return page, found


def test_online_it_is_the_endpoints_text_and_this_device_writes_nothing(node: Node) -> None:
    page, found = play(node, [], wrong=list(range(200)))
    assert page.text == TEXT
    assert page.verified == len(TEXT)
    assert page.cuts == 0
    assert page.end == {"reason": "eos", "all_verified": True, "verified": len(TEXT)}
    assert found["over"] < 6
    assert page.links == ["online"]


def test_without_an_endpoint_it_writes_at_once_and_ends(node: Node) -> None:
    page, found = play(node, [], alone=True)
    assert page.text == TEXT
    assert page.grew[0] < 0.1
    assert page.verified == 0
    assert page.end is not None
    assert (page.end["reason"], page.end["all_verified"]) == ("eos", False)
    assert found["over"] < 4


@pytest.mark.parametrize("away", [3, 5, 30, 120])
@pytest.mark.parametrize("how", ["up", "silent"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_cut_in_mid_answer(node: Node, away: float, how: str, restarts: bool) -> None:
    """Text goes on within a second of a cut and three of silence; back, it is corrected, and all of
    it verified."""
    out, back = (False, True) if how == "up" else (True, False)
    script = [[2, how, out], *([[2.5, "restart", 0]] if restarts else []), [2 + away, how, back]]
    page, found = play(node, script, wrong=[140], pace=0.1, most=120)
    first = next(at for at in page.grew if at > 2.05)
    assert first < 2 + OFFLINE_AFTER + (0.2 if how == "up" else SILENT)
    if "link" in (page.end or {}).get("reason", ""):
        assert found["over"] < 2 + away
    elif page.end is not None and page.end["all_verified"]:
        assert page.text == TEXT
    else:
        assert found["over"] is not None
    _, checked = play(node, [*script, [4 + away, "check", 0]], wrong=[140], pace=0.1, most=120)
    assert checked["text"] == TEXT
    assert checked["verified"] == len(TEXT)


def test_a_stream_that_is_kept_is_resumed_and_one_that_is_not_is_asked_for_with_the_text(
    node: Node,
) -> None:
    _, found = play(node, [[2, "up", False], [4, "up", True]])
    assert [method for _, method, *_ in found["asked"]].count("POST") == 1
    _, found = play(node, [[2, "up", False], [3.5, "restart", 0], [4, "up", True]])
    posts = [body for _, method, _, body in found["asked"] if method == "POST"]
    assert "prediction" not in posts[0]
    assert TEXT.startswith(posts[1]["prediction"]["content"])
    assert len(posts[1]["prediction"]["content"]) > 80


def test_an_endpoint_that_reads_a_long_prompt_is_waited_for(node: Node) -> None:
    """Its signs count, not seconds: nothing is shown that is withdrawn in the end."""
    page, _ = play(node, [], reading=60, wrong=[0])
    assert page.text == TEXT
    assert page.cuts == 0


def test_an_endpoint_that_reads_and_comes_no_further_is_not_waited_for(node: Node) -> None:
    page, _ = play(node, [], reading=60, mute=True)
    assert page.grew[0] < 3.5
    assert page.text == TEXT


def test_an_endpoint_that_only_says_it_is_there_is_not_waited_for(node: Node) -> None:
    page, _ = play(node, [], pace=20, piece=100)
    assert page.grew[0] < 3.5
    assert "late" in page.links
    assert page.text == TEXT
    assert page.verified == len(TEXT)


def test_stop_ends_the_work_of_the_endpoint(node: Node) -> None:
    page, found = play(node, [[1, "stop", 0]])
    assert page.end is not None
    assert page.end["reason"] == "cancelled"
    assert page.end["all_verified"], "what is there may be continued"
    assert [method for _, method, *_ in found["asked"]] == ["POST", "DELETE"]
    assert found["over"] < 1.1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_endpoint_is_asked_again_and_not_all_the_time(node: Node, status: int) -> None:
    page, found = play(node, [[40, "refuses", 0]], at_first={"refuses": status})
    assert page.text == TEXT
    asked = [at for at, *_ in found["asked"]]
    assert 8 < len(asked) < 30
    assert found["verified"] == len(TEXT) or not page.end["all_verified"]  # type: ignore[index]


def test_a_wrong_key_is_told_and_the_device_goes_on(node: Node) -> None:
    page, found = play(node, [[5, "refuses", 0], [5, "token", "right"]], at_first={"refuses": 401})
    assert page.links[0] == "locked"
    assert page.grew[0] < 1.5
    assert len([1 for at, *_ in found["asked"] if at < 5]) == 1


def test_a_request_that_is_refused_for_good_is_an_error(node: Node) -> None:
    page, found = play(node, [], at_first={"refuses": 400})
    assert found["over"] == "400 no"
    assert page.text == ""


def test_cut_off_on_purpose_it_asks_nothing(node: Node) -> None:
    _, found = play(node, [[1, "cut", True], [30, "cut", False]], most=50)
    assert not [at for at, *_ in found["asked"] if 1 < at < 30]


def test_the_links_state_is_true_while_it_is_silent(node: Node) -> None:
    """The page's dot said that it was connected, while the page wrote alone."""
    looks = [[1, "status", 0], [1.9, "status", 0]]
    silent = [[2, "silent", True], *([at, "status", 0] for at in (5, 6, 7))]
    back = [[9, "silent", False], *([at, "status", 0] for at in (9.5, 10, 15.5, 16))]
    _, found = play(node, [*looks, *silent, *back], pace=0.3)
    states = [link for link, _ in found["statuses"]]
    assert states[:2] == ["online", "online"]
    assert states[2:5] == ["late", "late", "late"]
    assert states[-1] == "online"
    rtts = [rtt for _, rtt in found["statuses"] if rtt is not None]
    assert rtts
    assert max(rtts) < 1000 * SILENT, "an outage is no round trip"


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_the_end_is_the_targets(node: Node, seed: int) -> None:
    rng = random.Random(seed)
    script: list[Any] = []
    now = 0.0
    for _ in range(rng.randrange(1, 12)):
        now += rng.choice([0.05, 0.3, 1.1, 3.0, 12.0])
        verb, value = rng.choice(
            [
                ("up", False),
                ("up", True),
                ("silent", True),
                ("silent", False),
                ("restart", 0),
                ("kill", 0),
                ("kill", 0),
                ("refuses", 503),
                ("refuses", 0),
                ("cut", True),
                ("cut", False),
            ]
        )
        script.append([now, verb, value])
    script += [[now + 1, verb, value] for verb, value in (("up", True), ("silent", False))]
    script += [[now + 1, "refuses", 0], [now + 1, "cut", False], [now + 60, "check", 0]]
    wrong = sorted(rng.sample(range(200), rng.randrange(4)))
    pace = rng.choice([0.02, 0.1, 0.4])
    page, found = play(
        node, script, until=now + 200, wrong=wrong, pace=pace, most=rng.choice([5, 60, 1000])
    )
    assert page.text == TEXT
    assert page.verified == len(TEXT)
    assert isinstance(found["over"], float | int)


def test_an_answer_that_only_the_verifier_can_write_waits_for_it(node: Node) -> None:
    page, found = play(node, [[0.5, "up", False], [15, "up", True]], structured=True, settle=20)
    assert page.text == TEXT
    assert page.cuts == 0
    page, found = play(node, [[0.5, "up", False]], structured=True, settle=20)
    assert TEXT.startswith(page.text), "this device wrote nothing"
    assert page.end == {"reason": "link", "all_verified": False, "verified": len(page.text)}
    assert page.notices == [
        "only the verifier writes JSON by a schema and calls tools: the answer waits for it"
    ]
    assert found["over"] == pytest.approx(20.5, abs=0.1)
    page, _ = play(node, [], structured=True, alone=True)
    assert (page.text, (page.end or {})["reason"]) == ("", "link")


ODD = {
    "no JSON": "{oops",
    "nothing": "null",
    "a number": "17",
    "a text": '"choices"',
    "a list": "[[]]",
    "deep": "[" * 100_000,
    "choices that are none": '{"choices": 17}',
    "a choice that is none": '{"choices": ["no"]}',
    "a delta that is none": '{"choices": [{"delta": 17, "moa": {}}]}',
    "content that is a number": '{"choices": [{"delta": {"content": 17}, "moa": {}}]}',
    "content that is a list": '{"choices": [{"delta": {"content": [{}, 1]}, "moa": {}}]}',
    "a cut before the start": '{"choices": [{"delta": {}, "moa": {"cut": -1}}]}',
    "a cut within a character": '{"choices": [{"delta": {}, "moa": {"cut": 1.5}}]}',
    "a cut that is a text": '{"choices": [{"delta": {}, "moa": {"cut": "x"}}]}',
    "verified that is a text": '{"choices": [{"delta": {}, "moa": {"verified": "x"}}]}',
    "verified before the start": '{"choices": [{"delta": {}, "moa": {"verified": -7}}]}',
    "calls that are none": '{"choices": [{"delta": {"tool_calls": 5}, "moa": {}}]}',
    "marks that are none": '{"choices": [{"delta": {}, "moa": 3}]}',
    "an end that is a list": '{"choices": [{"delta": {}, "finish_reason": [1], "moa": {}}]}',
}


@pytest.mark.parametrize("name", ODD)
def test_an_endpoint_that_says_odd_things_is_not_followed_and_not_asked_all_the_time(
    node: Node, name: str
) -> None:
    """Each time it is asked, at the same place: this device writes the rest."""
    page, found = play(node, [], at_first={"odd": ODD[name]})
    assert page.text == TEXT
    assert isinstance(page.verified, int)
    assert 0 <= page.verified <= len(TEXT)
    assert found["over"] is not None
    assert len(found["asked"]) < 100


def test_an_endpoint_that_fails_in_each_answer_is_asked_less_and_less(node: Node) -> None:
    """It says the same beginning each time, which is no progress."""
    page, found = play(node, [], at_first={"odd": '{"error": 5}'})
    assert page.text == TEXT
    assert 0 <= page.verified <= len(TEXT)
    assert len(found["asked"]) < 100
