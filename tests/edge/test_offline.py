"""Writing offline, reconnecting, and the events for the user."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.events import Adopt, Confirm, Link, Notice, Retract, Token
from edge_client.tools.emulated_network import LinkProxy
from moa.errors import LinkError, UsageError
from tests.edge import kit
from tests.verifier import kit as verifier_kit

COUNT = 40
IDS = verifier_kit.prompt(7, 12)


def truth(ids: list[int] = IDS) -> list[int]:
    return verifier_kit.generated(ids, COUNT)


async def interrupted(
    right: float, fault: str, *, ids: list[int] = IDS, back_after: int = 5, **settings: Any
) -> tuple[kit.Reader, LinkProxy]:
    """Generate; the link fails at the fourth token and returns after so many offline tokens."""
    device = kit.oracle([*ids, *truth(ids)], right)
    how = kit.FAST | {"max_new_tokens": COUNT, "draft": "device"} | settings
    transcript, written = kit.Reader(), 0
    async with (
        kit.verifier() as running,
        LinkProxy("127.0.0.1", running.transport.port) as link,
        EdgeClient(verifier=link.url, device=device, **how) as client,
    ):
        async for event in client.generate(ids=ids):
            transcript.take(event)
            if isinstance(event, Token):
                written += event.status == "provisional"
                if len(transcript.tokens) == 4 and written == 0:
                    getattr(link, fault)()
                if written == back_after and event.status == "provisional":
                    link.restore()
    return transcript, link


@pytest.mark.parametrize("fault", ["cut", "go_down", "go_silent"])
@pytest.mark.parametrize("right", [1.0, 0.4])
async def test_rewind_ends_in_the_targets_text(fault: str, right: float) -> None:
    transcript, _ = await interrupted(right, fault)
    assert transcript.tokens == truth()
    assert all(transcript.verified)
    kinds = {type(event) for event in transcript.events}
    if fault != "cut":
        assert (Confirm if right == 1.0 else Retract) in kinds


async def test_a_slow_reader_is_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that arrive while the user reads are not late, however long the reading takes. Only reading takes time
    here: on a busy machine the verifier may be late, too."""
    now = time.perf_counter()
    monkeypatch.setattr("edge_client.turn.shell.perf_counter", lambda: now)
    device = kit.oracle([*IDS, *truth()], 0.3)
    how = kit.FAST | {"max_new_tokens": 12, "draft": "device", "on_reconnect": "keep", "offline_after": 0.2}
    transcript = kit.Reader()
    async with (
        kit.verifier() as running,
        EdgeClient(verifier=running.transport.url, device=device, **how) as client,
    ):
        async for event in client.generate(ids=IDS):
            transcript.take(event)
            if isinstance(event, Token):
                now += 30.0
    assert transcript.tokens == truth()[:12]
    assert not [event for event in transcript.events if isinstance(event, Token) and event.status == "provisional"]


async def test_keep_takes_nothing_back() -> None:
    transcript, _ = await interrupted(0.3, "go_down", on_reconnect="keep", max_offline_tokens=8)
    kinds = [type(event) for event in transcript.events]
    assert Adopt in kinds
    assert Retract not in kinds
    assert len(transcript.tokens) == COUNT
    assert transcript.done is not None
    assert not transcript.done.verified
    # On a busy machine the verifier may be late once more after the link is back.
    *_, adopted = (event for event in transcript.events if isinstance(event, Adopt))
    after = adopted.stop - len(IDS)
    assert all(transcript.verified[after:])
    # What follows the adopted text is the target's own continuation of it.
    assert transcript.tokens[after:] == verifier_kit.generated([*IDS, *transcript.tokens[:after]], COUNT - after)


