"""The figures of `bench` and `demo` are true of each way of drafting."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.tools.compare import RATES, TimedAnswer, cells, rates
from edge_client.turn.stats import Stats
from tests.edge import kit
from tests.verifier import kit as verifier_kit


def answer(tokens: int, forwards: int, **streamed_by: int) -> TimedAnswer:
    stats: dict[str, Any] = {
        "tokens": tokens,
        "seconds": 2.0,
        "forwards": forwards,
        "streamed_by": streamed_by,
        "first_token_seconds": 0.25,
        "sent_bytes": 500,
        "received_bytes": 1500,
    }
    return TimedAnswer(ids=[], text="", verified=True, reason="eos", stats=stats)


@pytest.mark.parametrize("who", ["server", "device"])
def test_tokens_a_forward_do_not_depend_on_who_drafted(who: str) -> None:
    figures = rates([answer(10, 2, **{who: 10}), answer(20, 8, **{who: 20})])
    assert dict(zip(RATES, cells(figures), strict=True)) == {
        "tokens/s": "7.5",
        "tokens a forward": "3.00",
        "kB": "4.0",
    }


def test_offline_text_is_no_forward_s() -> None:
    assert rates([answer(30, 5, none=10)])["tokens_per_forward"] == 2.0
    assert cells(rates([answer(30, 0)]))[1] == "0.00"


@pytest.mark.parametrize("draft", ["none", "server", "device"])
async def test_a_turn_counts_its_forwards_in_each_way(draft: Any) -> None:
    """The tiny target is random: its drafts are seldom right, and each forward brings a token."""
    how: Any = {"draft": draft, "max_new_tokens": 12, "ignore_eos": True}
    async with kit.linked(**how) as (client, _, _):
        told = [event async for event in client.generate(ids=verifier_kit.prompt(1, 6))]
    stats = told[-1].stats
    assert stats["tokens_per_forward"] == round(12 / stats["forwards"], 3) >= 1
    if draft == "none":
        assert stats["forwards"] == 12


def test_a_turn_without_forwards_has_no_rate() -> None:
    assert Stats(started=0.0).report(1.0)["tokens_per_forward"] is None
