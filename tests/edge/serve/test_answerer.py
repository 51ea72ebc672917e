"""The client's events with positions in characters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from edge_client import Adopt, Confirm, Done, EdgeClient, Link, Notice, Prompt, Retract, Token
from edge_client.conversation import Conversation
from edge_client.device import Device
from edge_client.events import Event
from edge_client.link import connection
from edge_client.serve import answerer
from edge_client.serve.answerer import EdgeAnswerer, Marks
from edge_client.serve.settings import ServeSettings
from edge_client.turn.worker import DrafterWorker
from moa.api.answer import (
    AnswerRequest,
    Began,
    Counts,
    Cut,
    Ended,
    LinkNews,
    Mode,
    Note,
    Piece,
    Question,
    Scored,
    Verified,
)
from moa.api.errors import ApiError
from moa.errors import ConfigError, DeviceError
from moa.logprobs import TokenLogprobs
from moa.process.listening import Port
from tests.edge.serve.pair import verifier
from tests.edge.test_offline_check import slow_verifier
from tests.edge.turn.world import Letters, World
from tests.torture.device import demo_device
from tests.torture.fake_verifier import BEHAVIOURS, Behaviour, fake

STATS = {
    "tokens": 2,
    "drafted": 4,
    "accepted": 3,
    "calls": 1,
    "forwards": 2,
    "streamed_by": {"server": 4, "none": 1},
    "unverified_tokens": 0,
    "seconds": 0.1,
}


def test_an_answer_that_the_device_has_cut_says_so_beside_why_it_was_alone() -> None:
    """Only the verifier was named: whoever read it waited for the network."""
    marks = Marks(Letters(), eos_ids={9})
    marks.take(Link(state="offline", detail="gone"))
    ended = marks.take(Done(reason="guard", verified=False, text="ab", stats=STATS))
    assert isinstance(ended, Ended)
    assert ended.why.startswith("gone; this device stopped: its text repeats itself")
    ended = marks.take(Done(reason="eos", verified=False, text="ab", stats=STATS))
    assert isinstance(ended, Ended)
    assert ended.why == "gone"


def test_an_answer_that_the_users_own_limit_has_cut_names_that_limit() -> None:
    marks = Marks(Letters(), eos_ids={9}, max_offline_tokens=40)
    marks.take(Link(state="offline", detail="gone"))
    ended = marks.take(Done(reason="guard", verified=False, text="ab", stats=STATS))
    assert isinstance(ended, Ended)
    limit = "it writes 40 unverified tokens at most (max_offline_tokens)"
    assert ended.why == f"gone; this device stopped: {limit}"


def test_positions_in_tokens_become_positions_in_the_text() -> None:
    marks = Marks(Letters(), eos_ids={9})
    told = [
        marks.take(event)
        for event in [
            Prompt(ids=[1, 2, 3]),
            Token(position=3, id=7, text="ab", status="verified"),
            Token(position=4, id=8, text="", status="provisional"),
            Token(position=5, id=9, text="cde", status="provisional"),
            Confirm(start=4, stop=5),
            Retract(start=5, stop=6, characters=2),
            Token(position=5, id=6, text="f", status="provisional"),
            Adopt(start=5, stop=6),
            Link(state="offline", detail="gone"),
            Notice(message="far"),
            Done(reason="eos", verified=True, text="abf", stats=STATS),
        ]
    ]
    counts = Counts(
        prompt_tokens=3,
        tokens=2,
        drafted=4,
        accepted=3,
        calls=1,
        forwards=2,
        forward_tokens=5,
        more={"seconds": 0.1},
    )
    assert told == [
        Began(),
        Piece("ab"),
        Piece("", False),
        Piece("cde", False),
        Verified(2),
        Cut(2),
        Piece("f", False),
        Verified(3),
        LinkNews("offline", "gone"),
        Note("far"),
        Ended(reason="eos", verified=True, text="abf", counts=counts),
    ]


@pytest.mark.parametrize("for_now", [True, False])
def test_a_verifier_that_failed_too_often_has_not_refused(for_now: bool) -> None:
    """To ask again later was called vain of both."""
    marks = Marks(Letters(), eos_ids={9})
    marks.take(Prompt(ids=[1]))
    marks.take(Link(state="refused", detail="again and again", for_now=for_now))
    assert marks.trouble == "again and again"
    assert marks.refused is not for_now
    ended = marks.take(Done(reason="link", verified=False, text="", stats=STATS))
    assert isinstance(ended, Ended)
    assert ended.refused is not for_now


def test_log_probabilities_have_the_texts_of_their_tokens() -> None:
    marks = Marks(Letters(), eos_ids={9})
    own = [TokenLogprobs(-float(n), ((n, -0.5),)) for n in range(1, 4)]
    events: list[Any] = [
        Prompt(ids=[1]),
        Token(position=1, id=7, text="G", status="verified", logprobs=own[0]),
        Token(position=2, id=8, text="H", status="provisional"),
        Token(position=3, id=8, text="H", status="provisional"),
        Retract(start=3, stop=4, characters=2),
        Token(position=3, id=9, text="", status="provisional"),
        Confirm(start=2, stop=4, logprobs=(own[1], own[2])),
    ]
    told = [marks.take(event) for event in events]
    assert told[1] == Piece("G", logprobs=(Scored("G", -1.0, (("A", -0.5),)),))
    assert told[-1] == Verified(2, (Scored("H", -2.0, (("B", -0.5),)),)), (
        "the token that ends the answer has none"
    )


@pytest.mark.parametrize("mode", ["hold", "provisional", "keep"])
async def test_a_silent_verifier_and_a_drafter_that_fails_end_an_answer(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(worker: DrafterWorker, action: object, box: object) -> None:
        raise DeviceError("the drafter failed")

    monkeypatch.setattr(DrafterWorker, "run", fails)
    monkeypatch.setattr(answerer, "_FIRST_SECONDS", 0.2)
    device = demo_device()
    welcome = {"vocab_size": device.bundle.manifest.target.facts.vocab_size}
    async with (
        fake(BEHAVIOURS["silence"], (60,), welcome) as made,
        EdgeClient(device=device, verifier=made.url) as client,
    ):
        await client.wait_online(10.0)
        ask = AnswerRequest(question=Question(ids=(1, 40, 41)), mode=mode, patience=0.2)
        edge = EdgeAnswerer(client, "demo")
        with pytest.raises(ApiError) as refused:
            async with asyncio.timeout(300.0):
                _ = [event async for event in edge.answer(ask, await edge.encode(ask))]
    assert (refused.value.status, refused.value.code) == (503, "no_answer")


QUESTION = Question(messages=[{"role": "user", "content": "What is 17 plus 25?"}])


async def check_of(client: EdgeClient, text: str) -> list[Any]:
    """The events of the check of an answer that the device has written before."""
    ask = AnswerRequest(
        question=structs.replace(QUESTION, prediction=text),
        mode="provisional",
        patience=0.2,
        was_written=True,
        was_ended=True,
    )
    edge = EdgeAnswerer(client)
    return [event async for event in edge.answer(ask, await edge.encode(ask))]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the drafter is asked to do, which it does not."""
    runs: list[object] = []

    async def run(worker: DrafterWorker, action: object, box: object) -> None:
        runs.append(action)

    monkeypatch.setattr(DrafterWorker, "run", run)
    return runs