async def test_without_a_verifier_everything_is_provisional() -> None:
    async with EdgeClient(device=kit.device(), offline=True, max_new_tokens=10) as client:
        transcript = await kit.transcribe(client, IDS)
    assert len(transcript.tokens) == 10
    assert not any(transcript.verified)
    assert transcript.done is not None
    assert not transcript.done.verified
    assert [event.state for event in transcript.events if isinstance(event, Link)] == ["none"]


async def test_a_verifier_that_never_answers_the_phone() -> None:
    settings = kit.FAST | {"settle_seconds": 0.2, "max_offline_tokens": 0, "max_new_tokens": 10}
    async with EdgeClient(verifier="ws://127.0.0.1:9", device=kit.device(), **settings) as client:
        transcript = await kit.transcribe(client, IDS)
        with pytest.raises(LinkError, match="cannot reach"):
            await client.wait_online(2)
    assert len(transcript.tokens) == 10
    assert "offline" in [event.state for event in transcript.events if isinstance(event, Link)]


async def test_the_guard_stops_where_quality_would_fall() -> None:
    async with EdgeClient(device=kit.device(), offline=True, max_offline_tokens=6) as client:
        transcript = await kit.transcribe(client, IDS)
    assert len(transcript.tokens) == 6
    assert transcript.done is not None
    assert transcript.done.reason == "guard"


async def test_a_conversation_goes_on_over_a_lost_link() -> None:
    how = kit.FAST | {"max_new_tokens": 8, "draft": "device"}
    ids = list(IDS)
    async with (
        kit.verifier() as running,
        LinkProxy("127.0.0.1", running.transport.port) as link,
        EdgeClient(verifier=link.url, device=kit.device(), **how) as client,
        client.conversation() as conversation,
    ):
        for turn in range(4):
            expected = verifier_kit.generated(ids, 8)
            transcript = await kit.transcribe(conversation, ids)
            assert transcript.tokens == expected, turn
            assert all(transcript.verified)
            ids = [*ids, *expected, *verifier_kit.prompt(turn, 3)]
            if turn == 1:
                link.cut()
            if turn == 2:
                ids = ids[5:]  # edited history: nothing cached may be used for it


async def test_records_arrive_and_are_used() -> None:
    device = kit.oracle([*IDS, *truth()], 0.9)
    async with (
        kit.verifier() as running,
        EdgeClient(verifier=running.transport.url, device=device, draft="device", max_new_tokens=COUNT) as client,
        client.conversation() as conversation,
    ):
        transcript = await kit.transcribe(conversation, IDS)
        ids = [*IDS, *transcript.tokens]
        async with asyncio.timeout(300):
            while conversation.records.misses(len(IDS)):
                ids = [*ids, 5]
                ids += (await kit.transcribe(conversation, ids, max_new_tokens=2)).tokens
    assert conversation.records.rows >= len(IDS)
    assert not [event for event in transcript.events if isinstance(event, Notice)]


async def test_prompts_that_cannot_be() -> None:
    async with EdgeClient(device=kit.device(), offline=True) as client:
        with pytest.raises(UsageError, match="empty"):
            await anext(client.generate("  "))
        with pytest.raises(UsageError, match="context holds"):
            await anext(client.generate(ids=[5] * 600))


async def test_tokens_that_come_with_the_resume_while_a_round_is_under_way() -> None:
    """The verdict of a round is lost, its tokens come with the resume, and nothing is drafted from the old log."""
    expected = truth()
    device = kit.oracle([*IDS, *expected], 0.9)
    how = kit.FAST | {"max_new_tokens": COUNT, "draft": "device"}
    async with kit.verifier() as running, LinkProxy("127.0.0.1", running.transport.port) as link:
        for offset in (1, 40, 90, 140, 190):
            async with EdgeClient(verifier=link.url, device=device, **how) as client:
                transcript = kit.Reader()
                async for event in client.generate(ids=IDS):
                    transcript.take(event)
                    if len(transcript.tokens) == 5 and link.connections % 2:
                        link.cut_after(offset, "down")
            assert transcript.tokens == expected
            assert all(transcript.verified)
