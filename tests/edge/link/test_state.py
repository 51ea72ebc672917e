"""What people are told of a link while nothing is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge_client.link.dialling import Dialling
from edge_client.link.state import LinkWatch, state_of
from moa.errors import LinkError, RemoteError
from moa.wire import Code
from moa.wire.messages import Behind

LOST = LinkError("the connection was lost", hint="is it running?")
REFUSAL = RemoteError(Code.TOKENIZER, "another tokenizer", hint="use another bundle")


def link(**parts: Any) -> Any:
    """One that is up and well, but for these parts."""
    usual = {
        "up": True,
        "dialling": Dialling(),
        "behind": Behind(),
        "unanswered": "",
        "limited": "",
        "limited_until": float("-inf"),
        "is_silent": lambda now: False,
    }
    return SimpleNamespace(**usual | parts)


def failed(error: Exception) -> Dialling:
    """After an attempt that has ended so."""
    dialling = Dialling()
    dialling.ended(error, 1.0)  # type: ignore[arg-type]
    return dialling


@pytest.mark.parametrize(
    ("parts", "state", "why"),
    [
        ({}, "online", ""),
        ({"up": False}, "offline", "connecting"),
        ({"up": False, "dialling": failed(LOST)}, "offline", LOST.line()),
        ({"up": False, "dialling": failed(REFUSAL)}, "refused", REFUSAL.line()),
        ({"dialling": Dialling(cut=True)}, "offline", "disconnected on purpose"),
        ({"behind": Behind(away="the engine is away")}, "offline", "the engine is away"),
        ({"unanswered": "nothing yet"}, "late", "nothing yet"),
        ({"limited": "used up", "limited_until": 9.0}, "limited", "used up"),
        ({"is_silent": lambda now: now > 1}, "late", ""),
    ],
)
def test_the_state_and_why_it_is_so(parts: dict[str, Any], state: str, why: str) -> None:
    assert state_of(link(**parts), 2.0) == (state, why)


def test_it_is_refused_also_while_it_is_asked_once_more() -> None:
    """A page that looked just then said that the verifier is not there."""
    dialling = failed(REFUSAL)
    dialling.new_turn()
    assert state_of(link(up=False, dialling=dialling), 2.0) == ("refused", REFUSAL.line())


def told(watch: LinkWatch, *states: tuple[float, Any]) -> list[str]:
    """What is told of a link that is so at these times."""
    lines = []
    for now, one in states:
        watch.link = one
        lines.append(watch.look(now))
    return lines


def test_a_link_that_is_lost_is_told_of_once_and_so_is_its_return() -> None:
    down = link(up=False, dialling=failed(LOST))
    watch = LinkWatch(link(), "the verifier")
    assert told(watch, (0, link()), (1, down), (1.5, down), (2, down), (3, down)) == [
        "",
        "",
        "",
        f"offline: {LOST.line()}; this device answers alone until it is back",
        "",
    ]
    assert watch.trouble == LOST.line()
    assert told(watch, (4, link()), (5, link())) == ["online", ""]
    assert watch.trouble == ""


def test_one_that_is_back_within_a_second_is_no_news() -> None:
    down = link(up=False, dialling=failed(LOST))
    watch = LinkWatch(link(), "the verifier")
    looks = [(0, down), (0.5, link()), (1, down), (1.5, link()), (2, down), (2.5, down)]
    assert told(watch, *looks) == [""] * 6


def test_a_silent_verifier_and_one_that_refuses_are_told_apart() -> None:
    silent = link(is_silent=lambda now: True)
    assert told(LinkWatch(silent, "the verifier"), (0, silent), (1, silent))[1] == (
        "late: no word from the verifier; this device answers alone until it is back"
    )
    refused = link(up=False, dialling=failed(REFUSAL))
    line = f"refused: {REFUSAL.line()}; this device answers alone until somebody changes that"
    watch = LinkWatch(refused, "the verifier", trouble="it was away before")
    assert told(watch, (0, refused), (1, refused)) == [line, ""]
    assert told(watch, (2, link())) == ["online"]


def test_what_was_told_before_is_not_told_again() -> None:
    down = link(up=False, dialling=failed(LOST))
    watch = LinkWatch(down, "the verifier", trouble="the same in other words")
    assert told(watch, (0, down), (5, down), (6, link())) == ["", "", "online"]