@contextlib.asynccontextmanager
async def beside(behaviour: Behaviour, **changes: Any) -> AsyncIterator[EdgeClient]:
    """A client of a verifier that behaves so."""
    device = demo_device()
    welcome = {"vocab_size": device.bundle.manifest.target.facts.vocab_size}
    async with (
        fake(behaviour, (60,), welcome) as made,
        EdgeClient(device=device, verifier=made.url, offline_after=0.0, **changes) as client,
    ):
        await client.wait_online(60)
        yield client


async def test_a_check_at_a_silent_verifier_writes_nothing_and_ends(steps: list[object]) -> None:
    """The text is there already: to write it again would take as long as the answer took."""
    async with beside(BEHAVIOURS["silence"], answer_seconds=0.3) as client:
        async with asyncio.timeout(60.0):
            events = await check_of(client, "17 plus 25 is 43.")
    ended = events[-1]
    assert steps == []
    assert (ended.text, ended.verified) == ("17 plus 25 is 43.", False)


async def test_a_check_waits_for_a_busy_verifier_and_writes_nothing(steps: list[object]) -> None:
    """It was ended after a second, and begun anew from the start again and again."""
    asked = asyncio.Event()

    def busy(message: Any, right: Any) -> Any:
        asked.set()
        return BEHAVIOURS["busy for ever"](message, right)

    async with beside(busy) as client:
        check = asyncio.create_task(check_of(client, "17 plus 25 is 43."))
        async with asyncio.timeout(60.0):
            await asked.wait()
        done, _ = await asyncio.wait({check}, timeout=2.0)
        assert not done
        check.cancel()
        await asyncio.wait({check})
    assert steps == []


