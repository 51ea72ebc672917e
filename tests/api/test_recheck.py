"""Streams of answers that the device wrote alone are corrected while the verifier checks them, and
not only at its end: a slow target takes minutes for that."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from moa.api.answer import AnswerEvent, AnswerRequest, Began, Cut, Piece, Reading, Verified
from moa.api.recheck import Correction, Recheck
from tests.api.scripted import PATIENCE, browser, ended, served

WRITTEN = "the cat sat on the mat"
TRUE = "the cat ran to the man"
ASKED = {
    "messages": [{"role": "user", "content": "x"}],
    "stream": True,
    "moa": {"mode": "provisional", "resumable": True},
}
"""A stream that can be taken up again."""


class Client:
    """What a client that applies cuts has of the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.verified = 0

    def take(self, show: Any) -> None:
        if show is None:
            return
        self.text = self.text[: show.cut] + show.text
        self.verified = show.verified


def test_what_is_verified_is_told_and_the_first_difference_withdraws_the_rest() -> None:
    correction = Correction(WRITTEN)
    client = Client(WRITTEN)
    client.take(correction.take(Piece("the ")))
    assert (client.text, client.verified) == (WRITTEN, 4)
    client.take(correction.take(Piece("cat r")))
    assert (client.text, client.verified) == ("the cat r", 9)
    client.take(correction.take(Piece("an away", verified=False)))
    assert client.text == "the cat r", "only what is verified counts"
    client.take(correction.take(Cut(11)))
    client.take(correction.take(Piece(TRUE[11:])))
    client.take(correction.take(ended(TRUE)))
    assert (client.text, client.verified) == (TRUE, len(TRUE))


@pytest.mark.parametrize("seed", range(50))
def test_in_pieces_of_any_size_the_client_ends_with_the_targets_text(seed: int) -> None:
    draw = random.Random(seed)
    true = "".join(draw.choices("ab", k=draw.randrange(1, 12)))
    written = draw.choice([true, true[:-1], true + "b", "".join(draw.choices("ab", k=8))])
    correction = Correction(written)
    client = Client(written)
    at = 0
    while at < len(true):
        size = draw.randrange(1, 4)
        sure = draw.random() < 0.5
        client.take(correction.take(Piece(true[at : at + size], sure)))
        at += size
        if not sure and draw.random() < 0.7:
            client.take(correction.take(Verified(min(at, len(true)))))
        assert client.text[: client.verified] == true[: client.verified]
    client.take(correction.take(ended(true)))
    assert (client.text, client.verified) == (true, len(true))


def test_a_verifier_that_is_gone_again_changes_nothing() -> None:
    correction = Correction(WRITTEN)
    assert correction.take(Piece("the dog", verified=False)) is None
    assert correction.take(ended("the dog", verified=False, reason="link")) is None


async def test_a_kept_stream_is_corrected_as_the_target_writes() -> None:
    goes_on = asyncio.Event()

    def script(ask: AnswerRequest) -> Iterable[AnswerEvent | asyncio.Event]:
        yield Began()
        if not ask.question.prediction:
            yield Piece(WRITTEN, verified=False)
            yield ended(WRITTEN, verified=False, reason="link")
            return
        yield Reading(100, 2000)
        yield Piece("the ")
        yield Piece("cat r")
        yield goes_on
        yield Piece(TRUE[9:])
        yield ended(TRUE)

    async with served(script) as (_, address), browser(address) as client:
        first = await client.post("/v1/chat/completions", json=ASKED)
        assert first.text.rstrip().endswith("[DONE]")
        id = first.headers["X-Request-Id"]
        seen = [line[4:] for line in first.text.splitlines() if line.startswith("id: ")]
        told: list[dict[str, Any]] = []
        text = Client(WRITTEN)
        async with asyncio.timeout(PATIENCE):
            while not told:
                headers = {"Last-Event-ID": seen[-2]}
                async with client.stream("GET", f"/v1/streams/{id}", headers=headers) as stream:
                    async for line in stream.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        chunk = json.loads(line[6:])
                        told.append(chunk.get("moa") or {})
                        for choice in chunk["choices"]:
                            marks = choice.get("moa") or {}
                            new = choice["delta"].get("content", "")
                            text.text = text.text[: marks.get("cut")] + new
                            text.verified = marks.get("verified", text.verified)
                        if text.text == "the cat r":
                            goes_on.set()  # it was told before the target has written on
    assert {"reading": [100, 2000]} in told
    assert (text.text, text.verified) == (TRUE, len(TRUE))


