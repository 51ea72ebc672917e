"""Writing offline, reconnecting, and the events for the user."""

from __future__ import annotations

import time
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.events import Adopt, Confirm, Progress, Retract, Token
from edge_client.turn import shell, worker
from moa.errors import UsageError
from tests.edge import kit
from tests.edge.test_exact import COUNT, truth
from tests.verifier import kit as verifier_kit

IDS = verifier_kit.prompt(7, 12)


async def interrupted(right: float, fault: str, **settings: Any) -> kit.Reader:
    """Generate; the link fails at the fourth token and returns after five offline tokens."""
    how = kit.FAST | {"max_new_tokens": COUNT, "draft": "device"} | settings
    reader = kit.Reader()
    async with kit.linked(kit.oracle([*IDS, *truth(IDS)], right), **how) as (client, _, link):
        async for event in client.generate(ids=IDS):
            reader.take(event)
            if isinstance(event, Token):
                written = sum(
                    told.status == "provisional"
                    for told in reader.events
                    if isinstance(told, Token)
                )
                if len(reader.tokens) == 4 and not written:
                    getattr(link, fault)()
                if written == 5 and event.status == "provisional":
                    link.restore()
    return reader


@pytest.mark.parametrize(
    ("right", "fault", "draft"),
    [
        (0.4, "cut", "device"),
        (1.0, "go_down", "device"),
        (0.4, "go_silent", "device"),
        (1.0, "go_silent", "server"),
    ],
)
async def test_rewind_ends_in_the_targets_text(right: float, fault: str, draft: str) -> None:
    """`go_silent` is like a verifier that is stopped: connections stay open, no bytes move."""
    reader = await interrupted(right, fault, draft=draft)
    assert reader.tokens == truth(IDS)
    assert all(reader.verified)
    if fault != "cut":
        assert (Confirm if right == 1.0 else Retract) in {type(event) for event in reader.events}


async def test_keep_takes_nothing_back() -> None:
    reader = await interrupted(0.3, "go_down", on_reconnect="keep", max_offline_tokens=8)
    kinds = [type(event) for event in reader.events]
    assert Adopt in kinds
    assert Retract not in kinds
    assert len(reader.tokens) == COUNT
    assert reader.done is not None
    assert not reader.done.verified
    # On a busy machine the verifier may be late once more after the link is back.
    after = reader.adopted
    assert all(reader.verified[after:])
    # What follows the adopted text is the target's own continuation of it.
    assert reader.tokens[after:] == verifier_kit.generated(
        [*IDS, *reader.tokens[:after]], COUNT - after
    )


async def test_a_slow_reader_is_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that arrive while the user reads are not late, however long the reading takes. Only
    reading takes time here: on a busy machine the verifier may be late, too."""
    now = time.perf_counter()
    monkeypatch.setattr("edge_client.turn.shell.perf_counter", lambda: now)
    how = kit.FAST | {
        "max_new_tokens": 12,
        "draft": "device",
        "on_reconnect": "keep",
        "offline_after": 0.2,
    }
    reader = kit.Reader()
    async with kit.linked(kit.oracle([*IDS, *truth(IDS)], 0.3), **how) as (client, _, _):
        async for event in client.generate(ids=IDS):
            reader.take(event)
            if isinstance(event, Token):
                now += 30.0
    assert reader.tokens == truth(IDS)[:12]
    assert not [
        event
        for event in reader.events
        if isinstance(event, Token) and event.status == "provisional"
    ]


async def test_a_conversation_goes_on_over_a_lost_link() -> None:
    ids = list(IDS)
    async with (
        kit.linked(**kit.FAST | {"max_new_tokens": 8, "draft": "device"}) as (client, _, link),
        client.conversation() as conversation,
    ):
        for turn in range(4):
            expected = verifier_kit.generated(ids, 8)
            reader = await kit.transcribe(conversation, ids)
            assert reader.tokens == expected, turn
            assert all(reader.verified)
            ids = [*ids, *expected, *verifier_kit.prompt(turn, 3)]
            if turn == 1:
                link.cut()
            if turn == 2:
                ids = ids[5:]  # edited history: nothing cached may be used for it


async def test_the_guard_stops_where_quality_would_fall_and_prompts_that_cannot_be_are_refused() -> (
    None
):
    async with EdgeClient(device=kit.device(), offline=True, max_offline_tokens=6) as client:
        reader = await kit.transcribe(client, IDS)
        assert len(reader.tokens) == 6
        assert reader.done is not None
        assert (reader.done.reason, reader.states) == ("guard", ["none"])
        with pytest.raises(UsageError, match="empty"):
            await anext(client.generate("  "))
        with pytest.raises(UsageError, match="context holds"):
            await anext(client.generate(ids=[5] * 600))


async def test_a_device_that_reads_a_long_prompt_alone_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand tokens take a small processor half a minute."""
    monkeypatch.setattr(shell, "_TELL_SECONDS", 0.0)
    monkeypatch.setattr(worker, "BLOCKING", 0.0)
    async with EdgeClient(device=kit.device(), max_new_tokens=2) as client:
        reader = await kit.transcribe(client, verifier_kit.prompt(7, 400))
    told = [event for event in reader.events if isinstance(event, Progress)]
    assert told
    assert all(one.by == "device" and 0 <= one.done < one.total for one in told)
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert len(reader.tokens) == 2