async def test_a_check_is_not_ended_while_a_slow_verifier_works() -> None:
    """Each of its beginnings threw away what the verifier had read."""
    port = Port("127.0.0.1", 0)
    url = f"ws://127.0.0.1:{port.number}"
    # Its forward takes longer than a request waits for a check.
    async with slow_verifier(port, 0.6), EdgeClient(verifier=url) as client:
        await client.wait_online(60)
        events = await check_of(client, "17 plus 25 is 43.")
    assert events[-1].verified


async def test_a_check_confirms_what_is_right_and_replaces_what_is_not() -> None:
    async with verifier() as url, EdgeClient(verifier=url) as client:
        await client.wait_online(60)
        right = ""
        async for event in client.generate("What is 17 plus 25?"):
            right = event.text if isinstance(event, Done) else right
        for text, is_cut in ((right, False), (right[:-3] + "9 x", True)):
            events = await check_of(client, text)
            assert any(isinstance(event, Cut) for event in events) == is_cut
            assert (events[-1].text, events[-1].verified) == (right, True)


async def answers(edge: EdgeAnswerer, messages: list[dict[str, str]], principal: str = "") -> str:
    """The text of the answer to this chat, in mode hold."""
    ask = AnswerRequest(
        question=Question(messages=messages), mode="hold", patience=60.0, principal=principal
    )
    events = [event async for event in edge.answer(ask, await edge.encode(ask))]
    return str(events[-1].text)