def test_a_later_check_tells_only_what_is_new_and_a_difference_at_once() -> None:
    correction = Correction(WRITTEN, told=8)
    assert correction.take(Piece("the ")) is None
    assert correction.take(Piece("cat ")) is None
    show = correction.take(Piece("sat "))
    assert show is not None
    assert (show.text, show.verified, show.cut) == ("", 12, None)
    other = Correction(WRITTEN, told=8)  # an upstream may say something else the next time
    show = other.take(Piece("the dog"))
    assert show is not None
    assert (show.text, show.verified, show.cut) == ("dog", 7, 4)


async def test_what_is_known_to_be_verified_never_becomes_less() -> None:
    """A page counted to 369 of 1,633 characters and began anew, since a check was cut short."""
    checks = 0

    def script(ask: AnswerRequest) -> Iterable[AnswerEvent | asyncio.Event]:
        nonlocal checks
        yield Began()
        if not ask.question.prediction:
            yield Piece(WRITTEN[:6])
            yield Piece(WRITTEN[6:], verified=False)
            yield ended(WRITTEN, verified=False, reason="link")
            return
        checks += 1
        yield Piece(WRITTEN[:3])
        yield Piece(WRITTEN[3 : 6 + 3 * checks])
        if checks == 1:
            yield ended(WRITTEN[:9], verified=False, reason="link")
            return
        yield Piece(WRITTEN[12:])
        yield ended(WRITTEN)

    async with (
        served(script) as (_, address),
        browser(address) as client,
        asyncio.timeout(PATIENCE),
    ):
        first = await client.post("/v1/chat/completions", json=ASKED)
        id = first.headers["X-Request-Id"]
        told: list[dict[str, Any]] = []
        while not (told and told[-1].get("all_verified")):
            stream = await client.get(f"/v1/streams/{id}")
            chunks = [
                json.loads(line[6:])
                for line in stream.text.splitlines()
                if line.startswith("data: {")
            ]
            told = [choice["moa"] for one in chunks for choice in one["choices"] if "moa" in choice]
    verified = [marks["verified"] for marks in told if "verified" in marks]
    assert verified == sorted(verified)
    assert {6, 9, 12} <= set(verified)


async def test_a_stream_is_told_that_the_check_runs_also_where_nothing_new_is_verified() -> None:
    """For half a minute a page said that the check was waited for: the verifier read the beginning
    again that it had verified before."""
    goes_on = asyncio.Event()
    begun = 8  # characters, which are two pieces

    def script(ask: AnswerRequest) -> Iterable[AnswerEvent | asyncio.Event]:
        yield Began()
        pieces = [WRITTEN[at : at + 4] for at in range(0, len(WRITTEN), 4)]
        is_check = bool(ask.question.prediction)
        for n, piece in enumerate(pieces):
            yield Piece(piece, verified=not is_check and 4 * n < begun)
        if not is_check:
            yield ended(WRITTEN, verified=False, reason="link")
            return
        yield Reading(43, 43)
        yield Verified(4)
        yield goes_on
        yield ended(WRITTEN)

    async with (
        served(script) as (_, address),
        browser(address) as client,
        asyncio.timeout(PATIENCE),
    ):
        first = await client.post("/v1/chat/completions", json=ASKED)
        id = first.headers["X-Request-Id"]
        told: list[list[int]] = []
        while not told:
            async with client.stream("GET", f"/v1/streams/{id}") as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        told += [(json.loads(line[6:]).get("moa") or {}).get("reading")]
                        told = [reading for reading in told if reading]
                    if told[-1:] == [[1, 2]]:
                        goes_on.set()
    assert told == [[0, 2], [1, 2]]


@pytest.mark.parametrize("told", [False, True], ids=["before", "after"])
async def test_a_check_that_nobody_wants_ends_at_the_verifier(told: bool) -> None:
    """Also one that has told nothing yet; the next answer's check need not wait for it."""
    for_ever = asyncio.Event()
    checked = asyncio.Event()

    def script(ask: AnswerRequest) -> Iterable[AnswerEvent | asyncio.Event]:
        yield Began()
        if not ask.question.prediction:
            yield Piece(WRITTEN, verified=False)
            yield ended(WRITTEN, verified=False, reason="link")
            return
        if told:
            yield Piece("the ")
        checked.set()
        yield for_ever

    async with (
        served(script) as (answerer, address),
        browser(address) as client,
        asyncio.timeout(PATIENCE),
    ):
        first = await client.post("/v1/chat/completions", json=ASKED)
        await checked.wait()
        answerer.closed.clear()
        id = first.headers["X-Request-Id"]
        assert (await client.delete(f"/v1/streams/{id}")).status_code == 204
        await answerer.closed.wait()


def test_an_answer_that_cannot_be_verified_is_checked_ever_more_rarely() -> None:
    """A verifier may be there and refuse for hours, as one whose budget is spent."""
    nothing: Any = None
    recheck = Recheck(nothing, nothing, nothing)
    pauses = []
    for _ in range(8):
        recheck.tried(100.0)
        pauses.append(recheck.not_before - 100.0)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