async def test_a_chat_goes_on_with_what_both_ends_have_read_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page sends the whole chat with each question: it was read anew, after a long text for
    minutes."""
    made: list[Conversation] = []
    make = EdgeClient.conversation

    def conversation(client: EdgeClient) -> Conversation:
        made.append(make(client))
        return made[-1]

    monkeypatch.setattr(EdgeClient, "conversation", conversation)
    give_back = Mock()
    monkeypatch.setattr(Device, "give_back", give_back)
    chat = [{"role": "user", "content": "What is 17 plus 25?"}]
    async with verifier() as url, EdgeClient(verifier=url) as client:
        await client.wait_online(60)
        edge = EdgeAnswerer(client)
        chat += [
            {"role": "assistant", "content": await answers(edge, chat)},
            {"role": "user", "content": "What is 31 plus 11?"},
        ]
        again = await answers(edge, chat)
        assert len(made) == 1
        assert again == await answers(edge, chat, "another")
        assert len(made) == 2, "nobody learns by the time what another has asked"
        assert not give_back.called
        for number in range(3):
            await answers(edge, [{"role": "user", "content": f"Say {number}: Ada, Ben, Tom"}])
        assert sum(not one.closed for one in made) == 2
        assert give_back.call_count == 3, "for each that has ended: its cache is free now"
        assert again == await answers(EdgeAnswerer(client), chat)


async def test_a_stopped_answer_is_gone_on_with() -> None:
    async with verifier() as url, EdgeClient(verifier=url) as client:
        await client.wait_online(60)
        edge = EdgeAnswerer(client)
        ask = AnswerRequest(question=QUESTION, mode="provisional", patience=1.0)
        events = edge.answer(ask, await edge.encode(ask))
        async for event in events:
            if isinstance(event, Piece):
                break
        await events.aclose()
        (rests,) = client._conversations
        assert not rests.closed
        whole = [event async for event in edge.answer(ask, await edge.encode(ask))]
        assert isinstance(whole[-1], Ended)
        assert client._conversations == {rests}


@dataclass
class Now:
    """The time by which a link is judged."""

    seconds: float = 0.0


@pytest.fixture
async def watched(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[EdgeAnswerer, EdgeClient, Now]]:
    """An endpoint that is online, its client, and the time that both are told."""
    now = Now()
    for module in (answerer, connection):
        monkeypatch.setattr(module, "perf_counter", lambda: now.seconds)
    async with verifier() as url, EdgeClient(verifier=url) as client:
        await client.wait_online(60)
        yield EdgeAnswerer(client, "x"), client, now


async def test_a_link_without_a_word_is_not_called_online(
    watched: tuple[EdgeAnswerer, EdgeClient, Now],
) -> None:
    one, client, now = watched
    assert one.status()["link"] == "online"
    now.seconds = 7.0  # a ping is sent each 5 s
    assert one.status()["link"] == "online"
    now.seconds = 8.0
    late = one.status()
    assert (late["link"], late["rtt_ms"]) == ("late", None)
    async for _ in client.generate("hello", max_new_tokens=4):
        pass
    again = one.status()
    assert (again["link"], again["rtt_ms"] is None) == ("online", False)


async def test_a_rate_that_is_used_up_is_a_state_of_the_link_for_as_long(
    watched: tuple[EdgeAnswerer, EdgeClient, Now],
) -> None:
    one, client, now = watched
    assert client.link is not None
    client.link.limited_by("your rate is used up", 3.0)
    client.link.limited_by("an older turn knows less", 2.0)
    limited = one.status()
    assert (limited["link"], limited["detail"]) == ("limited", "your rate is used up")
    assert limited["rtt_ms"] is not None
    assert await one.unverified() == "", "it is verified, a little later"
    now.seconds = 3.0
    assert one.status()["link"] == "online"


def test_others_may_only_use_it_with_a_key() -> None:
    with pytest.raises(ConfigError):
        ServeSettings(host="0.0.0.0")
    assert ServeSettings(host="0.0.0.0", api_keys=("k",)).api_keys
    with pytest.raises(ConfigError):
        ServeSettings(api_keys=(" ",))


def _end_of(*events: Event) -> Ended:
    """The end of an answer that is not verified, behind these events."""
    marks = Marks(Letters(), eos_ids={9})
    for event in (Prompt(ids=[1]), *events):
        marks.take(event)
    ended = marks.take(Done(reason="eos", verified=False, text="ab", stats=STATS))
    assert isinstance(ended, Ended)
    return ended


_OWN = Token(position=1, id=7, text="ab", status="provisional")
_DOWN = Link(state="offline", detail="nothing listens there")
_LATE = Link(state="late")


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((_DOWN, _OWN, _LATE, Adopt(start=1, stop=2)), "nothing listens there"),
        ((_LATE, _OWN, _DOWN), "nothing listens there"),
        ((_LATE, _OWN), "the verifier did not answer in time"),
        ((_DOWN, _OWN, Confirm(start=1, stop=2), _LATE), "the verifier did not answer in time"),
        (
            (_DOWN, _OWN, Retract(start=1, stop=2, characters=0), _LATE, _OWN),
            "the verifier did not answer in time",
        ),
        (
            (_DOWN, _OWN, Adopt(start=1, stop=2), Retract(start=2, stop=3, characters=2), _LATE),
            "nothing listens there",
        ),
    ],
)
def test_text_that_was_written_while_there_was_no_verifier_is_no_late_answer(
    events: Sequence[Event], why: str
) -> None:
    """A verifier that had just been started, and read the prompt, was said to have been late."""
    assert _end_of(*events).why == why


def test_a_verifier_that_comes_in_mid_answer_is_not_why_the_text_is_the_devices_own() -> None:
    """The turn machine calls it late, until it has read the prompt: in virtual time, from the first
    second without it to the text that it goes on behind."""
    world = World(count=60, forward=0.25, step=0.1, on_reconnect="keep", tells=True)
    world.unreachable = True
    world.outage(0.0, 5.0)
    world.run()
    events = world.reader.events
    assert any(isinstance(event, Link) and event.state == "late" for event in events)
    assert any(isinstance(event, Adopt) for event in events)
    marks = Marks(Letters(), eos_ids={9})
    for event in (Prompt(ids=world.reader.prompt), *events):
        marks.take(event)
    ended = marks.take(Done(reason="length", verified=False, text="", stats=STATS))
    assert isinstance(ended, Ended)
    assert ended.why == "cannot reach it"
